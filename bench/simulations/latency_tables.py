"""Grids as tables of conventional latencies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from bench.simulations.figures import CLASSES, ClassFigures, Figures
from bench.simulations.grid import Grid
from bench.simulations.statistics import Interval, interval
from bench.simulations.tables import Table, means


def latencies(grid: Grid) -> Table:
    """Of each class, medians over the seeds of what the runs had."""
    rows = [
        [case.name, policy, kind, *_cells(grid.figures(case.name, policy), kind)]
        for case in grid.cases
        for policy in grid.policies
        for kind in CLASSES
        if all(kind in one.classes for one in grid.figures(case.name, policy))
    ]
    headers = ["case", "policy", "class", "SLO met", "TTFT p50 s", "p95", "TBT p50 ms", "p95"]
    headers += ["E2EL p50 s", "p95"]
    defines = ("ttft_p50_s, ttft_p95_s", "tbt_p50_s, tbt_p95_s", "e2el_p50_s, e2el_p95_s")
    title = 'Conventional latencies by class, medians over seeds; "inf": too few ever ended.'
    return Table(headers, rows, defines, title)


def _cells(runs: Sequence[Figures], kind: str) -> list[str]:
    found = [one.classes[kind] for one in runs]
    tbts: list[Sequence[float]] = [[one.tbt_p50_s for one in runs], [one.tbt_p95_s for one in runs]]
    return [
        f"{100 * interval([one.attainment for one in found]).mean:.1f} %",
        *(_middle(read(one) for one in found) for read in _FIRST),
        *(_middle(1e3 * one for one in tbt) if kind == "latency" else "-" for tbt in tbts),
        *(_middle(read(one) for one in found) for read in _END),
    ]


_FIRST: Sequence[Callable[[ClassFigures], float | None]] = (
    lambda one: one.ttft_p50_s,
    lambda one: one.ttft_p95_s,
)
_END: Sequence[Callable[[ClassFigures], float | None]] = (
    lambda one: one.e2el_p50_s,
    lambda one: one.e2el_p95_s,
)


def _middle(values: Iterable[float | None]) -> str:
    """The median over the seeds; None is infinite."""
    ranked = sorted(float("inf") if value is None else value for value in values)
    return Interval(ranked[(len(ranked) - 1) // 2], None).text()


def accepted(grid: Grid) -> Table:
    """First tokens of the streams that were served, and how soon others were refused."""
    rows = [
        [case.name, policy, *means(grid, case.name, policy, _ACCEPTED)]
        for case in grid.cases
        for policy in grid.policies
    ]
    headers = ["case", "policy", *(name for name, _ in _ACCEPTED)]
    drops = ("drops", "drop_after_p50_s, drop_after_p95_s")
    defines = ("met_ttft_p95_s", "accepted_ttft_p95_s", *drops)
    return Table(headers, rows, defines, "Streams that were served, and calls that were refused:")


_ACCEPTED: Sequence[tuple[str, Callable[[Figures], float | None]]] = (
    ("streams in time", lambda one: _attainment(one, "latency")),
    ("TTFT p95 of them, s", lambda one: one.met_ttft_p95_s),
    ("TTFT p95 accepted, s", lambda one: one.accepted_ttft_p95_s),
    ("drops", lambda one: float(one.drops)),
    ("told after p50 s", lambda one: one.drop_after_p50_s if one.drops else math.nan),
    ("p95 s", lambda one: one.drop_after_p95_s if one.drops else math.nan),
)


def _attainment(figures: Figures, kind: str) -> float:
    found = figures.classes.get(kind)
    return found.attainment if found else 0.0
