"""What is known of a real server, and a simulation of it."""

import msgspec

from bench import pace
from bench.load import Targets
from bench.replay import Engine
from engine.simulator.analysts import LengthAnalyst, ProgramAnalyst
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

    def pace(self, turn_step_s: float) -> float:
        """How many times as long steps took in a turn as here, by ``bench.pace``.

        Args:
            turn_step_s: seconds of the reference step in that turn; 0: not known, as here.
        """
        return pace.ratio(turn_step_s, pace.reference_s(self.own_model_s))


def simulate(
    workload: Workload,
    policy: str,
    known: Known,
    analysts: tuple[LengthAnalyst, ProgramAnalyst],
    slower: float = 1.0,
) -> SimResult:
    """What the simulator makes of a load; for as long as a client waited.

    Args:
        slower: how many times as long each step takes as ``known`` has it.
    """
    lengths, programs = analysts
    setup = SimulationSetup(
        replicas=((known.shape, known.steps.slower(slower)),),
        config=SchedulerConfig(policy=policy),
        drain_s=PATIENCE * known.targets.deadline_s,
    )
    return Simulation(workload, setup, lengths=lengths, programs=programs).run()
