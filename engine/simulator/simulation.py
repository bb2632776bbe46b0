"""The event loop: programs unfold, calls go to replicas, steps begin and end.

Time is virtual. Events of the same time come in a fixed order (``_Order``), then in the order
in which they were made; nothing here draws a random number. So a run is reproducible to the
byte: the same workload, policy and analysts give the same ``SimResult``.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable

import msgspec
import numpy as np

from core.clock import Clock
from core.slo import (
    BestEffortSlo,
    CompoundSlo,
    DeadlineSlo,
    LatencySlo,
    RequestTerms,
    deadline_at_s,
)
from engine.simulator.analysts import (
    LengthAnalyst,
    Pace,
    Points,
    ProgramAnalyst,
    UnawareOfLengths,
    UnawareOfPrograms,
)
from engine.simulator.dispatch import Dispatcher, OnlyOne, Queue
from engine.simulator.job import Job
from engine.simulator.judge import Judge
from engine.simulator.lanes import TBT_EDGES_S
from engine.simulator.linear import plane
from engine.simulator.outcome import SimResult
from engine.simulator.replica import Ended, Replica
from engine.simulator.shape import EngineShape
from engine.simulator.steps import StepTime
from engine.simulator.workload import SimCall, SimProgram, Workload, check_seconds
from scheduler.config import SchedulerConfig
from scheduler.frame import FrameManager
from scheduler.lifecycle import RequestState
from scheduler.objective import GoodputObjective
from scheduler.patience import patience
from scheduler.programs import ProgramOutlook
from scheduler.step_time import StepTimeModel

IDLE_S = 0.01
"""How soon an engine that can run nothing, though calls are there, looks again."""
BEST_EFFORT_S = 60.0
"""How long after the window work without an objective is served on at most, by default."""
REASON_TOO_LONG = "does_not_fit"


class _Order(enum.IntEnum):
    """What comes first at the same time."""

    STEP_OVER = 0
    ARRIVAL = 1
    NEWS = 2
    WAKE = 3


class SimulationSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What is simulated, beside the workload.

    Attributes:
        replicas: shape and speed of each engine.
        config: of the scheduler, its policy included.
        knows_speed: the managers begin with a step-time model fitted to the engine, as one that
            has served for a while; else they learn it from their first steps.
        drain_s: how long after the window the simulation goes on at most; by default as long
            as anything could still count, and at most ``BEST_EFFORT_S`` for what counts nothing.
    """

    replicas: tuple[tuple[EngineShape, StepTime], ...]
    config: SchedulerConfig
    knows_speed: bool = True
    drain_s: float | None = None

    def __post_init__(self) -> None:
        if self.drain_s is not None:
            check_seconds("drain_s", self.drain_s)


class Simulation:
    """One run.

    Args:
        lengths, programs: what the schedulers are told; a fresh one each for every run.
        dispatcher: who gets a call, with more than one replica.
        wall: times the plans; None: nobody asks how long they take.
        on_progress: called now and then with the simulated seconds.
    """

    def __init__(
        self,
        workload: Workload,
        setup: SimulationSetup,
        *,
        lengths: LengthAnalyst | None = None,
        programs: ProgramAnalyst | None = None,
        dispatcher: Dispatcher | None = None,
        objective: GoodputObjective | None = None,
        wall: Clock | None = None,
        on_progress: Callable[[float], None] | None = None,
    ) -> None:
        if not setup.replicas:
            raise ValueError("replicas must be at least one replica, got none")
        for name, analyst in (("lengths", lengths), ("programs", programs)):
            if analyst is not None:
                check_seconds(f"{name}.latency_s", analyst.latency_s)
        self._workload = workload
        self._setup = setup
        self._lengths: LengthAnalyst = lengths or UnawareOfLengths()
        self._programs: ProgramAnalyst = programs or UnawareOfPrograms()
        self._dispatcher: Dispatcher = dispatcher or OnlyOne()
        self._queue = self._dispatcher if isinstance(self._dispatcher, Queue) else None
        """The same, where time runs in front of the replicas."""
        self._on_progress = on_progress
        self._replicas = [
            Replica(
                index,
                shape,
                steps,
                FrameManager(
                    setup.config,
                    objective=objective,
                    step_time=learnt_speed(shape, steps) if setup.knows_speed else None,
                ),
                wall,
            )
            for index, (shape, steps) in enumerate(setup.replicas)
        ]
        self._events: list[tuple[float, int, int, Callable[[], None]]] = []
        self._num_events = self._num_jobs = 0
        self._now_s = 0.0
        self._judge = Judge(workload)
        self._stage_left: dict[int, int] = {}
        """Calls of the live stage of each program that have not ended."""
        self._failed: set[int] = set()
        self._wakes: set[int] = set()
        self._refine_at: dict[int, int] = {}
        self._in_front: dict[int, Job] = {}
        """Calls that have no replica yet."""
        self._early: dict[int, Points] = {}
        """Forecasts of those."""
        self._overdue: list[tuple[Job, str]] = []
        """Those that have waited too long unless they get a replica now, and why they end."""
        self._refined: set[int] = set()
        """Live calls of which a newer forecast than their first is known."""
        self._num_open = len(workload.programs)
        """Programs that are not over."""
        self._over_s = 0.0
        """When the last call so far ended."""

    def run(self) -> SimResult:
        """Simulate to the end."""
        for index, program in enumerate(self._workload.programs):
            self._at(program.arrival_s, _Order.ARRIVAL, _Arrive(self, index, 0))
        end_s = self._horizon_s()
        said_s = 0.0
        events = self._events
        while events and events[0][0] <= end_s:
            self._now_s = events[0][0]
            while events and events[0][0] == self._now_s:
                heapq.heappop(events)[3]()
            self._pass()
            if self._on_progress is not None and self._now_s - said_s >= 10.0:
                said_s = self._now_s
                self._on_progress(said_s)
        # News and wakes may come later, but of nobody.
        return self._result(end_s if self._num_open else self._over_s)

    # Events.

    def _at(self, time_s: float, order: _Order, what: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time_s, int(order), self._num_events, what))

    def _horizon_s(self) -> float:
        """After this nothing can count any more."""
        if self._setup.drain_s is not None:
            return self._workload.window_s + self._setup.drain_s
        window_s = self._workload.window_s
        ends = [_last_use_s(program, window_s) for program in self._workload.programs]
        return max([window_s, *ends])

    def arrive(self, index: int, stage: int) -> None:
        """The calls of a stage arrive, side by side."""
        program = self._workload.programs[index]
        calls = program.stages[stage].calls
        self._stage_left[index] = len(calls)
        refused = []
        for place, call in enumerate(calls):
            terms = _terms(index, program, stage, call, self._now_s)
            job = Job(self._num_jobs, call, terms, program=index, stage=stage, place=place)
            self._num_jobs += 1
            if self._dispatch(job):
                self._forecast(job)
            else:
                refused.append(job)
        if isinstance(program.slo, CompoundSlo):
            outlook = self._programs.stage_began(index, program, stage, self._now_s, self._pace())
            self._tell(index, stage, outlook)
        # Not before: they may end a stage, which has begun only now.
        for job in refused:
            self._over(Ended(job, RequestState.ABORTED, REASON_TOO_LONG))

    def _dispatch(self, job: Job) -> bool:
        """It gets a replica or waits for one; False: none that it is for can hold it."""
        if not any(replica.can_hold(job.call) for replica in self._replicas):
            return False
        index = self._dispatcher.route(job, self._replicas, self._now_s)
        if index is not None:
            return self._bind(job, index)
        self._in_front[job.serial] = job
        if self._queue is not None:
            self._set_timer(job)
        return True

    def _bind(self, job: Job, index: int) -> bool:
        """It is for this replica; False: which cannot hold it."""
        replica = self._replicas[index]
        if not replica.can_hold(job.call):
            return False
        replica.arrive(job)
        return True

    def _set_timer(self, job: Job) -> None:
        """Look again when it will have waited for long enough."""
        cancels = self._replicas[0].frames.policy.traits.cancels_expired
        limit = patience(
            job.terms,
            deadline_at_s=deadline_at_s(job.terms),
            has_started=False,
            cancels_expired=cancels,
        )
        if limit is not None:
            until_s, reason = limit
            over_s = max(until_s, self._now_s)
            self._at(over_s, _Order.WAKE, lambda: self._note_overdue(job, reason))

    def _note_overdue(self, job: Job, reason: str) -> None:
        if job.serial in self._in_front:
            self._overdue.append((job, reason))

    def _forecast(self, job: Job) -> None:
        """Ask for its length."""
        points = self._lengths.forecast(job, self._workload.programs[job.program])
        if points is None:
            return
        if self._lengths.refine_every_tokens:
            self._refine_at[job.serial] = self._lengths.refine_every_tokens
        self._at(
            self._now_s + self._lengths.latency_s,
            _Order.NEWS,
            lambda: self._hand_over(job, points),
        )

    def _hand_over(self, job: Job, points: Points) -> None:
        """Its first forecast is here."""
        if job.serial in self._in_front:
            self._early[job.serial] = points
        elif job.replica >= 0 and job.serial not in self._refined:
            self._replicas[job.replica].frames.forecast(job.key, points)

    def _tell(self, index: int, stage: int, outlook: ProgramOutlook | None) -> None:
        """Of a program's rest, unless its next stage has begun meanwhile."""
        program = self._workload.programs[index]

        def news() -> None:
            if index in self._failed or self._judge.live_stage(index) != stage:
                return
            for replica in self._replicas:
                replica.frames.expect(program.tenant, str(index), outlook)

        self._judge.began(index, stage)
        self._at(self._now_s + self._programs.latency_s, _Order.NEWS, news)

    def step_over(self, replica: Replica) -> None:
        """A replica's step is over."""
        ended: list[Ended] = []
        replica.finish(self._now_s, ended)
        if self._refine_at:
            self._refine(replica)
        for item in ended:
            self._over(item)

    def _refine(self, replica: Replica) -> None:
        """Ask again for those that have passed a mark."""
        every = self._lengths.refine_every_tokens
        for job, generated in replica.progress():
            if generated >= self._refine_at.get(job.serial, generated + 1):
                self._refine_at[job.serial] = (generated // every + 1) * every
                points = self._lengths.refined(job, generated)
                if points is not None:
                    self._refined.add(job.serial)
                    replica.frames.forecast(job.key, points)

    def _over(self, ended: Ended) -> None:
        """A call has ended; perhaps its stage, and its program."""
        job, state, reason = ended
        self._over_s = self._now_s
        self._judge.call_ended(job, state, reason, self._now_s)
        self._refine_at.pop(job.serial, None)
        self._refined.discard(job.serial)
        is_finished = state is RequestState.FINISHED
        self._lengths.ended(job, is_finished=is_finished)
        index = job.program
        self._stage_left[index] -= 1
        if not is_finished:
            self._failed.add(index)
        if self._stage_left[index] == 0:
            self._stage_over(index, job.stage)

    def _stage_over(self, index: int, stage: int) -> None:
        program = self._workload.programs[index]
        is_failed = index in self._failed
        if not is_failed and stage + 1 < len(program.stages):
            following = program.stages[stage + 1]
            outlook = self._programs.stage_ended(index, program, stage, self._now_s, self._pace())
            self._tell(index, stage, outlook)
            self._at(
                self._now_s + following.tool_s, _Order.ARRIVAL, _Arrive(self, index, stage + 1)
            )
            return
        del self._stage_left[index]
        self._num_open -= 1
        if isinstance(program.slo, CompoundSlo):
            self._programs.ended(index, program, is_complete=not is_failed)
            for replica in self._replicas:
                replica.frames.program_closed(program.tenant, str(index), is_cancelled=is_failed)

    # Passes.

    def _pass(self) -> None:
        """Calls get their replicas; every engine that stands still plans and begins a step."""
        if self._in_front:
            self._assign()
        for replica in self._replicas:
            if replica.is_busy or not replica.num_live:
                continue
            ended: list[Ended] = []
            end_s = replica.begin(self._now_s, ended)
            for item in ended:
                self._over(item)
            if ended and self._in_front:
                # The plan has made room: there may be nothing else to wait for.
                self._at(self._now_s, _Order.WAKE, _nothing)
            if end_s is not None:
                self._at(end_s, _Order.STEP_OVER, _StepOver(self, replica))
            elif replica.num_live and replica.index not in self._wakes:
                self._wakes.add(replica.index)
                self._at(self._now_s + IDLE_S, _Order.WAKE, _Wake(self._wakes, replica.index))

    def _assign(self) -> None:
        """Calls in front get a replica; whoever has waited long enough for none is dropped."""
        for job, index in self._dispatcher.assign(self._replicas, self._now_s):
            del self._in_front[job.serial]
            points = self._early.pop(job.serial, None)
            if not self._bind(job, index):
                self._over(Ended(job, RequestState.ABORTED, REASON_TOO_LONG))
            elif points is not None:
                self._hand_over(job, points)
        overdue, self._overdue = self._overdue, []
        for job, reason in overdue:
            if self._queue is not None and job.serial in self._in_front:
                del self._in_front[job.serial]
                self._early.pop(job.serial, None)
                self._queue.withdraw(job)
                self._over(Ended(job, RequestState.DROPPED, reason))

    def _pace(self) -> Pace:
        """Of the engines now, on average."""
        step_s = prefill_s = 0.0
        for replica in self._replicas:
            model = replica.frames.step_time
            decoding = max(replica.num_decoding, 1)
            step_s += model.pace_s(decoding, decoding * replica.frames.mean_context_tokens)
            prefill_s += model.prefill_s(1)
        return Pace(step_s / len(self._replicas), prefill_s / len(self._replicas))

    def _result(self, end_s: float) -> SimResult:
        for replica in self._replicas:
            for job in replica.close(end_s):
                self._judge.unfinished(job, end_s)
        for job in self._dispatcher.waiting():
            self._judge.unfinished(job, end_s)
        counts = np.sum([replica.lanes.tbt_counts for replica in self._replicas], axis=0)
        return SimResult(
            policy=self._setup.config.policy,
            workload=self._workload.name,
            window_s=self._workload.window_s,
            end_s=end_s,
            programs=self._judge.programs(end_s),
            calls=self._judge.calls(),
            replicas=tuple(replica.counts() for replica in self._replicas),
            tbt_edges_s=TBT_EDGES_S,
            tbt_counts=tuple(counts.tolist()),
            plan_s=tuple(s for replica in self._replicas for s in replica.plan_s),
        )


def _nothing() -> None:
    """An event after which all look again."""


class _Arrive:
    """An event; a class, so that a million of them are cheap and can be told apart."""

    __slots__ = ("_index", "_simulation", "_stage")

    def __init__(self, simulation: Simulation, index: int, stage: int) -> None:
        self._simulation, self._index, self._stage = simulation, index, stage

    def __call__(self) -> None:
        self._simulation.arrive(self._index, self._stage)


class _StepOver:
    __slots__ = ("_replica", "_simulation")

    def __init__(self, simulation: Simulation, replica: Replica) -> None:
        self._simulation, self._replica = simulation, replica

    def __call__(self) -> None:
        self._simulation.step_over(self._replica)


class _Wake:
    __slots__ = ("_index", "_wakes")

    def __init__(self, wakes: set[int], index: int) -> None:
        self._wakes, self._index = wakes, index

    def __call__(self) -> None:
        self._wakes.discard(self._index)


def learnt_speed(shape: EngineShape, steps: StepTime) -> StepTimeModel:
    """What a manager would have learnt of an engine: the plane through a few of its steps."""
    line = plane(shape, steps)
    return StepTimeModel.known(
        line.constant_s, line.decode_s, line.context_s, line.prefill_s, line.padding_s
    )


def _last_use_s(program: SimProgram, window_s: float) -> float:
    """After that nothing of it can count any more, or it has had its time."""
    match program.slo:
        case LatencySlo(target_ttft_s, target_tbt_s):
            return program.arrival_s + target_ttft_s + program.output_tokens * target_tbt_s
        case DeadlineSlo(deadline_s) | CompoundSlo(deadline_s):
            return program.arrival_s + deadline_s
        case BestEffortSlo(deadline_s):
            return min(program.arrival_s + deadline_s, window_s + BEST_EFFORT_S)


def _terms(
    index: int, program: SimProgram, stage: int, call: SimCall, now_s: float
) -> RequestTerms:
    """Of a call of ``stage`` that arrives now, as the server would have read them."""
    slo = program.slo
    if isinstance(slo, CompoundSlo):
        age_s = now_s - program.arrival_s
        slo = CompoundSlo(
            slo.deadline_s - age_s,
            program_id=str(index),
            node=call.role,
            program_age_s=age_s,
            application=program.application,
            tools=program.stages[stage].tools,
        )
    return RequestTerms(
        now_s,
        slo,
        waiting_time_s=program.waiting_time_s,
        on_miss=program.on_miss,
        tenant=program.tenant,
    )
