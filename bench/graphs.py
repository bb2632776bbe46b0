"""Pattern graphs: how fast a match is, how small a pattern, and how good the shares are.

Latency per new stage against 50, 500 and 2,000 patterns, in this process and through the socket
of a real graphs process. Bytes a pattern and the time of k-medoids. Errors of the next stage's
share and sub-deadline on programs held out, against the plain average of their own kind.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench import calls, report
from bench.calls import Program
from bench.graphs_latency import latency
from bench.shares import (
    COLUMNS,
    EqualShares,
    Errors,
    Forecaster,
    Matching,
    NoForecast,
    PerSource,
    PlainAverage,
    Runs,
    figure,
    is_better,
    judge,
    split,
)
from core.clock import MonotonicClock
from graphs.medoids import distance_matrix, k_medoids
from graphs.patterns import PatternPack
from graphs.store import KEPT_FRACTION

NUM_PATTERNS = (50, 500, 2000)
NUM_CLUSTERED = (500, 2000)
SEEN = (0, 1, 2, 3, 5, 8, 12, 20)
HISTORY = (5, 10, 25, 50, 100, 200)
CAPACITIES = (32, 64, 128)
NUM_SYNTHETIC = 450

MIXED = "matching, all mixed"
OWN = "matching, own source"
NO_ROLES = "matching, mixed, no roles"
PLAIN_OWN = "plain average, own source"
PLAIN_MIXED = "plain average, mixed"
ACCUMULATED, STAGE_SHARE, REMAINING_SHARE = COLUMNS[:3]
AS_BUILT = "due_accumulated"


def main(argv: list[str]) -> int:
    """``python -m bench graphs``."""
    parser = argparse.ArgumentParser(prog="python -m bench graphs", description=__doc__)
    parser.add_argument("--calls", type=Path, help="compound_calls.csv (default: made-up programs)")
    parser.add_argument("--seeds", type=int, default=5, help="random splits")
    parser.add_argument("--seed", type=int, default=1, help="the first of them")
    parser.add_argument("--probes", type=int, default=200, help="programs timed")
    parser.add_argument("--quick", action="store_true", help="two seeds, forty programs timed")
    parser.add_argument("--only", choices=("latency", "size", "shares"), default=None)
    parser.add_argument("--json", type=Path, default=None, help="write the figures here")
    args = parser.parse_args(argv)
    if args.quick:
        args.seeds, args.probes = min(args.seeds, 2), min(args.probes, 40)
    made_up = calls.synthetic(NUM_SYNTHETIC, args.seed)
    try:
        programs = calls.read(args.calls) if args.calls else made_up
        if len({program.source for program in programs}) == len(programs):
            raise ValueError("of some source there must be two programs: to learn, and to judge by")
    except (OSError, ValueError) as error:
        print(f"graphs: {error}", file=sys.stderr)
        return 2
    print(_told(programs, is_made_up=args.calls is None))
    parts: Mapping[str, Callable[[], tuple[dict[str, float], Any]]] = {
        "latency": lambda: _latency(programs, args.probes, args.seed),
        "size": lambda: _sizes(programs, made_up, args.seed),
        "shares": lambda: _shares(programs, range(args.seed, args.seed + args.seeds)),
    }
    summary: dict[str, float] = {}
    detail: dict[str, Any] = {"options": str(vars(args))}
    try:
        for name, measure in parts.items():
            if args.only in (None, name):
                headline, detail[name] = measure()
                summary |= headline
    except RuntimeError as error:
        print(f"graphs: {error}", file=sys.stderr)
        return 1
    report.write(args.json, "graphs", summary, detail)
    print("\nsummary:", {name: float(f"{value:.4g}") for name, value in summary.items()})
    return 0


def _told(programs: Sequence[Program], *, is_made_up: bool) -> str:
    """What the figures are of."""
    pace = calls.PACE
    sources = sorted({program.source for program in programs})
    timed = [source for source in sources if _has_tool_times(programs, source)]
    lines = [
        f"{len(programs)} {'made-up ' if is_made_up else ''}programs of {len(sources)} sources; "
        f"execution times at {pace.prefill_s:g} s an input token, {pace.step_s:g} s a step and "
        f"{pace.token_s:g} s a token in it.",
        f"Tool times are known of: {', '.join(timed) or 'none'}; elsewhere they count as 0.",
    ]
    if is_made_up:
        lines.append("Without --calls: the shares below are of made-up programs and prove little.")
    return "\n".join(lines)


def _has_tool_times(programs: Sequence[Program], source: str) -> bool:
    own = (program for program in programs if program.source == source)
    return any(stage.tool_s > 0 for program in own for stage in program.stages)


# Latency and size.


def _latency(
    programs: Sequence[Program], num_probes: int, seed: int
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    figures = {num: latency(programs, num, num_probes, seed) for num in NUM_PATTERNS}
    names = [name for name in figures[NUM_PATTERNS[0]] if name != "stages"]
    rows = [(name, *(figures[num][name] for num in NUM_PATTERNS)) for name in names]
    print(
        "\nLatency per new stage, by patterns stored. match: a stage closes and the next opens; "
        "from_scratch: all\nstages scored anew; tracker: from the event to the outlook, of a "
        "stage's first call and of its end; socket: from\nthe client's call to the outlook's "
        "arrival"
    )
    print(report.table(("figure", *map(str, NUM_PATTERNS)), rows), flush=True)
    headline = {}
    for num, row in figures.items():
        for name in ("match", "tracker", "socket"):
            key = "match" if name == "match" else f"match_{name}"
            for quantile in ("p50", "p99"):
                headline[f"{key}_ms_{quantile}_{num}"] = row[f"{name}_ms_{quantile}"]
    headline["from_scratch_ratio_500"] = figures[500]["from_scratch_ratio"]
    return headline, {str(num): row for num, row in figures.items()}


def _sizes(
    programs: Sequence[Program], made_up: Sequence[Program], seed: int
) -> tuple[dict[str, float], dict[str, float]]:
    figures = {
        "bytes_per_pattern": _bytes_per_pattern(programs),
        "bytes_per_pattern_made_up": _bytes_per_pattern(made_up),
    }
    for num in NUM_CLUSTERED:
        figures |= _clustering(calls.jittered(programs, num, seed), seed)
    print("\nSize of a pattern, and k-medoids as the store does it (three quarters are kept)")
    print(report.table(("figure", "value"), list(figures.items())), flush=True)
    return figures, figures


def _packed(programs: Sequence[Program]) -> PatternPack:
    return PatternPack([program.shape() for program in programs], [1.0] * len(programs))


def _bytes_per_pattern(programs: Sequence[Program]) -> float:
    return _packed(programs).num_bytes / len(programs)


def _clustering(programs: Sequence[Program], seed: int) -> dict[str, float]:
    clock = MonotonicClock()
    pack = _packed(programs)
    distance_matrix(_packed(programs[:50]))
    start_s = clock.now_s()
    distances = distance_matrix(pack)
    matrix_s = clock.now_s() - start_s
    k_medoids(distances, pack.weight, int(KEPT_FRACTION * len(pack)), seed)
    swaps_s = clock.now_s() - start_s - matrix_s
    return {
        f"kmedoids_ms_{len(pack)}": 1e3 * (matrix_s + swaps_s),
        f"kmedoids_matrix_ms_{len(pack)}": 1e3 * matrix_s,
        f"kmedoids_swaps_ms_{len(pack)}": 1e3 * swaps_s,
    }


# Shares.


def _shares(
    programs: Sequence[Program], seeds: Sequence[int]
) -> tuple[dict[str, float], dict[str, Any]]:
    runs = [_run(programs, seed) for seed in seeds]
    sources = sorted({program.source for program in programs})
    print(
        f"\nShares of the next stage when its first call has arrived; train on 60 %, test on "
        f"40 %; {len(runs)} random splits,\nmean ± standard deviation over them. own source: "
        "learnt from programs of the same source alone; mixed: from all.\n"
        "equal shares: as many stages as programs have on average; none: the whole deadline "
        "for every stage"
    )
    _print_formulations(runs)
    _print_sources(runs, sources, ACCUMULATED, "Relative error of the accumulated share")
    _print_sources(runs, sources, AS_BUILT, "Error of the sub-deadline as built, part of D")
    _print_seen(runs, sources)
    _print_history(runs, sources)
    verdict = _verdict(runs, sources)
    print(
        "\nWhere matching helps and where it does not: mean errors that differ by more than the "
        "standard deviation of\nthat difference over the splits\n" + "\n".join(verdict),
        flush=True,
    )
    return _headline(runs), {"figures": _figures(runs, sources), "verdict": verdict}


def _run(programs: Sequence[Program], seed: int) -> dict[str, Errors]:
    """The errors of every forecaster on one split, by its name."""
    train, test = split(programs, seed)
    forecasters: dict[str, Forecaster] = {
        MIXED: Matching(train),
        NO_ROLES: Matching(train, has_roles=False),
        OWN: PerSource(Matching, train),
    }
    for capacity in CAPACITIES:
        forecasters[_capacity(capacity)] = Matching(train, capacity=capacity)
    forecasters |= {
        PLAIN_OWN: PerSource(PlainAverage, train),
        PLAIN_MIXED: PlainAverage(train),
        "equal shares, own source": PerSource(EqualShares, train),
        "equal shares, mixed": EqualShares(train),
        "none": NoForecast(),
    }
    for num in HISTORY:
        forecasters[_history(MIXED, num)] = Matching(train[:num])
        forecasters[_history(OWN, num)] = PerSource(_Limited(num), train)
    return {name: judge(forecaster, test) for name, forecaster in forecasters.items()}


class _Limited:
    """Makes a matching that knows the first programs only."""

    def __init__(self, num: int) -> None:
        self._num = num

    def __call__(self, train: Sequence[Program]) -> Matching:
        return Matching(train[: self._num])


def _capacity(capacity: int) -> str:
    return f"matching, mixed, k-medoids {capacity}"


def _history(name: str, num: int) -> str:
    return f"{name}, {num}"


def _main_names(runs: Runs) -> list[str]:
    history = {_history(name, num) for name in (MIXED, OWN) for num in HISTORY}
    return [name for name in runs[0] if name not in history]


def _cell(runs: Runs, name: str, column: str, **rows: Any) -> str:
    found = figure(runs, name, column, **rows)
    return "-" if found is None else str(found)


def _print_formulations(runs: Runs) -> None:
    """All formulations: relative errors, which do not compare, and sub-deadlines, which do."""
    names = _main_names(runs)
    rows = []
    for name in names:
        known = float(np.mean([run[name].is_known.mean() for run in runs]))
        shares = [_cell(runs, name, column) for column in COLUMNS[:3]]
        medians = [figure(runs, name, column, is_median=True) for column in COLUMNS[:3]]
        rows.append((name, *shares, *(f"{m.mean:.3g}" for m in medians if m), f"{known:.3f}"))
    print("\nRelative error of the share, all sources: mean, median; and how often it was foretold")
    heads = ("accumulated", "stage share", "remaining share")
    print(report.table(("learnt from", *heads, *(f"~{head}" for head in heads), "known"), rows))
    print(
        "\nError of the sub-deadline as a part of D, all sources; the stage begins on time. "
        "phi(s) D: from the opening on;\nas built: what is left is shared out anew, "
        "which is the same as the remaining share"
    )
    columns = ("due_phi", AS_BUILT, "due_stage_share", "due_remaining_share")
    rows = [(name, *(_cell(runs, name, column) for column in columns)) for name in names]
    print(
        report.table(
            ("learnt from", "phi(s) D", "accumulated as built", "stage share", "remaining share"),
            rows,
        )
    )


def _print_sources(runs: Runs, sources: Sequence[str], column: str, title: str) -> None:
    rows = [
        (name, *(_cell(runs, name, column, source=source) for source in sources))
        for name in _main_names(runs)
    ]
    print(f"\n{title}, by source\n" + report.table(("learnt from", *sources), rows))


def _print_seen(runs: Runs, sources: Sequence[str]) -> None:
    rows: list[tuple[str, ...]] = [
        (f"{name}: {title}", *(_cell(runs, name, column, seen=seen) for seen in SEEN))
        for name in (MIXED, PLAIN_OWN)
        for title, column in (
            ("accumulated", ACCUMULATED),
            ("stage share", STAGE_SHARE),
            ("remaining share", REMAINING_SHARE),
            ("sub-deadline / D", AS_BUILT),
        )
    ]
    for source in sources:
        cells = [_cell(runs, MIXED, ACCUMULATED, source=source, seen=seen) for seen in SEEN]
        rows.append((f"accumulated, {source}", *cells))
    counts = [
        np.mean([len(run[MIXED].of(ACCUMULATED, seen=seen)) for run in runs]) for seen in SEEN
    ]
    rows.append(("programs that get there", *(f"{count:.0f}" for count in counts)))
    print("\nError by the number of stages that were over (the last row is of how many programs)")
    print(report.table(("", *map(str, SEEN)), rows))


def _print_history(runs: Runs, sources: Sequence[str]) -> None:
    def cells(name: str, column: str, source: str | None = None) -> list[str]:
        found = [_cell(runs, _history(name, num), column, source=source) for num in HISTORY]
        return [*found, _cell(runs, name, column, source=source)]

    rows: list[tuple[str, ...]] = [
        (f"{MIXED}: {title}", *cells(MIXED, column))
        for title, column in (
            ("accumulated", ACCUMULATED),
            ("stage share", STAGE_SHARE),
            ("remaining share", REMAINING_SHARE),
            ("sub-deadline / D", AS_BUILT),
        )
    ]
    rows += [(f"own: accumulated, {s}", *cells(OWN, ACCUMULATED, s)) for s in sources]
    print("\nError by the number of programs learnt from")
    print(report.table(("", *map(str, HISTORY), "all"), rows), flush=True)


def _verdict(runs: Runs, sources: Sequence[str]) -> list[str]:
    """Where matching is better than a plain average and where it is not, in words."""
    found = []
    for name, rival in ((OWN, PLAIN_OWN), (MIXED, PLAIN_OWN), (MIXED, PLAIN_MIXED)):
        for column, what in ((ACCUMULATED, "accumulated share"), (AS_BUILT, "sub-deadline")):
            helped = [s for s in sources if is_better(runs, name, rival, column, s)]
            harmed = [s for s in sources if is_better(runs, rival, name, column, s)]
            rest = [s for s in sources if s not in helped and s not in harmed]
            found.append(
                f"{what}: {name} against {rival}: HELPS {_listed(helped)}; "
                f"NO DIFFERENCE {_listed(rest)}; WORSE {_listed(harmed)}."
            )
    return found


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _headline(runs: Runs) -> dict[str, float]:
    keys = {
        "share_error_accumulated": (MIXED, ACCUMULATED),
        "share_error_stage_share": (MIXED, STAGE_SHARE),
        "share_error_remaining_share": (MIXED, REMAINING_SHARE),
        "share_error_accumulated_own_source": (OWN, ACCUMULATED),
        "share_error_accumulated_no_roles": (NO_ROLES, ACCUMULATED),
        "share_error_plain_average": (PLAIN_OWN, ACCUMULATED),
        "share_error_plain_average_mixed": (PLAIN_MIXED, ACCUMULATED),
        "due_error_phi": (MIXED, "due_phi"),
        "due_error_accumulated": (MIXED, AS_BUILT),
        "due_error_stage_share": (MIXED, "due_stage_share"),
        "due_error_own_source": (OWN, AS_BUILT),
        "due_error_plain_average": (PLAIN_OWN, AS_BUILT),
        "due_error_none": ("none", AS_BUILT),
    }
    found = {key: figure(runs, name, column) for key, (name, column) in keys.items()}
    summary = {key: value.mean for key, value in found.items() if value is not None}
    summary["share_error_best_alternative"] = min(
        summary["share_error_stage_share"], summary["share_error_remaining_share"]
    )
    return summary


def _figures(runs: Runs, sources: Sequence[str]) -> dict[str, dict[str, dict[str, float]]]:
    """Everything, as numbers: by forecaster, then error and where, then mean and deviation."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name in runs[0]:
        entries = found.setdefault(name, {})
        for column in COLUMNS:
            places: list[tuple[str, dict[str, Any]]] = [
                ("all", {}),
                ("median", {"is_median": True}),
            ]
            places += [(source, {"source": source}) for source in sources]
            places += [(f"seen {seen}", {"seen": seen}) for seen in SEEN]
            for place, rows in places:
                value = figure(runs, name, column, **rows)
                if value is not None:
                    entries[f"{column}, {place}"] = value._asdict()
    return found
