"""Programs of many calls to measure with: read from logs, jittered, or made up.

A program is its stages, a stage the tokens of its calls and the time of the tools before it:
numbers and the names of roles, no text.
"""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from core.names import name_hash
from graphs.protocol import Arrived, Finished
from graphs.shape import Call, Pace, ProgramShape, StageShape, set_hash

PACE = Pace(prefill_s=5e-5, step_s=0.0078, token_s=2e-4)
"""A call alone is answered at 125 tokens a second, as the fastest of the logged calls were."""
MODEL = name_hash("bench model")
TOOL = name_hash("bench tool")
"""The logs say that tools ran, not which."""
JITTER = 0.25
"""Standard deviation of the log of a jittered length."""


class Stage(msgspec.Struct, frozen=True):
    """The calls between two barriers.

    Attributes:
        role: of its calls.
        has_tools: whether tools ran before it.
        tool_s: how long; 0 where nobody noted it.
        calls: input and output tokens of each; the first is the first to arrive.
    """

    role: str
    has_tools: bool
    tool_s: float
    calls: tuple[tuple[int, int], ...]

    @property
    def tools(self) -> int:
        """As the product has it: whether tools ran, since none has a name here."""
        return set_hash((TOOL,) if self.has_tools else ())

    def shape(self) -> StageShape:
        """The whole stage."""
        outputs = [output for _, output in self.calls]
        return StageShape(
            MODEL,
            name_hash(self.role),
            len(self.calls),
            float(sum(tokens for tokens, _ in self.calls)),
            float(sum(outputs)),
            float(max(outputs)),
            self.tool_s,
            self.tools,
        )

    def opening(self) -> StageShape:
        """What is known of it when its first call has arrived."""
        first = float(self.calls[0][0])
        return StageShape(MODEL, name_hash(self.role), 1, first, 0.0, 0.0, self.tool_s, self.tools)


class Program(msgspec.Struct, frozen=True):
    """A task, and the workload that it is from."""

    source: str
    task: str
    stages: tuple[Stage, ...]

    def shape(self) -> ProgramShape:
        """As a pattern, of an application without a name."""
        return ProgramShape(0, tuple(stage.shape() for stage in self.stages))


# Logs.


def read(path: Path, pace: Pace = PACE) -> list[Program]:
    """The programs of a CSV with the columns of ``compound_calls.csv``.

    Where calls have a ``start_s``, the tools before a stage took what is left of the gap to
    the stage before after that has been answered at ``pace``; elsewhere no time is known.
    Raises OSError, or ValueError naming the line.
    """
    tasks: dict[tuple[str, str], list[_Row]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for number, fields in enumerate(csv.DictReader(file), start=2):
            try:
                row = _row(fields)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: {error!r}") from error
            tasks.setdefault((fields["source"], fields["task"]), []).append(row)
    return [Program(source, task, _stages(rows, pace)) for (source, task), rows in tasks.items()]


class _Row(NamedTuple):
    stage: int
    role: str
    start_s: float | None
    input_tokens: int
    output_tokens: int
    tools_after: int


def _row(fields: Mapping[str, str]) -> _Row:
    row = _Row(
        int(fields["stage"]),
        fields["role"],
        float(fields["start_s"]) if fields["start_s"] else None,
        int(fields["input_tokens"]),
        int(fields["output_tokens"]),
        int(fields["tools_after"]),
    )
    if not fields["source"] or min(row.input_tokens, row.output_tokens, row.tools_after) < 0:
        raise ValueError("a call has a source, and no negative counts")
    return row


def _stages(rows: Iterable[_Row], pace: Pace) -> tuple[Stage, ...]:
    by_stage: dict[int, list[_Row]] = {}
    for row in rows:
        by_stage.setdefault(row.stage, []).append(row)
    stages = []
    before: list[_Row] = []
    for _, now in sorted(by_stage.items()):
        calls = tuple((row.input_tokens, row.output_tokens) for row in now)
        has_tools = any(row.tools_after for row in before)
        stages.append(Stage(now[0].role, has_tools, _gap_s(before, now, pace), calls))
        before = now
    return tuple(stages)


def _gap_s(before: Sequence[_Row], now: Sequence[_Row], pace: Pace) -> float:
    starts = [row.start_s for row in now if row.start_s is not None]
    ends = [
        row.start_s + call_s(row.input_tokens, row.output_tokens, pace)
        for row in before
        if row.start_s is not None
    ]
    return max(min(starts) - max(ends), 0.0) if starts and ends else 0.0


def call_s(input_tokens: int, output_tokens: int, pace: Pace) -> float:
    """How long a call takes alone."""
    return input_tokens * pace.prefill_s + output_tokens * (pace.step_s + pace.token_s)


# More of them.


def jittered(programs: Sequence[Program], num: int, seed: int) -> list[Program]:
    """``num`` of ``programs``, drawn with replacement, every length and time a little other."""
    rng = np.random.default_rng(seed)
    return [_jittered(programs[index], rng) for index in rng.integers(len(programs), size=num)]


def _jittered(program: Program, rng: np.random.Generator) -> Program:
    def near(tokens: int) -> int:
        return max(round(tokens * rng.lognormal(0.0, JITTER)), 1)

    stages = [
        Stage(
            stage.role,
            stage.has_tools,
            stage.tool_s * rng.lognormal(0.0, JITTER),
            tuple((near(tokens), near(output)) for tokens, output in stage.calls),
        )
        for stage in program.stages
    ]
    return Program(program.source, program.task, tuple(stages))


class Part(NamedTuple):
    """A stage of made-up programs: medians, and the spread of logarithms."""

    role: str
    input_tokens: int
    output_tokens: int
    output_spread: float = 0.3
    num_calls: int = 1
    calls_spread: float = 0.0
    grows: int = 0
    """Input tokens more for each stage before it: a conversation."""
    tools: float = 0.0
    """How often tools run before it."""
    tool_s: float = 0.0


class Kind(NamedTuple):
    """An application: how its programs begin, what they repeat, how they end."""

    name: str
    share: float
    opening: tuple[Part, ...]
    loop: tuple[Part, ...]
    num_rounds: float
    rounds_spread: float
    closing: tuple[Part, ...] = ()


KINDS: tuple[Kind, ...] = (
    Kind(
        "tree search",
        0.22,
        (Part("propose", 174, 149), Part("value", 367, 45, 0.2, 18, 0.5)),
        (Part("propose", 172, 60, 0.3, 5), Part("value", 365, 45, 0.2, 25, 0.7)),
        3.0,
        0.0,
    ),
    Kind(
        "drafts and votes",
        0.22,
        (),
        (Part("sample", 114, 70, 0.2, 5), Part("vote", 430, 190, 0.15, 5)),
        1.0,
        0.0,
        (Part("sample", 195, 334, 0.15, 5), Part("vote", 2170, 190, 0.15, 5)),
    ),
    Kind(
        "many agents",
        0.06,
        (Part("plan", 310, 240, 0.5), Part("plan", 700, 200, 0.5)),
        (Part("ledger", 1020, 340, 0.15), Part("worker", 1335, 150, 1.2, tools=0.6, tool_s=3.0)),
        15.0,
        0.35,
    ),
    Kind(
        "coding agent",
        0.04,
        (Part("coder", 1300, 100, 0.4),),
        (Part("coder", 1300, 95, 0.4, grows=400, tools=1.0, tool_s=0.2),),
        20.0,
        0.35,
    ),
    Kind(
        "research",
        0.02,
        (Part("coordinator", 12, 28, 0.2), Part("planner", 40, 420, 0.3)),
        (Part("researcher", 500, 160, 1.4, grows=1400, tools=0.8),),
        6.0,
        0.5,
        (Part("reporter", 3600, 1250, 0.5),),
    ),
    Kind(
        "customer chat",
        0.44,
        (Part("agent", 1280, 30, 0.5),),
        (Part("agent", 1220, 41, 0.87, grows=211, tools=0.47),),
        10.0,
        0.5,
    ),
)
"""As the workloads of ``compound_calls.csv`` are, in medians, spreads and shares."""


def synthetic(num: int, seed: int) -> list[Program]:
    """Made-up programs of ``KINDS``."""
    rng = np.random.default_rng(seed)
    shares = np.array([kind.share for kind in KINDS])
    drawn = rng.choice(len(KINDS), size=num, p=shares / shares.sum())
    return [_made_up(KINDS[kind], f"{index}", rng) for index, kind in enumerate(drawn)]


def _made_up(kind: Kind, task: str, rng: np.random.Generator) -> Program:
    rounds = max(round(kind.num_rounds * rng.lognormal(0.0, kind.rounds_spread)), 1)
    parts = (*kind.opening, *(kind.loop * rounds), *kind.closing)
    return Program(kind.name, task, tuple(_stage(part, i, rng) for i, part in enumerate(parts)))


def _stage(part: Part, place: int, rng: np.random.Generator) -> Stage:
    num_calls = max(round(part.num_calls * rng.lognormal(0.0, part.calls_spread)), 1)
    tokens = part.input_tokens + part.grows * place
    has_tools = place > 0 and rng.random() < part.tools
    calls = tuple(
        (
            max(round(tokens * rng.lognormal(0.0, 0.1)), 1),
            max(round(part.output_tokens * rng.lognormal(0.0, part.output_spread)), 1),
        )
        for _ in range(num_calls)
    )
    tool_s = part.tool_s * float(rng.lognormal(0.0, 1.0)) if has_tools else 0.0
    return Stage(part.role, has_tools, tool_s, calls)


# As the engine tells of them.


class Unfolding(NamedTuple):
    """What happens in one stage."""

    arrived: tuple[Arrived, ...]
    finished: tuple[Finished, ...]


def unfold(
    program: Program, number: int, *, opened_s: float, deadline_s: float, pace: Pace = PACE
) -> list[Unfolding]:
    """The events of a program that runs at ``pace``, stage by stage.

    Args:
        number: the program's hash, and the first call's node.
        opened_s: when its first call arrives.
        deadline_s: of the whole, from there.
    """
    found = []
    at_s, place = opened_s, 0
    for stage in program.stages:
        at_s += stage.tool_s
        tools = (TOOL,) if stage.has_tools else ()
        arrived, finished = [], []
        end_s = at_s + stage.shape().time_s(pace) - stage.tool_s
        for input_tokens, output_tokens in stage.calls:
            node = number + place
            call = Call(node, name_hash(stage.role), MODEL, (), tools, input_tokens, at_s)
            due_s = opened_s + deadline_s
            arrived.append(Arrived(number, 0, place, call, opened_s, due_s, is_final=False))
            finished.append(Finished(number, node, output_tokens, end_s, has_failed=False))
            place += 1
        found.append(Unfolding(tuple(arrived), tuple(finished)))
        at_s = end_s
    return found
