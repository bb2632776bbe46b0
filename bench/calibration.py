"""What is known of a real server, and a simulation of it."""

import msgspec

from bench.load import Targets
from bench.replay import Engine
from bench.simulations import analysts
from engine.simulator.outcome import SimResult
from engine.simulator.shape import EngineShape
from engine.simulator.simulation import Simulation, SimulationSetup
from engine.simulator.steps import LinearSteps
from engine.simulator.workload import Workload
from scheduler.config import SchedulerConfig

PATIENCE = 30.0
"""In deadlines: every answer is waited for, so that its length is known."""


class Known(msgspec.Struct, frozen=True):
    """Of the server, for the simulator."""

    shape: EngineShape
    steps: LinearSteps
    engine: Engine
    targets: Targets
    own_model_s: tuple[float, ...]
    """What its scheduler has fitted itself: constant, decode, context, prefill, padding."""


def simulate(workload: Workload, policy: str, known: Known, analyst: str, seed: int) -> SimResult:
    """What the simulator makes of a load; for as long as a client waited."""
    lengths, programs = analysts.analysts_of(analyst, seed)
    setup = SimulationSetup(
        replicas=((known.shape, known.steps),),
        config=SchedulerConfig(policy=policy),
        drain_s=PATIENCE * known.targets.deadline_s,
    )
    return Simulation(workload, setup, lengths=lengths, programs=programs).run()
