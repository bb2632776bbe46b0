"""A grid of runs: cases times policies times seeds, all policies on the same workloads."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import msgspec

from bench.simulations.bounds import BoundFigure, BoundQuestion, question_of
from bench.simulations.capacity import PROGRAMS, Capacity, CapacityProbe, probe_of
from bench.simulations.cell import (
    Cell,
    Engine,
    Settings,
    base_policy,
    cell_of,
    split_label,
)
from bench.simulations.figures import Figures
from bench.simulations.pool import Cache, run_all
from bench.simulations.progress import Progress
from bench.simulations.statistics import Interval, interval, ratios
from bench.simulations.tasks import Task
from bench.workloads import WorkloadSpec
from scheduler.policies import ABLATIONS, ORACLES

Level = Literal["token", "request"]
LEVELS: tuple[Level, ...] = ("token", "request")
OURS = "gmax"
ORACLE = "gmax-oracle"
OUR_KIND = (OURS, ORACLE, *ABLATIONS)
"""gmax, and what it is taken apart into."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """What the runs of one row of a table share.

    Attributes:
        name: for the table.
        x: for a plot.
        load: arrival rate over capacity, of each replica.
        workload: its rate does not count: it follows from ``load``.
        settings: of the policies ``settings_of``.
        probe_programs: served to measure the capacity.
    """

    name: str
    x: float
    load: float
    workload: WorkloadSpec
    engine: Engine
    analyst: str
    settings: Settings = ()
    settings_of: tuple[str, ...] = OUR_KIND
    replicas: int = 1
    dispatch: str = "only"
    goodput: tuple[tuple[str, float], ...] = ()
    probe_programs: int = PROGRAMS

    @property
    def probe(self) -> CapacityProbe:
        """What measures its capacity."""
        return probe_of(self.workload, self.engine, self.probe_programs)

    def cell(self, label: str, seed: int, capacity: Capacity) -> Cell:
        """The run of a policy, by its label."""
        rate = self.load * capacity.programs_per_s * self.replicas
        policy, _ = split_label(label)
        settings = self.settings if base_policy(policy) in self.settings_of else ()
        return cell_of(
            label,
            msgspec.structs.replace(self.workload, rate_per_s=rate),
            seed,
            self.engine,
            self.analyst,
            settings=settings,
            replicas=self.replicas,
            dispatch=self.dispatch,
            goodput=self.goodput,
        )


class Runner:
    """Where runs come from: the pool, and the file of what is known.

    Args:
        keep_rivals: runs of rivals, and capacities, may be of other code than now.
    """

    def __init__(
        self,
        cache: Cache,
        *,
        jobs: int,
        progress: Progress | None = None,
        keep_rivals: bool = False,
    ) -> None:
        self._cache = cache
        self._jobs = jobs
        self._progress = progress
        self._keep_rivals = keep_rivals

    def run(self, tasks: Sequence[Task]) -> Mapping[Task, Any]:
        """Outcomes of all of them."""
        return run_all(
            tasks,
            self._cache,
            jobs=self._jobs,
            any_code=self._may_be_old,
            progress=self._progress,
        )

    def _may_be_old(self, task: Task) -> bool:
        if isinstance(task, Cell):
            return self._keep_rivals and base_policy(task.policy) not in OUR_KIND
        return self._keep_rivals and isinstance(task, CapacityProbe)


Key = tuple[str, str, int]
"""Case, policy, seed."""


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of all runs, every one of every policy on the same workloads.

    Attributes:
        capacity: of each case.
        bounds: most goodput per second that any schedule could have had, by case, seed and
            level; empty where nobody asked.
    """

    cases: tuple[Case, ...]
    policies: tuple[str, ...]
    seeds: tuple[int, ...]
    capacity: Mapping[str, Capacity]
    cells: Mapping[Key, Cell]
    runs: Mapping[Key, Figures]
    bounds: Mapping[tuple[str, int, Level], BoundFigure]

    def figures(self, case: str, policy: str) -> list[Figures]:
        """One per seed."""
        return [self.runs[case, policy, seed] for seed in self.seeds]

    def goodput(self, case: str, policy: str, level: Level) -> list[float]:
        """Per second, one per seed."""
        name = f"{level}_goodput_per_s"
        return [getattr(figures, name) for figures in self.figures(case, policy)]

    def mean(self, case: str, policy: str, level: Level) -> Interval:
        """Goodput per second."""
        return interval(self.goodput(case, policy, level))

    def ratio(self, case: str, policy: str, level: Level) -> Interval:
        """Of gmax to a policy's goodput, paired by seed."""
        return interval(self.ratios(case, policy, level))

    def ratios(self, case: str, policy: str, level: Level) -> list[float]:
        """The same, one per seed."""
        return ratios(self.goodput(case, OURS, level), self.goodput(case, policy, level))

    def offered_share(self, case: str, policy: str) -> list[float]:
        """Tokens that counted over those that would have if everything was in time, per seed."""
        return [
            figures.token_goodput_per_s / figures.offered_tokens_per_s
            if figures.offered_tokens_per_s
            else 0.0
            for figures in self.figures(case, policy)
        ]

    def is_bounded(self, case: str) -> bool:
        """Whether its upper bounds are there."""
        return any(name == case for name, _, _ in self.bounds)

    def share_of_bound(self, case: str, policy: str, level: Level) -> Interval:
        """Of the most that any schedule could have had."""
        most = [self.bounds[case, seed, level].per_s for seed in self.seeds]
        return interval(ratios(self.goodput(case, policy, level), most))

    @property
    def others(self) -> list[str]:
        """Rivals: neither gmax, an ablation of it nor an oracle; gmax-paper is one."""
        return [label for label in self.policies if is_rival(label)]

    def best_other(self, case: str, level: Level) -> str | None:
        """The rival with the most on average over the seeds; None without rivals."""
        others = self.others
        return max(others, key=lambda label: self.mean(case, label, level).mean, default=None)


def is_rival(label: str) -> bool:
    """Whether a policy is one of somebody else's, with fair information."""
    base = base_policy(label.split(":")[0])
    return base not in OUR_KIND and base not in ORACLES


def run_grid(
    cases: Sequence[Case],
    policies: Sequence[str],
    seeds: Sequence[int],
    runner: Runner,
    *,
    bounded: Collection[str] = (),
) -> Grid:
    """Measure the capacity of every case, then run everything.

    Args:
        bounded: names of the cases whose upper bounds are wanted.

    Raises ``pool.Failed``.
    """
    probed = runner.run([case.probe for case in cases])
    capacity: dict[str, Capacity] = {case.name: probed[case.probe] for case in cases}
    # By seed first: a grid that is broken off has some seeds complete.
    cells = {
        (case.name, policy, seed): case.cell(policy, seed, capacity[case.name])
        for seed in seeds
        for case in cases
        for policy in policies
    }
    questions: dict[tuple[str, int, Level], BoundQuestion] = {
        (case.name, seed, level): question_of(cells[case.name, policies[0], seed], level)
        for seed in seeds
        for case in cases
        for level in LEVELS
        if case.name in bounded
    }
    found = runner.run([*cells.values(), *questions.values()])
    return Grid(
        cases=tuple(cases),
        policies=tuple(policies),
        seeds=tuple(seeds),
        capacity=capacity,
        cells=cells,
        runs={key: found[cell] for key, cell in cells.items()},
        bounds={key: found[question] for key, question in questions.items()},
    )
