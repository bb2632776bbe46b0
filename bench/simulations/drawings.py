"""Which charts are made of which grid."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.simulations import charts, savings
from bench.simulations.charts import Axis, Chart
from bench.simulations.figures import BIN_S, Figures
from bench.simulations.grid import LEVELS, OURS, Grid, Level
from bench.simulations.statistics import Interval, interval

Draw = Callable[[Grid], Sequence[Chart]]
UNITS = {"token": "tokens/s", "request": "requests/s"}


def by_case(x_label: str) -> Draw:
    """Goodput over the cases' x, in tokens and in requests."""

    def draw(grid: Grid) -> list[Chart]:
        axis = Axis(x_label, [case.x for case in grid.cases])
        return [
            Chart(level, charts.lines(_title(level), axis, UNITS[level], _goodput(grid, level)))
            for level in LEVELS
        ]

    return draw


def by_name(grid: Grid) -> list[Chart]:
    """Goodput of each case as bars, in tokens and in requests."""
    axis = Axis("", [], [case.name for case in grid.cases])
    return [
        Chart(level, charts.bars(_title(level), axis, UNITS[level], _goodput(grid, level)))
        for level in LEVELS
    ]


def _title(level: Level) -> str:
    return f"Goodput in {level}s that met their SLO"


def _goodput(grid: Grid, level: Level) -> dict[str, list[Interval]]:
    return {
        policy: [grid.mean(case.name, policy, level) for case in grid.cases]
        for policy in grid.policies
    }


def over_time(grid: Grid) -> list[Chart]:
    """Goodput by the minute of arrival, of the first case."""
    case = grid.cases[0].name
    found = []
    for level in LEVELS:
        name = f"{level}_goodput_by_bin"
        series = {
            policy: [
                # Without whiskers: one for each minute is a hedge.
                Interval(interval(values).mean, None)
                for values in zip(
                    *(getattr(one, name) for one in grid.figures(case, policy)), strict=True
                )
            ]
            for policy in grid.policies
        }
        num = len(next(iter(series.values())))
        minutes = Axis("minute of arrival", [BIN_S / 60 * (place + 1) for place in range(num)])
        title = f"{_title(level)}, by arrival, {case}"
        found.append(Chart(level, charts.lines(title, minutes, UNITS[level], series)))
    return found


def throughput(grid: Grid) -> list[Chart]:
    """Output tokens by load."""
    series = {
        policy: [
            interval([one.throughput_per_s for one in grid.figures(case.name, policy)])
            for case in grid.cases
        ]
        for policy in grid.policies
    }
    axis = Axis("load over capacity", [case.x for case in grid.cases])
    return [Chart("tokens", charts.lines("Output tokens generated", axis, "tokens/s", series))]


def breakdown(grid: Grid) -> list[Chart]:
    """Shares of SLOs met by class, and the percentiles of the paper's four panels."""
    case = grid.cases[0].name
    kinds = [kind for kind in ("latency", "deadline", "compound") if _has(grid, case, kind)]
    met = {
        policy: [
            interval([100 * one.classes[kind].attainment for one in grid.figures(case, policy)])
            for kind in kinds
        ]
        for policy in grid.policies
    }
    axis = Axis("", [], kinds)
    found = [Chart("met", charts.bars(f"SLOs met, {case}", axis, "% of requests", met))]
    for name, title, read in _PANELS:
        values = {
            policy: [
                interval([_shown(read(one, level)) for one in grid.figures(case, policy)])
                for level in ("p50", "p95")
            ]
            for policy in grid.policies
        }
        panel = Axis("0: infinite, most never ended", [], ("p50", "p95"))
        found.append(Chart(name, charts.bars(f"{title}, {case}", panel, "seconds", values)))
    return found


def _has(grid: Grid, case: str, kind: str) -> bool:
    return all(kind in one.classes for one in grid.figures(case, grid.policies[0]))


def _shown(value: float | None) -> float:
    return 0.0 if value is None else value


def _percentile(kind: str, what: str) -> Callable[[Figures, str], float | None]:
    def read(figures: Figures, level: str) -> float | None:
        found = figures.classes.get(kind)
        value: float | None = getattr(found, f"{what}_{level}_s") if found else None
        return value

    return read


def _tbt(figures: Figures, level: str) -> float | None:
    return figures.tbt_p50_s if level == "p50" else figures.tbt_p95_s


_PANELS: Sequence[tuple[str, str, Callable[[Figures, str], float | None]]] = (
    ("ttft", "TTFT of streams", _percentile("latency", "ttft")),
    ("tbt", "TBT of streams", _tbt),
    ("deadline", "E2EL with a deadline", _percentile("deadline", "e2el")),
    ("compound", "E2EL of programs", _percentile("compound", "e2el")),
)


def saved(grid: Grid) -> list[Chart]:
    """Share of engines that gmax saves, by load."""
    axis = Axis("load over capacity", [case.x for case in grid.cases])
    found = []
    for level in LEVELS:
        series = {
            policy: [_percent(savings.saved(grid, policy, level, case.name)) for case in grid.cases]
            for policy in grid.policies
            if policy != OURS
        }
        title = f"Engines saved by gmax at equal {level} goodput"
        found.append(Chart(level, charts.lines(title, axis, "%", series)))
    return found


def _percent(value: Interval) -> Interval:
    return Interval(100 * value.mean, None if value.half is None else 100 * value.half)
