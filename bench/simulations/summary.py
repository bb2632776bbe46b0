"""The flat figures by which two runs are compared; their names are in the design."""

from __future__ import annotations

from typing import Any

from bench.simulations.cases import OPERATING_POINT
from bench.simulations.grid import LEVELS, ORACLE, OURS, Grid
from bench.simulations.statistics import interval, ratio


def of(grid: Grid) -> dict[str, Any]:
    """At the case of 1.5x capacity, or the last where there is none."""
    case = next(
        (case.name for case in grid.cases if case.load == OPERATING_POINT), grid.cases[-1].name
    )
    figures = grid.figures(case, grid.policies[0])
    found: dict[str, Any] = {
        "case": case,
        "seeds": len(grid.seeds),
        "requests": min(one.calls for one in figures),
        "programs": min(one.programs for one in figures),
    }
    if OURS not in grid.policies:
        return found
    for level in LEVELS:
        for policy in grid.policies:
            if policy != OURS:
                value = grid.ratio(case, policy, level).mean
                found[f"{level}_goodput_ratio_vs_{policy}"] = round(value, 3)
        best = grid.best_other(case, level)
        if best is not None:
            key = f"{level}_goodput_ratio_vs_best_other"
            found[key] = round(grid.ratio(case, best, level).mean, 3)
            found[f"best_other_{level}"] = best
    return found | _against_the_possible(grid, case)


def _against_the_possible(grid: Grid, case: str) -> dict[str, Any]:
    share = interval(grid.offered_share(case, OURS)).mean
    found: dict[str, Any] = {"offered_share": round(share, 4)}
    if ORACLE in grid.policies:
        found["oracle_gap_fraction"] = round(1 - grid.ratio(case, ORACLE, "token").mean, 4)
    if "sarathi" in grid.policies:
        ours, theirs = (
            [one.throughput_per_s for one in grid.figures(case, policy)]
            for policy in (OURS, "sarathi")
        )
        found["throughput_ratio_vs_sarathi"] = round(ratio(ours, theirs).mean, 4)
    if grid.is_bounded(case):
        for level in LEVELS:
            key = "upper_bound_share" + ("" if level == "token" else f"_{level}")
            found[key] = round(grid.share_of_bound(case, OURS, level).mean, 4)
    return found
