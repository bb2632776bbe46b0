"""Runs a cell: its workload, its analysts, its engines, and the figures of what came of it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache

from bench.simulations.analysts import analysts_of
from bench.simulations.cell import CONSTANT, CUTOFF, Cell, Settings, steps_of
from bench.simulations.figures import Figures, figures_of
from bench.workloads import WorkloadSpec, build
from core.clock import MonotonicClock
from engine.simulator.dispatch import (
    ByProgram,
    Dispatcher,
    LeastLoad,
    OnlyOne,
    PowerOfKDispatch,
    RoundRobin,
)
from engine.simulator.outcome import SimResult
from engine.simulator.simulation import Simulation, SimulationSetup
from engine.simulator.workload import Workload
from scheduler.cutoff import CutoffTuner
from scheduler.policies import gmax

DISPATCH: Mapping[str, Callable[[Cell], Dispatcher]] = {
    "only": lambda cell: OnlyOne(),
    "round-robin": lambda cell: RoundRobin(),
    "least-load": lambda cell: LeastLoad(),
    "program": lambda cell: ByProgram(),
    "power-of-1": lambda cell: _power_of(cell, 1),
    "power-of-2": lambda cell: _power_of(cell, 2),
    "power-of-3": lambda cell: _power_of(cell, 3),
    "power-of-all": lambda cell: _power_of(cell, cell.replicas),
}
"""Who gets a call, by name; power-of-K is the project's own."""


def _power_of(cell: Cell, k: int) -> Dispatcher:
    rng = random.Random(cell.seed)
    return PowerOfKDispatch(cell.replicas, min(k, cell.replicas), cell.config, rng)


def play(cell: Cell) -> Figures:
    """Simulate a cell. Raises OSError or ValueError for what it names and is not there."""
    return figures_of(simulate(cell, is_timed=True), dict(cell.goodput))


def simulate(cell: Cell, *, is_timed: bool = False) -> SimResult:
    """The whole outcome; the same to the byte for a cell, but for the wall times of plans."""
    workload = built(cell.workload, cell.seed)
    steps = steps_of(cell.engine.steps)
    lengths, programs = analysts_of(cell.analyst, cell.seed)
    with _constants(cell.settings):
        simulation = Simulation(
            workload,
            SimulationSetup(
                replicas=((cell.engine.shape, steps),) * cell.replicas, config=cell.config
            ),
            lengths=lengths,
            programs=programs,
            dispatcher=DISPATCH[cell.dispatch](cell),
            wall=MonotonicClock() if is_timed else None,
        )
        _fix_cutoff(simulation, cell.settings)
        return simulation.run()


@lru_cache(maxsize=2)
def built(spec: WorkloadSpec, seed: int) -> Workload:
    """The workload; policies that take turns on it do not build it again."""
    return build(spec, seed)


@contextlib.contextmanager
def _constants(settings: Settings) -> Iterator[None]:
    """Constants of the policy for as long as a study of them runs. ValueError for an unknown."""
    wanted = {
        key.removeprefix(CONSTANT): float(value)
        for key, value in settings
        if key.startswith(CONSTANT)
    }
    for name in wanted:
        if not (name.isupper() and isinstance(getattr(gmax, name, None), float)):
            raise ValueError(f"{CONSTANT}{name} is no number of scheduler/policies/gmax.py")
    before = {name: getattr(gmax, name) for name in wanted}
    try:
        vars(gmax).update(wanted)
        yield
    finally:
        vars(gmax).update(before)


def _fix_cutoff(simulation: Simulation, settings: Settings) -> None:
    cutoff = dict(settings).get(CUTOFF)
    if cutoff is None:
        return
    # The policy adapts p online and nobody else wants it fixed: so it is no setting there.
    for replica in simulation._replicas:
        vars(replica.frames.policy)["tuner"] = CutoffTuner((float(cutoff),))
