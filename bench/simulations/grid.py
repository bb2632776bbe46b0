"""A grid of runs: cases times policies times seeds, all policies on the same workloads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from bench.simulations.bounds import BoundFigure, question_of
from bench.simulations.capacity import Capacity, CapacityProbe, probe_of
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
from bench.simulations.statistics import Interval, interval, ratio
from bench.simulations.tasks import Task
from bench.workloads import WorkloadSpec
from scheduler.policies import ABLATIONS, ORACLES

Level = Literal["token", "request"]
LEVELS: tuple[Level, ...] = ("token", "request")
OURS = "gmax"
OUR_KIND = ("gmax", "gmax-oracle", *ABLATIONS)
"""Policies that a case's settings are for."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """What the runs of one row of a table share.

    Attributes:
        name: for the table.
        x: for a plot.
        load: arrival rate over capacity, of each replica.
        workload: its rate does not count: it follows from ``load``.
        settings: of gmax and its kind.
    """

    name: str
    x: float
    load: float
    workload: WorkloadSpec
    engine: Engine
    analyst: str
    settings: Settings = ()
    replicas: int = 1
    dispatch: str = "only"
    goodput: tuple[tuple[str, float], ...] = ()

    @property
    def probe(self) -> CapacityProbe:
        return probe_of(self.workload, self.engine)

    def cell(self, label: str, seed: int, capacity: Capacity) -> Cell:
        """The run of a policy, by its label."""
        rate = self.load * capacity.programs_per_s * self.replicas
        policy, _ = split_label(label)
        settings = self.settings if base_policy(policy) in OUR_KIND else ()
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
    """Where runs come from: the pool, the file of what is known, and how much is said."""

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
        # Else every change of a policy would move the load at which policies are compared.
        return isinstance(task, CapacityProbe) and self._keep_rivals


class Grid:
    """The figures of all runs."""

    def __init__(
        self,
        cases: Sequence[Case],
        policies: Sequence[str],
        seeds: Sequence[int],
        runner: Runner,
        *,
        has_bounds: bool = False,
    ) -> None:
        self.cases, self.policies, self.seeds = cases, policies, seeds
        capacities = runner.run([case.probe for case in cases])
        self.capacity: dict[str, Capacity] = {case.name: capacities[case.probe] for case in cases}
        cells = {
            (case.name, policy, seed): case.cell(policy, seed, self.capacity[case.name])
            for seed in seeds
            for case in cases
            for policy in policies
        }
        questions = {
            (case.name, seed, level): question_of(cells[case.name, policies[0], seed], level)
            for seed in seeds
            for case in cases
            for level in LEVELS
            if has_bounds
        }
        found = runner.run([*cells.values(), *questions.values()])
        self.cells = cells
        self._figures: dict[tuple[str, str, int], Figures] = {
            key: found[cell] for key, cell in cells.items()
        }
        self._bounds: dict[tuple[str, int, Level], BoundFigure] = {
            key: found[question] for key, question in questions.items()
        }

    def figures(self, case: str, policy: str) -> list[Figures]:
        """One per seed."""
        return [self._figures[case, policy, seed] for seed in self.seeds]

    def figures_of(self, case: str, policy: str, seed: int) -> Figures:
        """Of one run."""
        return self._figures[case, policy, seed]

    def goodput(self, case: str, policy: str, level: Level) -> list[float]:
        """Per second, one per seed."""
        name = f"{level}_goodput_per_s"
        return [getattr(figures, name) for figures in self.figures(case, policy)]

    def mean(self, case: str, policy: str, level: Level) -> Interval:
        """Goodput per second."""
        return interval(self.goodput(case, policy, level))

    def ratio(self, case: str, policy: str, level: Level, ours: str = OURS) -> Interval:
        """Of ours to a policy's goodput, paired by seed."""
        return ratio(self.goodput(case, ours, level), self.goodput(case, policy, level))

    @property
    def has_bounds(self) -> bool:
        return bool(self._bounds)

    def share_of_bound(self, case: str, policy: str, level: Level) -> Interval:
        """Of the most that any schedule could have had."""
        bounds = [self._bounds[case, seed, level].per_s for seed in self.seeds]
        return ratio(self.goodput(case, policy, level), bounds)

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
