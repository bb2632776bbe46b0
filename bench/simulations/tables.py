"""Grids as tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from bench.simulations.figures import Figures
from bench.simulations.grid import LEVELS, ORACLE, OURS, Grid
from bench.simulations.statistics import Interval, interval, ratio


class Table(NamedTuple):
    """What is printed.

    Attributes:
        defines: names of ``figures.DEFINITIONS`` that are explained under it.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[Any]]
    defines: Sequence[str]
    title: str = ""


GOODPUT = (
    "token_goodput_per_s",
    "request_goodput_per_s",
    "attainment",
    "offered_tokens_per_s",
)


def goodput(grid: Grid) -> Table:
    """Of each policy in each case, and gmax against it; the best rivals are marked."""
    rows: list[list[Any]] = []
    for case in grid.cases:
        best = [(grid.best_other(case.name, level), level) for level in LEVELS]
        for policy in grid.policies:
            marks = "".join(level[0].upper() for label, level in best if label == policy)
            name = f"{policy} *{marks}" if marks else policy
            rows.append([case.name, name, *_goodput_cells(grid, case.name, policy)])
    headers = ["case", "policy", "token/s", "gmax/this", "request/s", "gmax/this"]
    headers += ["of offered tokens", "of requests"]
    if grid.bounds:
        headers += ["of bound, token", "of bound, request"]
    title = "*T, *R: the best rival in tokens, in requests." if grid.others else ""
    return Table(headers, rows, GOODPUT, title)


def _goodput_cells(grid: Grid, case: str, policy: str) -> list[str]:
    cells = []
    for level in LEVELS:
        cells.append(grid.mean(case, policy, level).text())
        has_ours = OURS in grid.policies
        cells.append(grid.ratio(case, policy, level).text() if has_ours else "-")
    cells += [
        f"{100 * interval(shares).mean:.1f} %"
        for shares in (
            grid.offered_share(case, policy),
            [figures.attainment for figures in grid.figures(case, policy)],
        )
    ]
    if grid.bounds:
        cells += [
            grid.share_of_bound(case, policy, level).text() if grid.is_bounded(case) else "-"
            for level in LEVELS
        ]
    return cells


def beside(reference: str) -> Callable[[Grid], Table]:
    """Of each policy in each case, over the same policy in the case of that name."""

    def table(grid: Grid) -> Table:
        rows = []
        for policy in grid.policies:
            for case in grid.cases:
                cells: list[Any] = [policy, case.name]
                for level in LEVELS:
                    ours = grid.goodput(case.name, policy, level)
                    theirs = grid.goodput(reference, policy, level)
                    cells += [interval(ours).text(), ratio(ours, theirs).text()]
                rows.append(cells)
        over = f"over {reference}"
        headers = ["policy", "case", "token/s", over, "request/s", over]
        return Table(headers, rows, GOODPUT[:2])

    return table


def engine(grid: Grid) -> Table:
    """What the engines did under each policy, and what planning took."""
    rows = [
        [case.name, policy, *means(grid, case.name, policy, _ENGINE)]
        for case in grid.cases
        for policy in grid.policies
    ]
    headers = ["case", "policy", *(name for name, _ in _ENGINE)]
    defines = ("throughput_per_s", "mean_running", "preemptions", "parks")
    return Table(headers, rows, (*defines, "plan_p50_ms, plan_p99_ms"), "The engine:")


_ENGINE: Sequence[tuple[str, Callable[[Figures], float | None]]] = (
    ("output token/s", lambda one: one.throughput_per_s),
    ("running", lambda one: one.mean_running),
    ("prompt tokens cached", lambda one: _share(one.cached_prompt_tokens, one)),
    ("preemptions", lambda one: float(one.preemptions)),
    ("parks", lambda one: float(one.parks)),
    ("plan p50 ms", lambda one: one.plan_p50_ms),
    ("plan p99 ms", lambda one: one.plan_p99_ms),
)


def _share(tokens: int, figures: Figures) -> float:
    total = figures.cached_prompt_tokens + figures.computed_prompt_tokens
    return tokens / total if total else 0.0


def means(
    grid: Grid,
    case: str,
    policy: str,
    columns: Sequence[tuple[str, Callable[[Figures], float | None]]],
) -> list[str]:
    """Of each column over the seeds; None counts as infinite, NaN not at all."""
    runs = grid.figures(case, policy)
    cells = []
    for _, value_of in columns:
        values = [value for one in runs if not _is_nan(value := value_of(one))]
        finite = [value for value in values if value is not None]
        shown = interval(finite).text() if finite else "-"
        cells.append(shown if len(finite) == len(values) else "inf")
    return cells


def _is_nan(value: float | None) -> bool:
    return value is not None and math.isnan(value)


def oracle(grid: Grid) -> Table:
    """How far below its own oracle gmax is."""
    rows = []
    for case in grid.cases:
        cells: list[Any] = [case.name]
        for level in LEVELS:
            cells += [grid.mean(case.name, policy, level).text() for policy in (OURS, ORACLE)]
            gap = interval([1 - one for one in grid.ratios(case.name, ORACLE, level)])
            cells.append(gap.text())
        rows.append(cells)
    per_level = [["gmax " + level, "oracle", "below it"] for level in LEVELS]
    return Table(["case", *per_level[0], *per_level[1]], rows, GOODPUT[:2])


def throughput(grid: Grid) -> Table:
    """Output tokens, of use or not, beside Sarathi's."""
    rows = []
    for case in grid.cases:
        theirs = [one.throughput_per_s for one in grid.figures(case.name, "sarathi")]
        for policy in grid.policies:
            ours = [one.throughput_per_s for one in grid.figures(case.name, policy)]
            over = ratio(ours, theirs).text()
            rows.append([case.name, policy, interval(ours).text(), over])
    return Table(["case", "policy", "output token/s", "this/sarathi"], rows, ("throughput_per_s",))


def over_time(grid: Grid) -> Table:
    """Goodput of programs by when they arrived, in quarters of the window."""
    rows = []
    for case in grid.cases:
        for policy in grid.policies:
            for level in LEVELS:
                quarters = zip(
                    *(in_quarters(_bins(one, level)) for one in grid.figures(case.name, policy)),
                    strict=True,
                )
                means = [interval(quarter).mean for quarter in quarters]
                texts = [Interval(mean, None).text() for mean in means]
                change = f"{means[-1] / means[0]:.2f}" if means[0] else "-"
                rows.append([case.name, policy, level, *texts, change])
    headers = ["case", "policy", "goodput", "1st quarter", "2nd", "3rd", "4th", "4th/1st"]
    return Table(headers, rows, ("token_goodput_by_bin, request_goodput_by_bin",))


def _bins(figures: Figures, level: str) -> Sequence[float]:
    return figures.token_goodput_by_bin if level == "token" else figures.request_goodput_by_bin


def in_quarters(values: Sequence[float]) -> list[float]:
    """Means of four parts in order; of fewer than four values some are repeated."""
    num = len(values)
    edges = [round(num * part / 4) for part in range(5)]
    parts = [values[min(begin, num - 1) : max(end, begin + 1)] for begin, end in pairwise(edges)]
    return [sum(part) / len(part) for part in parts]


def by_flags(grid: Grid) -> Table:
    """What ``--goodput`` asked for: every call judged by the same targets."""
    rows: list[list[Any]] = []
    for case in grid.cases:
        for policy in grid.policies:
            found = [one.by_flags for one in grid.figures(case.name, policy) if one.by_flags]
            if not found:
                continue
            names = list(found[0].slo_attainment_by_metric)
            rows.append(
                [
                    case.name,
                    policy,
                    interval([one.request_goodput for one in found]).text(),
                    interval([one.slo_attainment for one in found]).text(),
                    *(
                        interval([one.slo_attainment_by_metric[name] for one in found]).text()
                        for name in names
                    ),
                ]
            )
    targets = [f"{name} <= {value:g} ms" for name, value in grid.cases[0].goodput]
    headers = ["case", "policy", "request_goodput", "slo_attainment", *targets]
    defines = ("request_goodput", "slo_attainment", "slo_attainment_by_metric")
    return Table(headers, rows, defines, "Calls by --goodput:")
