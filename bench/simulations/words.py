"""Our numbers in a line, to stand beside the paper's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.simulations import savings
from bench.simulations.grid import LEVELS, ORACLE, OURS, Grid, Level

Say = Callable[[Grid], str]


def ratios(grid: Grid) -> str:
    """gmax over each other policy, from the least case to the most."""
    return _over(grid, grid.policies)


def _over(grid: Grid, policies: Sequence[str]) -> str:
    if OURS not in grid.policies:
        return "no gmax among the policies"
    parts = []
    for policy in policies:
        if policy == OURS:
            continue
        tokens, requests = (
            spread([grid.ratio(case.name, policy, level).mean for case in grid.cases])
            for level in LEVELS
        )
        parts.append(f"{policy} {tokens}x in tokens and {requests}x in requests")
    return "gmax over " + "; ".join(parts)


def best(grid: Grid) -> str:
    """gmax over the best rival of each case, from the least case to the most."""
    if OURS not in grid.policies or not grid.others:
        return ratios(grid)
    tokens, requests = (spread(_over_best(grid, level)) for level in LEVELS)
    return f"gmax over the best rival of each case {tokens}x in tokens and {requests}x in requests"


def _over_best(grid: Grid, level: Level) -> list[float]:
    found = []
    for case in grid.cases:
        rival = grid.best_other(case.name, level)
        if rival is not None:
            found.append(grid.ratio(case.name, rival, level).mean)
    return found


def against(*rivals: str) -> Say:
    """gmax over the rivals that the paper has a number of, and over the best of all."""

    def say(grid: Grid) -> str:
        known = [name for name in grid.policies if name in rivals]
        return f"{_over(grid, known)}. {best(grid)}" if known else best(grid)

    return say


def extremes(grid: Grid) -> str:
    """How much the cases differ for gmax: the least over the most of them."""
    if OURS not in grid.policies:
        return "no gmax among the policies"
    parts = []
    for level in LEVELS:
        means = {case.name: grid.mean(case.name, OURS, level).mean for case in grid.cases}
        best_case = max(means, key=lambda name: means[name])
        least = min(means.values()) / (means[best_case] or 1.0)
        parts.append(f"{level}s: {best_case} is best, the worst has {100 * least:.1f} % of it")
    return "gmax, " + "; ".join(parts)


def oracle(grid: Grid) -> str:
    """How far below the oracle."""
    if not {OURS, ORACLE} <= set(grid.policies):
        return "the oracle was not run"
    tokens, requests = (
        spread([100 * (1 - grid.ratio(case.name, ORACLE, level).mean) for case in grid.cases])
        for level in LEVELS
    )
    return f"gmax is {tokens} % below its oracle in tokens, {requests} % in requests"


def throughput(grid: Grid) -> str:
    """gmax's output tokens over Sarathi's."""
    if not {OURS, "sarathi"} <= set(grid.policies):
        return "gmax or sarathi was not run"
    shares = []
    for case in grid.cases:
        ours, theirs = (
            sum(one.throughput_per_s for one in grid.figures(case.name, policy))
            for policy in (OURS, "sarathi")
        )
        shares.append(100 * ours / theirs if theirs else 100.0)
    return f"gmax generates {spread(shares)} % of Sarathi's output tokens"


def saved(grid: Grid) -> str:
    """Resources saved against rivals, over cases in which they are overloaded."""
    if OURS not in grid.policies:
        return "no gmax among the policies"
    cases = [case for case in grid.cases if case.load > 1] or list(grid.cases)
    parts = []
    for policy in grid.others:
        tokens, requests = (
            spread([100 * savings.saved(grid, policy, level, case.name).mean for case in cases])
            for level in LEVELS
        )
        parts.append(f"{policy} {tokens} % (tokens), {requests} % (requests)")
    return "engines saved above capacity against " + "; ".join(parts)


def spread(values: Sequence[float]) -> str:
    """From the least to the most."""
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"
