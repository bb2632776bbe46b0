"""Grids as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.simulations.grid import LEVELS, OURS, Grid
from bench.simulations.statistics import interval

Rows = tuple[Sequence[str], Sequence[Sequence[Any]]]

GOODPUT_HEADERS = (
    "case",
    "policy",
    "token/s",
    "gmax/this",
    "request/s",
    "gmax/this",
    "SLO met",
    "of bound",
    "of bound, req",
)


def goodput(grid: Grid) -> Rows:
    """Of each policy in each case, and gmax against it; the best rival is marked."""
    rows: list[list[Any]] = []
    for case in grid.cases:
        best = {
            grid.best_other(case.name, "token"): "T",
            grid.best_other(case.name, "request"): "R",
        }
        if grid.best_other(case.name, "token") == grid.best_other(case.name, "request"):
            best = {grid.best_other(case.name, "token"): "TR"}
        for policy in grid.policies:
            mark = f" *{best[policy]}" if policy in best else ""
            rows.append([case.name, policy + mark, *_goodput_cells(grid, case.name, policy)])
    return GOODPUT_HEADERS, rows


def _goodput_cells(grid: Grid, case: str, policy: str) -> list[str]:
    cells = []
    for level in LEVELS:
        cells.append(grid.mean(case, policy, level).text())
        has_ours = OURS in grid.policies
        cells.append(grid.ratio(case, policy, level).text() if has_ours else "-")
    attained = [figures.attainment for figures in grid.figures(case, policy)]
    cells.append(f"{100 * interval(attained).mean:.1f} %")
    for level in LEVELS:
        has = grid.has_bounds
        cells.append(grid.share_of_bound(case, policy, level).text() if has else "-")
    return cells
