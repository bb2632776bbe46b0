"""``python -m bench workloads``: the models' lengths beside the paper's, and their arrivals."""

import argparse
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench import report
from bench.workloads import arrivals
from bench.workloads.applications import APPLICATIONS, Application
from bench.workloads.mix import NAMES_PER_PROGRAM, build, paper_spec
from bench.workloads.summary import Group, TokenStats, describe, group_of
from bench.workloads.traces import Floats
from core.slo import CompoundSlo
from engine.simulator.workload import SimProgram

PAPER: Mapping[str, tuple[TokenStats, TokenStats]] = {
    "chatbot single": (TokenStats(93, 244, 27, 391), TokenStats(318, 313, 225, 1024)),
    "chatbot compound": (TokenStats(1300, 912, 1097, 2767), TokenStats(4458, 1176, 4417, 6452)),
    "deep_research single": (TokenStats(1911, 2781, 403, 7573), TokenStats(534, 644, 410, 1544)),
    "deep_research compound": (
        TokenStats(12223, 8407, 10807, 29282),
        TokenStats(3541, 2370, 3148, 7525),
    ),
}
"""The paper's table of input and output lengths; it has none of the other two applications."""


def main(argv: list[str]) -> int:
    """``python -m bench workloads``."""
    parser = argparse.ArgumentParser(prog="python -m bench workloads", description=__doc__)
    parser.add_argument("--num", type=int, default=4000, help="of each kind (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=5.53, help="of arrivals (%(default)s/s)")
    parser.add_argument("--window", type=float, default=3600.0, help="seconds (%(default)s)")
    parser.add_argument("--trace", type=Path, help="arrivals to put beside the processes'")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)

    groups = sample(args.num, args.seed)
    print(f"Lengths of {args.num} drawn of each kind; in brackets the paper's.\n")
    print(report.table(HEADERS, [row for name in groups for row in _rows(name, groups[name])]))

    bursts = _bursts(args.rate, args.window, args.seed, args.trace)
    print(f"\nArrivals at {args.rate:g}/s: counts' variance over their mean, and peaks a second.\n")
    print(report.table(("process", *next(iter(bursts.values()))), _burst_rows(bursts)))

    mixed = describe(build(paper_spec(args.rate, args.window), args.seed))
    print("\nThe paper's mix, 1:1:1 in programs.\n")
    print(report.table(MIX_HEADERS, [_mix_row(name, group) for name, group in mixed.items()]))
    report.write(
        args.json,
        "workloads",
        _summary(groups),
        {
            "lengths": msgspec.to_builtins(groups),
            "paper": msgspec.to_builtins(PAPER),
            "arrivals": bursts,
            "mix": msgspec.to_builtins(mixed),
        },
    )
    return 0


# Lengths.

HEADERS = ("kind", "tokens", "mean", "std", "p50", "p95", "calls", "stages")


def sample(num: int, seed: int) -> dict[str, Group]:
    """``num`` single requests and ``num`` programs of every application, as "NAME single"."""
    found = {}
    for application in APPLICATIONS.values():
        for kind in ("single", "compound"):
            rng = np.random.default_rng(np.random.SeedSequence(seed))
            drawn = [_drawn(application, kind, index, rng) for index in range(num)]
            found[f"{application.name} {kind}"] = group_of(drawn)
    return found


def _drawn(application: Application, kind: str, index: int, rng: np.random.Generator) -> SimProgram:
    names = itertools.count((index + 1) * NAMES_PER_PROGRAM)
    single = kind == "single"
    stages = application.single(rng) if single else application.compound(rng, names)
    slo = CompoundSlo(20.0 * len(stages), f"{index}")
    return SimProgram(arrival_s=0.0, application=application.name, slo=slo, stages=stages)


def _rows(name: str, group: Group) -> list[list[Any]]:
    rows = []
    paper = PAPER.get(name, (None, None))
    for side, ours, theirs in (
        ("input", group.input, paper[0]),
        ("output", group.output, paper[1]),
    ):
        cells: list[Any] = []
        for field in ("mean", "std", "p50", "p95"):
            told = f" ({getattr(theirs, field):.0f})" if theirs else ""
            cells.append(f"{getattr(ours, field):.0f}{told}")
        rows.append([name, side, *cells, group.calls, group.stages])
    return rows


def _summary(groups: Mapping[str, Group]) -> dict[str, float]:
    """Largest relative difference from the paper's table, by kind and side."""
    found = {}
    for name, (paper_input, paper_output) in PAPER.items():
        group = groups[name]
        found[f"{name} input"] = _difference(group.input, paper_input)
        found[f"{name} output"] = _difference(group.output, paper_output)
    return found


def _difference(ours: TokenStats, theirs: TokenStats) -> float:
    pairs = zip(msgspec.structs.astuple(ours), msgspec.structs.astuple(theirs), strict=True)
    return max(abs(float(our) / float(their) - 1) for our, their in pairs)


# Arrivals.


def _bursts(
    rate_per_s: float, window_s: float, seed: int, trace: Path | None
) -> dict[str, dict[str, float]]:
    specs: dict[str, arrivals.ArrivalSpec] = {
        "poisson": arrivals.Poisson(),
        "gamma, cv 3": arrivals.Gamma(),
        "like azure": arrivals.AzureLike(),
        "surge x5": arrivals.Surge(),
    }
    if trace is not None:
        specs[trace.name] = arrivals.TraceArrivals(path=str(trace))
    return {
        name: burstiness(
            arrivals.draw(spec, rate_per_s, window_s, np.random.default_rng(seed)), window_s
        )
        for name, spec in specs.items()
    }


def burstiness(times: Floats, window_s: float) -> dict[str, float]:
    """Mean rate, CV of the gaps, and for spans of 1, 10 and 60 s the counts' index of dispersion
    (variance over mean; 1 for Poisson) and their peak, per second."""
    gaps = np.diff(times)
    found = {"rate_per_s": len(times) / window_s, "gap_cv": float(gaps.std() / gaps.mean())}
    for span_s in (1, 10, 60):
        counts = np.histogram(times, np.arange(0.0, window_s + 1e-9, span_s))[0]
        found[f"dispersion_{span_s}s"] = float(counts.var() / counts.mean())
        found[f"peak_{span_s}s"] = float(counts.max() / span_s)
    return found


def _burst_rows(bursts: Mapping[str, Mapping[str, float]]) -> list[list[Any]]:
    return [[name, *values.values()] for name, values in bursts.items()]


# The mix.

MIX_HEADERS = ("group", "programs", "calls", "stages", "input mean", "output mean")


def _mix_row(name: str, group: Group) -> list[Any]:
    means = (group.input.mean, group.output.mean)
    return [name, group.programs, group.calls, group.stages, *means]
