"""What is kept of a run: a few numbers, every one with its definition."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from bench import goodput
from bench.goodput import Goodput, Timing
from core.slo import SloType
from engine.simulator.outcome import CallOutcome, ProgramOutcome, SimResult

BIN_S = 60.0
CLASSES: tuple[SloType, ...] = ("latency", "deadline", "compound")
"""Those with an objective."""


class ClassFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Of the programs of one class. A percentile that is None is infinite: too few ended."""

    programs: int
    attainment: float
    goodput_tokens_per_s: float
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    e2el_p50_s: float | None
    e2el_p95_s: float | None


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Of one run; see ``DEFINITIONS``. A percentile that is None is infinite."""

    token_goodput_per_s: float
    request_goodput_per_s: float
    attainment: float
    offered_tokens_per_s: float
    throughput_per_s: float
    programs: int
    calls: int
    classes: dict[str, ClassFigures]
    tbt_p50_s: float
    tbt_p95_s: float
    met_ttft_p95_s: float | None
    accepted_ttft_p95_s: float | None
    drops: int
    drop_after_p50_s: float | None
    drop_after_p95_s: float | None
    preemptions: int
    parks: int
    mean_running: float
    busy_fraction: float
    computed_prompt_tokens: int
    cached_prompt_tokens: int
    token_goodput_by_bin: tuple[float, ...]
    request_goodput_by_bin: tuple[float, ...]
    by_flags: Goodput | None = None
    plan_p50_ms: float = 0.0
    plan_p99_ms: float = 0.0


DEFINITIONS: Mapping[str, str] = {
    "token_goodput_per_s": goodput.DEFINITIONS["token_goodput"],
    "request_goodput_per_s": "programs (a stream, an answer, or all calls of a program) that met "
    "their own objective as a whole, per second of the window of arrivals; best-effort counts "
    "nowhere",
    "attainment": "programs that met their own objective as a whole, over those that had one",
    "offered_tokens_per_s": "the token goodput if everything was in time: no schedule has more",
    "throughput_per_s": "output tokens generated within the window of arrivals, whether of use or "
    "not, per second of it; a call's tokens are taken to be evenly spread from its first to its "
    "end",
    "programs": "requests as their senders see them: a program of many calls is one",
    "calls": "LLM calls that were sent; those of stages that never began were not",
    "ttft_p50_s, ttft_p95_s": "arrival of the program to its first token, over all programs of "
    "the class; one that never had a token counts as infinite",
    "e2el_p50_s, e2el_p95_s": "arrival of the program to the end of its last call, over all "
    "programs of the class; one that never completed counts as infinite",
    "tbt_p50_s, tbt_p95_s": "time between two tokens of a stream, over all tokens of all streams; "
    "from a histogram, the upper edge of the bin (12 % apart)",
    "met_ttft_p95_s": "TTFT of the streams that met their objective",
    "accepted_ttft_p95_s": "TTFT of the streams that were not dropped; infinite without a token",
    "drops": "calls that were refused before they were first scheduled",
    "drop_after_p50_s, drop_after_p95_s": "arrival of a call to being told that it is refused",
    "preemptions": "times that a request lost its KV",
    "parks": "times that a request was paused with its KV kept",
    "mean_running": "requests decoding, averaged over decode steps",
    "busy_fraction": "seconds in which a step ran, over all replicas' seconds",
    "plan_p50_ms, plan_p99_ms": "wall-clock time of one plan, in the process that simulated it",
    "token_goodput_by_bin, request_goodput_by_bin": f"the same rates for the programs that "
    f"arrived in each {BIN_S:.0f} s of the window",
}
"""By the name of the field of ``Figures`` and ``ClassFigures``."""


def figures_of(result: SimResult, targets_ms: Mapping[str, float]) -> Figures:
    """What is kept of ``result``; ``targets_ms`` are those of ``--goodput``, or none."""
    window_s = result.window_s
    with_slo = [one for one in result.programs if one.kind != "best_effort"]
    tokens = sum(one.goodput_tokens for one in with_slo)
    num_met = sum(one.met for one in with_slo)
    engines = result.replicas
    drops = [call.end_s - call.arrival_s for call in result.calls if call.end == "dropped"]
    streams = [one for one in result.programs if one.kind == "latency"]
    dropped = {call.program for call in result.calls if call.end == "dropped"}
    num_bins = max(math.ceil(window_s / BIN_S), 1)
    return Figures(
        token_goodput_per_s=tokens / window_s,
        request_goodput_per_s=num_met / window_s,
        attainment=num_met / max(len(with_slo), 1),
        offered_tokens_per_s=sum(one.offered_tokens for one in with_slo) / window_s,
        throughput_per_s=_generated_by(result.calls, window_s) / window_s,
        programs=len(result.programs),
        calls=len(result.calls),
        classes={
            kind: _of_class([one for one in with_slo if one.kind == kind], window_s)
            for kind in CLASSES
            if any(one.kind == kind for one in with_slo)
        },
        tbt_p50_s=_of_histogram(result.tbt_edges_s, result.tbt_counts, 0.5),
        tbt_p95_s=_of_histogram(result.tbt_edges_s, result.tbt_counts, 0.95),
        met_ttft_p95_s=percentile((one.ttft_s for one in streams if one.met), 0.95),
        accepted_ttft_p95_s=percentile(
            (one.ttft_s for one in streams if one.program not in dropped), 0.95
        ),
        drops=len(drops),
        drop_after_p50_s=percentile(drops, 0.5),
        drop_after_p95_s=percentile(drops, 0.95),
        preemptions=sum(one.preemptions for one in engines),
        parks=sum(one.parks for one in engines),
        mean_running=sum(one.mean_running for one in engines) / len(engines),
        busy_fraction=sum(one.busy_s for one in engines) / (result.end_s * len(engines) or 1.0),
        computed_prompt_tokens=sum(one.prefill_tokens for one in engines),
        cached_prompt_tokens=sum(one.cached_tokens for one in engines),
        token_goodput_by_bin=_by_bin(with_slo, num_bins, is_tokens=True),
        request_goodput_by_bin=_by_bin(with_slo, num_bins, is_tokens=False),
        by_flags=_by_flags(result, targets_ms, tokens) if targets_ms else None,
        plan_p50_ms=1e3 * (percentile(result.plan_s, 0.5) or 0.0),
        plan_p99_ms=1e3 * (percentile(result.plan_s, 0.99) or 0.0),
    )


def percentile(values: Iterable[float | None], level: float) -> float | None:
    """The nearest rank; None counts as infinite, and is what is returned for it or for nothing."""
    ranked = sorted(math.inf if value is None else value for value in values)
    if not ranked:
        return None
    found = ranked[max(math.ceil(level * len(ranked)) - 1, 0)]
    return found if math.isfinite(found) else None


def _of_class(programs: Sequence[ProgramOutcome], window_s: float) -> ClassFigures:
    firsts = [one.ttft_s for one in programs]
    ends = [one.end_s - one.arrival_s if one.is_complete else None for one in programs]
    return ClassFigures(
        programs=len(programs),
        attainment=sum(one.met for one in programs) / len(programs),
        goodput_tokens_per_s=sum(one.goodput_tokens for one in programs) / window_s,
        ttft_p50_s=percentile(firsts, 0.5),
        ttft_p95_s=percentile(firsts, 0.95),
        e2el_p50_s=percentile(ends, 0.5),
        e2el_p95_s=percentile(ends, 0.95),
    )


def _of_histogram(edges_s: Sequence[float], counts: Sequence[int], level: float) -> float:
    """The upper edge of the bin that the quantile is in; 0 for an empty histogram."""
    total, seen = sum(counts), 0
    for edge_s, count in zip(edges_s, counts, strict=False):
        seen += count
        if total and seen >= level * total:
            return edge_s
    return edges_s[-1] if total else 0.0


def _generated_by(calls: Iterable[CallOutcome], time_s: float) -> float:
    """Tokens generated until then."""
    total = 0.0
    for call in calls:
        first_s, num = call.first_token_s, call.output_tokens
        if first_s is None or first_s > time_s:
            continue
        if call.end_s <= time_s:
            total += num
        else:
            total += 1 + (num - 1) * (time_s - first_s) / (call.end_s - first_s)
    return total


def _by_bin(
    programs: Iterable[ProgramOutcome], num_bins: int, *, is_tokens: bool
) -> tuple[float, ...]:
    sums = [0.0] * num_bins
    for one in programs:
        place = min(int(one.arrival_s / BIN_S), num_bins - 1)
        sums[place] += one.goodput_tokens if is_tokens else one.met
    return tuple(total / BIN_S for total in sums)


def _by_flags(result: SimResult, targets_ms: Mapping[str, float], tokens: int) -> Goodput:
    calls = [
        Timing(
            None if call.first_token_s is None else call.first_token_s - call.arrival_s,
            call.end_s - call.arrival_s,
            call.output_tokens,
            call.end == "finished",
        )
        for call in result.calls
    ]
    return goodput.evaluate(calls, targets_ms, result.window_s, goodput_tokens=tokens)
