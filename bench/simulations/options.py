"""What the command line of ``python -m bench sim`` decides for all experiments."""

from __future__ import annotations

from typing import Any

import msgspec

from bench.simulations.capacity import PROGRAMS
from bench.simulations.cell import DEFAULT_ANALYST, Engine, Settings
from bench.simulations.grid import Case
from bench.workloads import WorkloadSpec, paper_spec


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Of one invocation.

    Attributes:
        is_quick: minutes instead of hours: fewer cases and policies.
        policies: labels; empty: the experiment's own.
        workload: what every case begins with; its rate does not count.
        settings: of gmax and its kind.
        traces: paths of files with arrivals.
        probe_programs: served to measure a capacity.
    """

    is_quick: bool = False
    seeds: tuple[int, ...] = (1,)
    policies: tuple[str, ...] = ()
    loads: tuple[float, ...] = ()
    workload: WorkloadSpec = paper_spec(1.0)
    engine: Engine = Engine()
    analyst: str = DEFAULT_ANALYST
    settings: Settings = ()
    goodput: tuple[tuple[str, float], ...] = ()
    traces: tuple[str, ...] = ()
    probe_programs: int = PROGRAMS

    def case(self, name: str, x: float, load: float, **changes: Any) -> Case:
        """A case as the options have it, but for ``changes``.

        ``workload`` and ``settings`` among them are changes of those.
        """
        workload = msgspec.structs.replace(self.workload, **changes.pop("workload", {}))
        settings = tuple(
            sorted({**dict(self.settings), **dict(changes.pop("settings", ()))}.items())
        )
        case = Case(
            name=name,
            x=x,
            load=load,
            workload=workload,
            engine=self.engine,
            analyst=self.analyst,
            settings=settings,
            goodput=self.goodput,
            probe_programs=self.probe_programs,
        )
        return msgspec.structs.replace(case, **changes)
