"""A load as it was served, for the simulator to serve again, and both beside each other.

What is replayed is what came in: when, what it asked for, how many tokens its prompts had, and
how many its answers had in the end. Nothing of when the server did what goes in.

SGLang's overlap schedule takes the result of a step when the next one is launched, which on a
CPU is after that one has run: each token is a step late, and an answer occupies its place for a
step more than it has tokens. So it is replayed with a token more, of which the first counts
nowhere and token i + 1 is due when token i of the real one is.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from bench import compound
from bench.answers import Answer
from bench.load import CLASSES, Offer, Result, Targets
from bench.simulations.figures import figures_of, percentile
from core.slo import BestEffortSlo, CompoundSlo, DeadlineSlo, LatencySlo
from engine.simulator.lanes import TBT_EDGES_S
from engine.simulator.outcome import SimResult
from engine.simulator.workload import SimCall, SimProgram, SimSlo, SimStage, Workload

TEMPLATE = 1
"""Name of the text that the chat template puts in front of every prompt."""


class Replay(msgspec.Struct, frozen=True):
    """A workload, and how much of it is known."""

    workload: Workload
    num_borrowed: int
    """Requests and programs whose lengths are of another policy's run: here they did not end."""
    num_guessed: int
    """Those that ended nowhere; what was seen of them is taken for the rest too."""


class Engine(NamedTuple):
    """What of the server matters beside its steps."""

    overhead_s: float
    """What a request takes beside them."""
    late_tokens: int = 0
    """1 where results are taken a step late."""


class Lengths(NamedTuple):
    """Calls of one offer, as they turned out."""

    calls: tuple[Answer, ...]
    is_borrowed: bool = False
    is_guessed: bool = False


def replay(
    offers: Sequence[Offer],
    served: Sequence[Result],
    others: Sequence[Sequence[Result]],
    targets: Targets,
    window_s: float,
    engine: Engine,
) -> Replay:
    """The load of ``offers`` as ``served`` by one policy.

    Args:
        others: the same offers served by other policies, for lengths that are not known here.
        engine: a request comes to it later by its overhead, and its objective is so much
            shorter there.
    """
    template_tokens = template_of([served, *others])
    lengths = [
        lengths_of(offer, served[index], [run[index] for run in others])
        for index, offer in enumerate(offers)
    ]
    programs = [
        _program(index, offer, served[index], known.calls, targets, engine, template_tokens)
        for index, (offer, known) in enumerate(zip(offers, lengths, strict=True))
    ]
    programs.sort(key=lambda program: program.arrival_s)
    last_s = max((program.arrival_s for program in programs), default=0.0)
    return Replay(
        Workload(programs=tuple(programs), window_s=max(window_s, last_s), name="replay"),
        sum(known.is_borrowed for known in lengths),
        sum(known.is_guessed for known in lengths),
    )


def template_of(runs: Iterable[Sequence[Result]]) -> int:
    """Tokens that all prompts begin with: what was most often cached of a first prompt."""
    cached = Counter(
        result.calls[0].cached_tokens
        for run in runs
        for result in run
        if result.calls and result.calls[0].cached_tokens
    )
    return cached.most_common(1)[0][0] if cached else 0


def lengths_of(offer: Offer, mine: Result, others: Sequence[Result]) -> Lengths:
    """The whole of an offer's calls, in order of stage."""
    for place, result in enumerate([mine, *others]):
        if is_whole(offer, result):
            return Lengths(result.calls, is_borrowed=place > 0)
    seen = next((result.calls for result in [mine, *others] if result.calls), ())
    usable = [call for call in seen if call.input_tokens and call.output_tokens]
    any_call = usable[-1] if usable else _unknown(offer)
    return Lengths((any_call,) * _num_calls(offer), is_guessed=True)


def is_whole(offer: Offer, result: Result) -> bool:
    """Whether every call of it was made and ended."""
    return len(result.calls) == _num_calls(offer) and all(
        call.ending == "finished" and call.input_tokens and call.output_tokens
        for call in result.calls
    )


def _num_calls(offer: Offer) -> int:
    if offer.slo_type != "compound":
        return 1
    return compound.num_calls(compound.APPLICATIONS[offer.application])


def _unknown(offer: Offer) -> Answer:
    """Nothing was seen of it: about a word for four letters, and half of what it may answer."""
    tokens = max(len(offer.prompt) // 4, 1)
    return Answer(0.0, 0.0, None, tokens, max(offer.max_tokens // 2, 1), 0, "finished")


def _program(
    index: int,
    offer: Offer,
    result: Result,
    calls: Sequence[Answer],
    targets: Targets,
    engine: Engine,
    template_tokens: int,
) -> SimProgram:
    own = 2 + index
    plan: Sequence[Sequence[str]] = (("",),)
    if offer.slo_type == "compound":
        stages = compound.APPLICATIONS[offer.application]
        plan = [[role.name for role in stage] for stage in stages]
    found, left = [], list(calls)
    for number, roles in enumerate(plan):
        answers, left = left[: len(roles)], left[len(roles) :]
        made = [
            _call(answer, offer, role, (number, place), own, template_tokens, engine.late_tokens)
            for place, (role, answer) in enumerate(zip(roles, answers, strict=True))
        ]
        # Between two stages the client hears of one and asks for the next.
        found.append(SimStage(calls=tuple(made), tool_s=engine.overhead_s if number else 0.0))
    return SimProgram(
        arrival_s=result.start_s + engine.overhead_s,
        application=offer.application,
        slo=_slo(offer, targets, engine, len(plan)),
        stages=tuple(found),
    )


def _call(
    answer: Answer,
    offer: Offer,
    role: str,
    where: tuple[int, int],
    own: int,
    template_tokens: int,
    late_tokens: int,
) -> SimCall:
    """A later stage begins with the text of the first, as far as that was found in the cache."""
    stage, place = where
    is_compound = offer.slo_type == "compound"
    prefix, cached = TEMPLATE, min(template_tokens, answer.input_tokens)
    if is_compound and stage and answer.cached_tokens > template_tokens:
        prefix, cached = own, min(answer.cached_tokens, answer.input_tokens)
    return SimCall(
        input_tokens=answer.input_tokens,
        output_tokens=answer.output_tokens + late_tokens,
        max_output_tokens=max(offer.max_tokens, answer.output_tokens) + late_tokens,
        role=role,
        prefix=prefix if cached else 0,
        prefix_tokens=cached,
        leaves=own if is_compound and (stage, place) == (0, 0) else 0,
    )


def _slo(offer: Offer, targets: Targets, engine: Engine, num_stages: int) -> SimSlo:
    least_s, overhead_s = 1e-3, engine.overhead_s
    match offer.slo_type:
        case "latency":
            ttft_s = targets.ttft_s - overhead_s - engine.late_tokens * targets.tbt_s
            return LatencySlo(max(ttft_s, least_s), targets.tbt_s)
        case "deadline":
            return DeadlineSlo(max(targets.deadline_s - overhead_s, least_s))
        case "compound":
            return CompoundSlo(max(num_stages * targets.deadline_s - overhead_s, least_s), "")
        case _:
            return BestEffortSlo(600.0)


# Figures, alike for both.


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Of one policy's turn, really served or simulated.

    TTFT and TBT are of streams; TBT by the same bins for both, 12 % apart. None: infinite.
    """

    token_goodput_per_s: float
    request_goodput_per_s: float
    attainment: dict[str, float]
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    tbt_p50_s: float
    tbt_p95_s: float
    output_tokens: int
    end_s: float
    """When the last request was over."""


def real_figures(results: Sequence[Result], window_s: float) -> Figures:
    """Of what the client saw."""
    with_slo = [item for item in results if item.slo_type != "best_effort"]
    streams = [item for item in results if item.slo_type == "latency"]
    gaps_s = [gap / 1e3 for item in streams for call in item.calls for gap in call.gaps_ms]
    return Figures(
        token_goodput_per_s=sum(item.goodput_tokens for item in with_slo) / window_s,
        request_goodput_per_s=sum(item.met for item in with_slo) / window_s,
        attainment={
            name: sum(item.met for item in results if item.slo_type == name) / num
            for name in CLASSES
            if name != "best_effort" and (num := sum(item.slo_type == name for item in results))
        },
        ttft_p50_s=percentile((item.ttft_s for item in streams), 0.5),
        ttft_p95_s=percentile((item.ttft_s for item in streams), 0.95),
        tbt_p50_s=binned(percentile(gaps_s, 0.5)),
        tbt_p95_s=binned(percentile(gaps_s, 0.95)),
        output_tokens=sum(item.output_tokens for item in results),
        end_s=max((item.start_s + item.e2el_s for item in results), default=0.0),
    )


def binned(seconds: float | None) -> float:
    """As a histogram of the simulator would tell it; 0 for nothing."""
    if seconds is None:
        return 0.0
    return TBT_EDGES_S[min(bisect_left(TBT_EDGES_S, seconds), len(TBT_EDGES_S) - 1)]


def simulated_figures(result: SimResult, window_s: float, engine: Engine) -> Figures:
    """Of a simulation of the same load, without the tokens that only the replay has.

    A first token that comes a step late is a median TBT later than the one of the replay.
    """
    figures = figures_of(result, {})
    streams = figures.classes.get("latency")
    firsts = (streams.ttft_p50_s, streams.ttft_p95_s) if streams else (None, None)
    later_s = engine.overhead_s + engine.late_tokens * figures.tbt_p50_s
    p50_s, p95_s = (None if first is None else first + later_s for first in firsts)
    num_calls = Counter(call.program for call in result.calls)
    tokens = sum(
        max(one.goodput_tokens - engine.late_tokens * num_calls[one.program], 0)
        for one in result.programs
    )
    return Figures(
        token_goodput_per_s=tokens / window_s,
        request_goodput_per_s=figures.request_goodput_per_s * result.window_s / window_s,
        attainment={name: one.attainment for name, one in figures.classes.items()},
        ttft_p50_s=p50_s,
        ttft_p95_s=p95_s,
        tbt_p50_s=figures.tbt_p50_s,
        tbt_p95_s=figures.tbt_p95_s,
        output_tokens=sum(call.output_tokens - engine.late_tokens for call in result.calls),
        end_s=result.end_s,
    )


def error(simulated: float | None, real: float | None) -> float | None:
    """Signed, as a share of the real figure; None where one of them is not a number."""
    if simulated is None or real is None:
        return None
    return (simulated - real) / real if real else (0.0 if simulated == real else None)


def rows_of(policy: str, real: Figures, simulated: Figures) -> list[list[object]]:
    """A table's rows: figure, real, simulated, error."""
    pairs: list[tuple[str, float | None, float | None]] = [
        ("token goodput/s", real.token_goodput_per_s, simulated.token_goodput_per_s),
        ("request goodput/s", real.request_goodput_per_s, simulated.request_goodput_per_s),
        *(
            (f"{name} SLO met", value, simulated.attainment.get(name))
            for name, value in real.attainment.items()
        ),
        ("TTFT p50 s", real.ttft_p50_s, simulated.ttft_p50_s),
        ("TTFT p95 s", real.ttft_p95_s, simulated.ttft_p95_s),
        ("TBT p50 s", real.tbt_p50_s, simulated.tbt_p50_s),
        ("TBT p95 s", real.tbt_p95_s, simulated.tbt_p95_s),
        ("last end s", real.end_s, simulated.end_s),
    ]
    return [
        [policy, name, ours, theirs, percent(error(theirs, ours))] for name, ours, theirs in pairs
    ]


def percent(share: float | None) -> str:
    """For a table."""
    return "-" if share is None else f"{100 * share:+.0f} %"


def summarise(real: Mapping[str, Figures], simulated: Mapping[str, Figures]) -> dict[str, float]:
    """``goodput_error_fraction_worst`` and ``same_ranking``, both of token goodput."""
    errors = [
        error(simulated[policy].token_goodput_per_s, figures.token_goodput_per_s)
        for policy, figures in real.items()
    ]
    worst = max((1.0 if one is None else abs(one) for one in errors), default=1.0)
    rankings = [
        sorted(real, key=lambda policy: of[policy].token_goodput_per_s) for of in (real, simulated)
    ]
    return {
        "goodput_error_fraction_worst": round(worst, 4),
        "same_ranking": float(rankings[0] == rankings[1]),
    }
