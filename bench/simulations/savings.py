"""How much less gmax needs for the same goodput.

Demand that is shared out among r engines at random puts a load of demand/r on each, so r engines
have r times the goodput that one has at that load. From one engine's goodput by load follows
what any number of engines would have, fractions included: the least r at which gmax has the
goodput that a rival has on one engine is what gmax needs; 1 - r is saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from bench.simulations.grid import LEVELS, OURS, Grid, Level
from bench.simulations.statistics import Interval, interval
from bench.simulations.tables import Table

Curve = Sequence[tuple[float, float]]
"""Load and goodput per second, ascending."""
STEPS = 400
ATTAINED = 0.9


def at(curve: Curve, load: float) -> float:
    """Goodput at a load: linear in between, in proportion below the first, the last one above."""
    first_load, first = curve[0]
    if load <= first_load:
        return first * load / first_load
    for (low, at_low), (high, at_high) in pairwise(curve):
        if load <= high:
            return at_low + (at_high - at_low) * (load - low) / (high - low)
    return curve[-1][1]


def saved_fraction(ours: Curve, their_goodput: float, demand: float) -> float:
    """Of one engine's resources, at least: no load above the curve's last one is put on an engine.

    Negative where more than one engine is needed; at most one engine more is tried.
    """
    for step in range(1, 2 * STEPS + 1):
        engines = step / STEPS
        load = demand / engines
        if load <= ours[-1][0] and engines * at(ours, load) >= their_goodput:
            return 1 - engines
    return -1.0


def load_at(curve: Curve, share: float) -> float:
    """The highest load up to which at least ``share`` of a curve of shares is had.

    0 where the first point is below it; the last load where none is.
    """
    if curve[0][1] < share:
        return 0.0
    for (low, at_low), (high, at_high) in pairwise(curve):
        if at_high < share:
            return low + (high - low) * (at_low - share) / (at_low - at_high)
    return curve[-1][0]


def saved(grid: Grid, policy: str, level: Level, case: str) -> Interval:
    """Resources that gmax saves against a policy at the load of a case, paired by seed."""
    demand = next(one.load for one in grid.cases if one.name == case)
    goodput = grid.goodput(case, policy, level)
    return interval(
        [
            saved_fraction(_curve(grid, OURS, level, place), theirs, demand)
            for place, theirs in enumerate(goodput)
        ]
    )


def _curve(grid: Grid, policy: str, level: Level, place: int) -> Curve:
    cases = sorted(grid.cases, key=lambda case: case.load)
    return [(case.load, grid.goodput(case.name, policy, level)[place]) for case in cases]


def table(grid: Grid) -> Table:
    """Savings against each policy at each load, and the load at 90 % attainment."""
    rows = []
    for policy in grid.policies:
        attained = interval([_load_at_target(grid, policy, i) for i in range(len(grid.seeds))])
        for case in grid.cases:
            cells = [
                "-" if policy == OURS else saved(grid, policy, level, case.name).text()
                for level in LEVELS
            ]
            rows.append([policy, case.name, *cells, attained.text()])
    headers = ["policy", "case", "saved, tokens", "saved, requests", "load at 90 % met"]
    return Table(headers, rows, ("attainment",), "Share of engines that gmax saves against each:")


def _load_at_target(grid: Grid, policy: str, place: int) -> float:
    cases = sorted(grid.cases, key=lambda case: case.load)
    curve = [(case.load, grid.figures(case.name, policy)[place].attainment) for case in cases]
    return load_at(curve, ATTAINED)
