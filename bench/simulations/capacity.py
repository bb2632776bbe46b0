"""1.0x load: the arrival rate at which a work-conserving engine with a full batch is just busy.

Measured in a closed loop: programs wait at the door in their order, and the next one begins as
soon as the engine's batch would have a place; whoever has begun is served first come, first
served, with chunked prefill (``sarathi``). So the batch is always just full, the prefix cache
holds what runs, and nothing queues inside. The rate is that of the work done in the steady
middle, over the mean work of a program of the mix: work is engine seconds reckoned call by
call, so that chance in which programs came costs little accuracy. Objectives play no part.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bench.simulations.cell import Engine, steps_of
from bench.workloads import Poisson, Targets, WorkloadSpec, build
from engine.simulator.job import Job
from engine.simulator.linear import plane
from engine.simulator.outcome import SimResult
from engine.simulator.replica import Replica
from engine.simulator.simulation import Simulation, SimulationSetup
from engine.simulator.steps import LinearSteps
from engine.simulator.workload import SimProgram, Workload
from scheduler.config import SchedulerConfig

PROBE_SEED = 987_654
"""No seed of a comparison."""
MIDDLE = (0.2, 0.8)
"""Shares of the programs done between which the engine's pace counts."""
AHEAD = 8
"""Calls that may wait in the engine: a place that gets free is taken in the same step."""
PROGRAMS = 1500
"""Served for a measurement."""
SAMPLE = 20
"""The mean work of a program is of so many times the programs served."""


class CapacityProbe(msgspec.Struct, frozen=True, kw_only=True, tag="capacity"):
    """What is asked: of a workload's mix alone, whatever its rate, arrivals or objectives."""

    workload: WorkloadSpec
    engine: Engine
    programs: int = PROGRAMS


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured.

    Attributes:
        programs_per_s: the arrival rate of 1.0x load.
        calls_per_s: LLM calls of those.
        tokens_per_s: output tokens generated then.
        mean_running: requests decoding, averaged over decode steps.
    """

    programs_per_s: float
    calls_per_s: float
    tokens_per_s: float
    mean_running: float


def probe_of(spec: WorkloadSpec, engine: Engine, programs: int = PROGRAMS) -> CapacityProbe:
    """The probe of a workload's mix; equal for all that differ in what plays no part."""
    mix = msgspec.structs.replace(
        spec,
        rate_per_s=1.0,
        window_s=1.0,
        arrivals=Poisson(),
        targets=Targets(),
        slo_scale=1.0,
        waiting_time_s=None,
    )
    shape = msgspec.structs.replace(engine.shape, mixes_chunks=True)
    return CapacityProbe(
        workload=mix,
        engine=msgspec.structs.replace(engine, shape=shape),
        programs=programs,
    )


def measure(probe: CapacityProbe) -> Capacity:
    """Serve the programs in a closed loop."""
    steps = steps_of(probe.engine.steps)
    line = plane(probe.engine.shape, steps)
    served = _programs(probe, probe.programs, PROBE_SEED)
    sample = _programs(probe, SAMPLE * probe.programs, PROBE_SEED + 1)
    at_door = [msgspec.structs.replace(program, arrival_s=0.0) for program in served]
    simulation = Simulation(
        Workload(programs=tuple(at_door), window_s=1.0),
        SimulationSetup(
            replicas=((probe.engine.shape, steps),),
            config=SchedulerConfig(policy="sarathi"),
            drain_s=1e9,
        ),
        dispatcher=ClosedLoop(probe.engine.shape.max_batch),
    )
    result = simulation.run()
    batch = probe.engine.shape.max_batch
    work_s = [engine_seconds(program, line, batch) for program in served]
    mean_work_s = sum(engine_seconds(one, line, batch) for one in sample) / len(sample)
    begin_s, end_s, done_s = _middle(result, work_s)
    rate = done_s / (end_s - begin_s) / mean_work_s
    num_calls = sum(program.num_calls for program in sample) / len(sample)
    num_tokens = sum(program.output_tokens for program in sample) / len(sample)
    return Capacity(
        programs_per_s=rate,
        calls_per_s=rate * num_calls,
        tokens_per_s=rate * num_tokens,
        mean_running=result.replicas[0].mean_running,
    )


def _programs(probe: CapacityProbe, num: int, seed: int) -> Sequence[SimProgram]:
    spec = msgspec.structs.replace(probe.workload, rate_per_s=1.0, window_s=1.5 * num + 50.0)
    programs = build(spec, seed).programs
    return programs[:num]


def engine_seconds(program: SimProgram, steps: LinearSteps, batch: int) -> float:
    """Of all its calls, each step shared by ``batch`` of them, its shared prefixes cached."""
    each_s = steps.constant_s / batch + steps.decode_s
    total = 0.0
    for stage in program.stages:
        for call in stage.calls:
            total += steps.prefill_s * (call.input_tokens - call.prefix_tokens)
            context = call.input_tokens + call.output_tokens / 2
            total += call.output_tokens * (each_s + steps.context_s * context)
    return total


def _middle(result: SimResult, work_s: Sequence[float]) -> tuple[float, float, float]:
    """Begin and end of the steady middle, and the work of the programs that ended in it."""
    ends = sorted((one.end_s, work_s[one.program]) for one in result.programs)
    first, last = (int(share * (len(ends) - 1)) for share in MIDDLE)
    done_s = sum(work for _, work in ends[first + 1 : last + 1])
    return ends[first][0], ends[last][0], done_s


class ClosedLoop:
    """Lets the next program in when the batch would have a place for its first calls."""

    def __init__(self, max_batch: int) -> None:
        self._most = max_batch + AHEAD
        self._door: dict[str, Job] = {}

    def route(self, job: Job, replicas: Sequence[Replica], now_s: float) -> int | None:
        if job.stage > 0:
            return 0
        self._door[job.key] = job
        return None

    def assign(self, replicas: Sequence[Replica], now_s: float) -> list[tuple[Job, int]]:
        room = self._most - replicas[0].num_live
        found: list[tuple[Job, int]] = []
        while room > 0 and self._door:
            first = next(iter(self._door.values()))
            # Calls of one stage begin together: they came one after the other.
            for job in [first, *self._siblings(first)]:
                del self._door[job.key]
                found.append((job, 0))
                room -= 1
        return found

    def waiting(self) -> list[Job]:
        return list(self._door.values())

    def _siblings(self, first: Job) -> list[Job]:
        serials = range(first.serial + 1, first.serial + 1 + 4096)
        found = []
        for serial in serials:
            job = self._door.get(str(serial))
            if job is None or job.program != first.program:
                break
            found.append(job)
        return found


NOTE = (
    "1.0x load is the arrival rate at which a first-come-first-served engine with chunked prefill "
    "and a full batch is just saturated, measured in a closed loop on this mix and this engine"
)
