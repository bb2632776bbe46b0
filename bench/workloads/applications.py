"""The paper's four applications as statistical models of a few numbers each.

The paper's table of lengths has two of them, alone ("single") and as programs ("compound"). Its
compound rows are sums of its single rows: for the chatbot 14 x (93, 318) = (1302, 4452) against
(1300, 4458), and sqrt(14) x (244, 313) = (913, 1171) against the deviations (912, 1176); for
deep research (12223, 3541) / (1911, 534) = (6.4, 6.6), with deviations that ask for a number
of calls that varies by about 2.6. So a compound program here is that many calls of lengths as
single requests have them, put into stages: one mixture fits both rows of the table.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from bench.workloads.lengths import Lengths, Part, lognormal
from engine.simulator.workload import SimCall, SimStage

MAX_OUTPUT = 4096
HEADERS = 1 << 8
"""Names of prefixes below it are texts that all programs of an application share."""

Stages = tuple[SimStage, ...]


class Study(NamedTuple):
    """A row of the paper's user study, as weights of the three request classes.

    "Real-Time" is latency-sensitive, "Direct Use" deadline-sensitive. "Content-Based" is taken
    for compound: what such a user needs shows with each step's content. That is our reading.
    """

    latency: float
    deadline: float
    compound: float


class Application(NamedTuple):
    """How its single requests and its programs look."""

    name: str
    study: Study
    input: Lengths
    output: Lengths
    compound: Callable[[np.random.Generator, Iterator[int]], Stages]
    """The stages of one program; the iterator gives names for its shared prefixes."""

    def single(self, rng: np.random.Generator) -> Stages:
        """One request: one stage of one call."""
        call = _call(self, self.input.tokens(rng, 1)[0], self.output.tokens(rng, 1)[0])
        return (SimStage(calls=(call,)),)


def _call(application: Application, input_tokens: int, output_tokens: int) -> SimCall:
    return SimCall(
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        max_output_tokens=round(application.output.high),
    )


# Chatbot.

CHAT_CALLS = 14
CHAT_SIDE_BY_SIDE = (2, 5)


def chat_program(rng: np.random.Generator, names: Iterator[int]) -> Stages:
    """Fourteen questions in stages of 2 to 5 side by side: 4.3 stages on average.

    The number of calls is from the paper's table (see the module); that they come 2 to 5 at
    once is ours, near the 4 stages of 5 calls of ``tot_writing`` in ``compound_calls.csv``.
    No call continues another: the table's 1,300 tokens of input have no room for the 4,458
    tokens that were answered.
    """
    inputs = CHATBOT.input.tokens(rng, CHAT_CALLS)
    outputs = CHATBOT.output.tokens(rng, CHAT_CALLS)
    calls = [_call(CHATBOT, tokens, output) for tokens, output in zip(inputs, outputs, strict=True)]
    stages, at = [], 0
    while at < CHAT_CALLS:
        width = int(rng.integers(CHAT_SIDE_BY_SIDE[0], CHAT_SIDE_BY_SIDE[1], endpoint=True))
        stages.append(SimStage(calls=tuple(calls[at : at + width])))
        at += width
    return tuple(stages)


CHATBOT = Application(
    "chatbot",
    # The study has no chatbot: its row of report generation, the one text for a reader.
    Study(39.1, 36.2, 24.7),
    Lengths(
        (Part(0.8211, 21.4, 0.785), Part(0.1694, 285.8, 0.455), Part(0.0095, 1231.7, 1.25)), 4096
    ),
    Lengths(
        (Part(0.5075, 58.8, 1.729), Part(0.4098, 335.3, 0.572), Part(0.0827, 2012.7, 1.377)), 1024
    ),
    chat_program,
)
"""Lengths: fitted to both rows of the paper's table. A P95 of exactly 1,024 is a limit."""


# Deep research.

RESEARCH_CALLS_MEAN = 6.5
RESEARCH_CALLS_STD = 2.6
RESEARCH_LEAST_CALLS = 3
RESEARCH_SIDE_BY_SIDE = (1, 3)
SEARCH_S = lognormal(1.0, 1.5, 20.0, 0.05)
"""Tool times of ``magentic_one`` in ``compound_calls.csv``: median 1.0 s, a long tail."""


def research_program(rng: np.random.Generator, names: Iterator[int]) -> Stages:
    """A plan, rounds of 1 to 3 searches side by side, a report: 4.3 stages on average.

    The number of calls (6.5, deviation 2.6, at least 3) is from the paper's table, the order
    from ``deer_flow_research`` in ``compound_calls.csv`` (planner, researchers, reporter).
    Lengths are drawn as for single requests and dealt out: the shortest prompt is the plan's,
    the longest prompt and the longest answer the report's. All later prompts begin with the plan.
    """
    shape = (RESEARCH_CALLS_MEAN / RESEARCH_CALLS_STD) ** 2
    num = max(round(rng.gamma(shape, RESEARCH_CALLS_MEAN / shape)), RESEARCH_LEAST_CALLS)
    inputs = _ends_first(RESEARCH.input.tokens(rng, num))
    outputs = RESEARCH.output.tokens(rng, num)
    outputs.append(outputs.pop(outputs.index(max(outputs))))
    plan = next(names)
    context = inputs[0] + outputs[0]
    calls = [
        SimCall(
            input_tokens=tokens,
            output_tokens=output,
            max_output_tokens=MAX_OUTPUT,
            role="report" if place == num - 1 else "search" if place else "plan",
            prefix=plan if place else 0,
            prefix_tokens=min(context, tokens) if place else 0,
            leaves=0 if place else plan,
        )
        for place, (tokens, output) in enumerate(zip(inputs, outputs, strict=True))
    ]
    return (
        SimStage(calls=(calls[0],)),
        *_searches(calls[1:-1], rng),
        SimStage(calls=(calls[-1],)),
    )


def _ends_first(lengths: list[int]) -> list[int]:
    """The shortest to the front, the longest to the end, the others as they came."""
    lengths.insert(0, lengths.pop(lengths.index(min(lengths))))
    lengths.append(lengths.pop(lengths.index(max(lengths))))
    return lengths


def _searches(calls: list[SimCall], rng: np.random.Generator) -> list[SimStage]:
    stages, at = [], 0
    while at < len(calls):
        width = int(rng.integers(*RESEARCH_SIDE_BY_SIDE, endpoint=True))
        tool_s = float(SEARCH_S.draw(rng, 1)[0])
        group = tuple(calls[at : at + width])
        stages.append(SimStage(calls=group, tool_s=tool_s, tools=("web_search",)))
        at += width
    return stages


RESEARCH = Application(
    "deep_research",
    Study(38.6, 47.1, 14.3),
    Lengths((Part(0.615, 149.0, 1.118), Part(0.385, 3666.0, 0.643)), 16384),
    Lengths(
        (Part(0.2776, 160.6, 0.868), Part(0.6258, 446.1, 0.405), Part(0.0966, 1536.4, 1.009)),
        MAX_OUTPUT,
    ),
    research_program,
)
"""Lengths: fitted to both rows of the paper's table."""


# Math reasoning.


class Round(NamedTuple):
    """One level of the tree: thoughts proposed, then candidates valued."""

    proposals: int
    answer: float
    """Median of a proposal's answer."""
    answer_spread: float
    candidates: float
    """Median number of candidates; each is valued by ``VOTES`` calls."""
    candidates_spread: float
    skipped: float
    """How often every candidate had been valued before, so that the stage is absent."""


TREE: tuple[Round, ...] = (
    Round(1, 149.0, 0.29, 5.2, 0.52, 0.0),
    Round(5, 101.0, 0.27, 7.9, 0.57, 0.01),
    Round(5, 58.0, 0.26, 4.6, 0.62, 0.17),
    Round(5, 57.0, 0.90, 7.8, 0.77, 0.01),
)
VOTES = 3
MOST_CANDIDATES = 52
NEIGHBOURS = 0.47
"""Correlation of the logarithms of two rounds' candidates: a hard puzzle is hard throughout."""
VALUE_ANSWER = 45.0
VALUE_TASK_SPREAD = 0.24
VALUE_CALL_SPREAD = 0.2
"""Within a task it is ours: the logs have a task's mean only."""
PROPOSE_PROMPT = 172
PROPOSE_HEADER = 150
VALUE_PROMPT = 364
VALUE_HEADER = 345
"""Tokens of examples that all programs' prompts begin with, from the spread of the prompts."""
PROPOSE, VALUE = 1, 2


def tree_program(rng: np.random.Generator, names: Iterator[int]) -> Stages:
    """Tree of thought by breadth: four times propose, then value: 7.8 stages, 104 calls.

    Fitted to the 100 tasks of ``tot_game24`` in ``compound_calls.csv``: 97 calls at the median,
    182 at P95, up to 156 side by side, 35,100 tokens of input and 5,480 of output on average.
    """
    task = VALUE_ANSWER * float(rng.lognormal(0.0, VALUE_TASK_SPREAD))
    values = lognormal(task, VALUE_CALL_SPREAD, MAX_OUTPUT)
    stages: list[SimStage] = []
    level = 0.0
    for depth, step in enumerate(TREE):
        level = NEIGHBOURS * level + float(rng.standard_normal()) * (
            (1 - NEIGHBOURS**2) ** 0.5 if depth else 1.0
        )
        outputs = lognormal(step.answer, step.answer_spread, MAX_OUTPUT)
        proposals = outputs.tokens(rng, step.proposals)
        stages.append(_thoughts("propose", PROPOSE, PROPOSE_PROMPT, PROPOSE_HEADER, proposals))
        num = round(step.candidates * float(np.exp(step.candidates_spread * level)))
        votes = values.tokens(rng, VOTES * min(max(num, 1), MOST_CANDIDATES))
        if rng.random() >= step.skipped:
            stages.append(_thoughts("value", VALUE, VALUE_PROMPT, VALUE_HEADER, votes))
    return tuple(stages)


def _thoughts(role: str, name: int, prompt: int, header: int, outputs: list[int]) -> SimStage:
    return SimStage(
        calls=tuple(
            SimCall(
                input_tokens=prompt,
                output_tokens=output,
                max_output_tokens=MAX_OUTPUT,
                role=role,
                prefix=name,
                prefix_tokens=header,
            )
            for output in outputs
        )
    )


MATH = Application(
    "math_reasoning",
    Study(28.9, 47.4, 23.7),
    lognormal(56.0, 0.52, 4096),
    lognormal(438.0, 0.38, MAX_OUTPUT),
    tree_program,
)
"""Single: the math prompts of ``prompts.jsonl`` (303; mean 66, P95 128) and the answers of
gpt-4-0314 to those of them that are users' (28; mean 468, P95 813)."""


# Code generation.

CODE_STEPS = lognormal(4.5, 0.5, 12, 2)
CODE_FIRST_PROMPT = lognormal(560.0, 0.5, 8192)
CODE_ANSWER = lognormal(352.0, 0.5, MAX_OUTPUT)
CODE_SHORT_RESULT = 15
CODE_LONG_RESULTS = 0.37
CODE_RESULT = lognormal(300.0, 1.2, 3500)
CODE_TOOL_S = lognormal(0.2, 1.26, 20.0, 0.01)


def code_program(rng: np.random.Generator, names: Iterator[int]) -> Stages:
    """One agent writes code, another runs it, the first repairs: 5 stages, a growing context.

    The paper gives no figures of its application (AutoGen's conversations). Answers are as long
    as those to single requests for code; what the tools give and how long they take is as in
    ``mini_swe_agent`` of ``compound_calls.csv``; the number of rounds and the first prompt are
    our choice. The agents of that log have 20 stages and 113,000 prompt tokens, nearly all of
    them the context before, so that a mix with them is theirs alone: they are there by
    ``WorkloadSpec.calls``. A prompt is the whole context before it and a result.
    """
    steps = CODE_STEPS.tokens(rng, 1)[0]
    outputs = CODE_ANSWER.tokens(rng, steps)
    long_results = CODE_RESULT.tokens(rng, steps)
    is_long = rng.random(steps) < CODE_LONG_RESULTS
    tools = CODE_TOOL_S.draw(rng, steps).tolist()
    prompt, context, before = CODE_FIRST_PROMPT.tokens(rng, 1)[0], 0, 0
    stages = []
    for step, output in enumerate(outputs):
        name = next(names) if step < steps - 1 else 0
        call = SimCall(
            input_tokens=prompt,
            output_tokens=output,
            max_output_tokens=MAX_OUTPUT,
            role="coder",
            prefix=before,
            prefix_tokens=context,
            leaves=name,
        )
        ran = ("shell",) if step else ()
        stages.append(SimStage(calls=(call,), tool_s=tools[step] if step else 0.0, tools=ran))
        before, context = name, prompt + output
        prompt = context + (long_results[step] if is_long[step] else CODE_SHORT_RESULT)
    return tuple(stages)


CODE = Application(
    "code_generation",
    Study(38.1, 30.5, 31.4),
    lognormal(60.0, 1.11, 8192),
    lognormal(352.0, 0.5, MAX_OUTPUT),
    code_program,
)
"""Single: the code prompts of ``prompts.jsonl`` (406; mean 113, P95 320) and the answers of
gpt-4-0314 to those of them that are users' (227; mean 392, P95 763)."""

APPLICATIONS: Mapping[str, Application] = {
    application.name: application for application in (CHATBOT, RESEARCH, MATH, CODE)
}
