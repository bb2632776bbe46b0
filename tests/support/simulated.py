"""Simulations for tests: short names for workloads, and an audit of everything that happens.

``simulate`` runs a workload while every step, token and plan is watched from outside; the
audit keeps its own account of who holds what and judges with ``core.slo.OutcomeTracker``.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from core.slo import (
    BestEffortSlo,
    CompoundSlo,
    DeadlineSlo,
    LatencySlo,
    OutcomeTracker,
    RequestTerms,
    slo_type,
)
from engine.simulator.job import Job
from engine.simulator.lanes import Lanes
from engine.simulator.outcome import CallOutcome, ProgramOutcome, SimResult
from engine.simulator.replica import Ended, Replica
from engine.simulator.shape import EngineShape
from engine.simulator.simulation import Simulation, SimulationSetup
from engine.simulator.steps import LinearSteps, Step, StepTime
from engine.simulator.workload import SimCall, SimProgram, SimSlo, SimStage, Workload
from scheduler.config import SchedulerConfig
from scheduler.frame import FrameManager
from scheduler.lifecycle import RequestState
from scheduler.plan import EngineCapacity, FramePlan

STREAM = LatencySlo(2.0, 0.1)
DEADLINE = DeadlineSlo(20.0)
PROGRAM = CompoundSlo(60.0, "")
BEST_EFFORT = BestEffortSlo(600.0)

STEPS = LinearSteps(constant_s=0.01, decode_s=0.001, context_s=1e-6, prefill_s=1e-4)

Place = tuple[int, int, int]
"""Program, stage and place of a call."""


def call(input_tokens: int, output_tokens: int, **more: Any) -> SimCall:
    return SimCall(input_tokens=input_tokens, output_tokens=output_tokens, **more)


def stage(*calls: SimCall, tool_s: float = 0.0) -> SimStage:
    return SimStage(calls=calls, tool_s=tool_s)


def program(*stages: SimStage, at_s: float = 0.0, slo: SimSlo = PROGRAM, **more: Any) -> SimProgram:
    more.setdefault("application", "app")
    return SimProgram(arrival_s=at_s, slo=slo, stages=stages, **more)


def request(
    input_tokens: int,
    output_tokens: int,
    *,
    at_s: float = 0.0,
    slo: SimSlo = STREAM,
    call_fields: dict[str, Any] | None = None,
    **more: Any,
) -> SimProgram:
    """A program of one call."""
    only = call(input_tokens, output_tokens, **(call_fields or {}))
    return program(stage(only), at_s=at_s, slo=slo, **more)


def workload(*programs: SimProgram, window_s: float | None = None) -> Workload:
    last_s = programs[-1].arrival_s if programs else 0.0
    return Workload(
        programs=programs, window_s=last_s + 1.0 if window_s is None else window_s, name="test"
    )


class Heard:
    """A step-time model that remembers what it was asked last."""

    def __init__(self, inner: StepTime) -> None:
        self._inner = inner
        self.last = Step(0, 0, 0, 0)

    def seconds(self, step: Step) -> float:
        self.last = step
        return self._inner.seconds(step)


@dataclass
class Run:
    """What a simulation came to, and what was seen on the way."""

    work: Workload
    result: SimResult
    steps: list[list[Step]]
    """By replica: every step that began."""
    in_flight: list[Step | None]
    """By replica: the one that was not over at the end."""
    tokens: dict[Place, list[float]]
    """When each token of a call was generated."""
    forecasts: list[tuple[str, float]]
    """Who was forecast, and the simulated time."""
    plans: int

    def call(self, program: int = 0, stage: int = 0, place: int = 0) -> CallOutcome:
        (found,) = [
            row
            for row in self.result.calls
            if (row.program, row.stage, row.place) == (program, stage, place)
        ]
        return found

    def program(self, index: int = 0) -> ProgramOutcome:
        return self.result.programs[index]


@dataclass
class Audit:
    """Watches replicas through their public methods while a simulation runs."""

    shapes: Sequence[EngineShape]
    heard: Sequence[Heard]
    steps: list[list[Step]]
    tokens: dict[Place, list[float]] = field(default_factory=lambda: defaultdict(list))
    ended: Counter[Place] = field(default_factory=Counter)
    forecasts: list[tuple[str, float]] = field(default_factory=list)
    replicas: dict[int, Replica] = field(default_factory=dict)
    num_plans: int = 0
    now_s: float = 0.0
    _limits: dict[int, int] = field(default_factory=dict)
    _jobs: dict[str, Job] = field(default_factory=dict)
    _lanes: dict[tuple[int, int], Job] = field(default_factory=dict)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for owner, name, around in (
                (Replica, "arrive", self._around_arrive),
                (Replica, "begin", self._around_begin),
                (Replica, "finish", self._around_finish),
                (Lanes, "enter", self._around_enter),
                (Lanes, "leave", self._around_leave),
                (Lanes, "step", self._around_step),
                (Lanes, "first_token", self._around_first_token),
                (FrameManager, "tick", self._around_tick),
                (FrameManager, "forecast", self._around_forecast),
            ):
                stack.enter_context(_wrapped(owner, name, around))
            yield

    # Replicas.

    def _around_arrive(self, inner: Callable[..., None], replica: Replica, job: Job) -> None:
        assert job.key not in self._jobs, "a call arrives twice"
        self._jobs[job.key] = job
        inner(replica, job)

    def _around_begin(
        self, inner: Callable[..., float | None], replica: Replica, now_s: float, ended: list[Ended]
    ) -> float | None:
        self._clock(now_s)
        self.replicas[id(replica)] = replica
        assert not replica.is_busy, "a step begins before the last one is over"
        before = replica.frames.num_running
        known = len(ended)
        over_s = inner(replica, now_s, ended)
        self._note_ended(ended[known:])
        running = replica.frames.num_running
        limit = self._limits.get(id(replica.frames))
        if limit is not None and running > before:
            assert running <= limit, "more run than the plan has"
        assert replica.is_busy == (over_s is not None)
        if over_s is not None:
            assert over_s > now_s
            self.steps[replica.index].append(self.heard[replica.index].last)
        self._check(replica)
        return over_s

    def _around_finish(
        self, inner: Callable[..., None], replica: Replica, now_s: float, ended: list[Ended]
    ) -> None:
        self._clock(now_s)
        known = len(ended)
        inner(replica, now_s, ended)
        self._note_ended(ended[known:])
        self._check(replica)

    def _clock(self, now_s: float) -> None:
        assert now_s >= self.now_s, "time goes back"
        self.now_s = now_s

    def _note_ended(self, ended: Sequence[Ended]) -> None:
        for item in ended:
            self.ended[place_of(item.job)] += 1

    def _shape(self, replica: Replica) -> EngineShape:
        return self.shapes[replica.index]

    def _check(self, replica: Replica) -> None:
        shape = self._shape(replica)
        capacity = replica.capacity()
        frames = replica.frames
        running = frames.count(RequestState.RUNNING)
        parked = frames.count(RequestState.PARKED)
        assert running <= shape.max_batch, "the batch is too large"
        assert running + parked <= shape.num_slots, "more hold KV than there are slots"
        if not replica.is_busy:
            assert capacity.free_slots == shape.num_slots - running - parked
        assert 0 <= capacity.free_kv_tokens <= shape.kv_tokens == capacity.total_kv_tokens
        assert replica.num_live == sum(1 for _ in frames.live())
        holders = [item for item in frames.live() if item.holds_kv]
        if not holders:
            assert capacity.free_kv_tokens == shape.kv_tokens, "KV of nobody"
        for item in frames.live():
            times = self.tokens[place_of(self._jobs[item.request_id])]
            assert item.generated_tokens == len(times), "the manager counts other tokens"

    def _around_tick(
        self,
        inner: Callable[..., FramePlan | None],
        frames: FrameManager,
        now_s: float,
        capacity: EngineCapacity,
    ) -> FramePlan | None:
        plan = inner(frames, now_s, capacity)
        if plan is not None:
            self._limits[id(frames)] = plan.num_run
            self.num_plans += 1
        return plan

    def _around_forecast(
        self, inner: Callable[..., None], frames: FrameManager, request_id: str, lengths: Any
    ) -> None:
        self.forecasts.append((request_id, self.now_s))
        inner(frames, request_id, lengths)

    # Tokens.

    def _around_enter(self, inner: Callable[..., int], lanes: Lanes, job: Job) -> int:
        lane = inner(lanes, job)
        assert (id(lanes), lane) not in self._lanes, "two requests in a lane"
        self._lanes[id(lanes), lane] = job
        return lane

    def _around_leave(self, inner: Callable[..., None], lanes: Lanes, job: Job) -> None:
        (key,) = [key for key, other in self._lanes.items() if other is job]
        del self._lanes[key]
        inner(lanes, job)

    def _around_step(
        self, inner: Callable[..., Any], lanes: Lanes, which: Any, now_s: float
    ) -> Any:
        assert len(set(which.tolist())) == len(which)
        for lane in which.tolist():
            self.tokens[place_of(self._lanes[id(lanes), lane])].append(now_s)
        return inner(lanes, which, now_s)

    def _around_first_token(
        self, inner: Callable[..., bool], lanes: Lanes, job: Job, now_s: float
    ) -> bool:
        self.tokens[place_of(job)].append(now_s)
        return inner(lanes, job, now_s)


def place_of(job: Job) -> Place:
    return (job.program, job.stage, job.place)


def _wrapped(owner: type, name: str, around: Callable[..., Any]) -> Any:
    inner = getattr(owner, name)

    def wrapper(*arguments: Any, **named: Any) -> Any:
        return around(inner, *arguments, **named)

    return mock.patch.object(owner, name, wrapper)


def simulate(
    work: Workload,
    *shapes: EngineShape,
    steps: StepTime | Sequence[StepTime] = STEPS,
    policy: str = "fcfs",
    config: dict[str, Any] | None = None,
    knows_speed: bool = True,
    drain_s: float | None = None,
    **more: Any,
) -> Run:
    """Run ``work``; all that can be said of any run is asserted on the way and at the end."""
    shapes = shapes or (EngineShape(),)
    speeds = list(steps) if isinstance(steps, Sequence) else [steps] * len(shapes)
    heard = [Heard(speed) for speed in speeds]
    setup = SimulationSetup(
        replicas=tuple(zip(shapes, heard, strict=True)),
        config=SchedulerConfig(policy=policy, **(config or {})),
        knows_speed=knows_speed,
        drain_s=drain_s,
    )
    audit = Audit(shapes, heard, [[] for _ in shapes])
    with audit.watching():
        result = Simulation(work, setup, **more).run()
    busy = {replica.index for replica in audit.replicas.values() if replica.is_busy}
    run = Run(
        work,
        result,
        audit.steps,
        [steps[-1] if index in busy else None for index, steps in enumerate(audit.steps)],
        audit.tokens,
        audit.forecasts,
        audit.num_plans,
    )
    check_ends(run, audit.ended)
    check_counts(run)
    check_verdicts(run)
    for replica in audit.replicas.values():
        if not replica.num_live:
            assert replica.capacity().free_kv_tokens == replica.capacity().total_kv_tokens
    return run


def check_ends(run: Run, ended: Counter[Place]) -> None:
    """Everything ends exactly once, and nothing begins before it may."""
    work, result = run.work, run.result
    rows = {(row.program, row.stage, row.place): row for row in result.calls}
    assert len(rows) == len(result.calls), "a call ends twice"
    assert [row.program for row in result.programs] == list(range(len(work.programs)))
    assert all(count == 1 for count in ended.values())
    for place, row in rows.items():
        # Who never had a replica ends in front of them.
        is_told = row.end != "unfinished" and row.replica >= 0
        assert ended[place] == int(is_told)
    for index, item in enumerate(work.programs):
        due_s: float | None = item.arrival_s
        for number, part in enumerate(item.stages):
            mine = [rows.get((index, number, place)) for place in range(len(part.calls))]
            if due_s is None:
                assert mine == [None] * len(mine), "a stage began that never should have"
                continue
            if None in mine:  # the simulation was over before
                assert mine == [None] * len(mine), "a part of a stage never ended"
                assert not result.programs[index].is_complete
                due_s = None
                continue
            calls = [row for row in mine if row is not None]
            for row, asked in zip(calls, part.calls, strict=True):
                assert row.arrival_s == due_s, "a stage waits for all of the one before"
                check_call(run, row, asked)
            next_tool_s = item.stages[number + 1].tool_s if number + 1 < len(item.stages) else 0.0
            is_done = all(row.end == "finished" for row in calls)
            due_s = max(row.end_s for row in calls) + next_tool_s if is_done else None


def check_call(run: Run, row: CallOutcome, asked: SimCall) -> None:
    times = run.tokens.get((row.program, row.stage, row.place), [])
    assert row.input_tokens == asked.input_tokens
    assert row.output_tokens == len(times) <= asked.output_tokens
    assert (row.end == "finished") == (len(times) == asked.output_tokens)
    assert times == sorted(times)
    assert row.first_token_s == (times[0] if times else None)
    assert row.end_s >= row.arrival_s
    if row.end == "finished":
        assert row.end_s == times[-1]
        assert row.reason is None
    elif row.end != "unfinished":
        assert row.reason
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert math.isclose(row.max_tbt_s, max(gaps, default=0.0), abs_tol=1e-9)
    if times:
        assert row.first_scheduled_s is not None
        assert row.arrival_s <= row.first_scheduled_s < times[0]


def check_counts(run: Run) -> None:
    """The engines' counts agree with the steps and the tokens that were seen."""
    for counts, steps, last in zip(run.result.replicas, run.steps, run.in_flight, strict=True):
        over = [step for step in steps if step is not last]
        assert counts.steps == len(over)
        assert counts.decode_tokens == sum(step.num_decodes for step in over)
        assert counts.prefill_tokens == sum(step.prefill_tokens for step in over)
        assert counts.busy_s <= run.result.end_s + (1e-9 if last is None else 0.0)
        decodes = [step.num_decodes for step in over if step.num_decodes]
        assert math.isclose(counts.mean_running, sum(decodes) / max(len(decodes), 1))
        for step in steps:
            assert min(step) >= 0
            assert step.num_decodes or step.prefill_tokens, "an empty step"
    total = sum(counts.preemptions for counts in run.result.replicas)
    assert total == sum(row.num_preemptions for row in run.result.calls)
    total = sum(counts.parks for counts in run.result.replicas)
    assert total == sum(row.num_parks for row in run.result.calls)
    streams = [
        row
        for row in run.result.calls
        if isinstance(run.work.programs[row.program].slo, LatencySlo)
    ]
    assert sum(run.result.tbt_counts) == sum(max(row.output_tokens - 1, 0) for row in streams)
    assert len(run.result.tbt_counts) == len(run.result.tbt_edges_s) + 1


def check_verdicts(run: Run) -> None:
    """Goodput is what ``OutcomeTracker`` makes of the same tokens."""
    rows = {(row.program, row.stage, row.place): row for row in run.result.calls}
    for index, (item, judged) in enumerate(
        zip(run.work.programs, run.result.programs, strict=True)
    ):
        mine = [row for place, row in rows.items() if place[0] == index]
        is_complete = len(mine) == item.num_calls and all(row.end == "finished" for row in mine)
        assert judged.is_complete == is_complete
        assert judged.kind == slo_type(item.slo)
        assert judged.application == item.application
        assert judged.arrival_s == item.arrival_s
        offered = {
            "latency": item.output_tokens,
            "best_effort": 0,
        }.get(judged.kind, item.input_tokens + item.output_tokens)
        assert judged.offered_tokens == offered
        assert judged.goodput_tokens <= offered
        last_s = max((row.end_s for row in mine), default=run.result.end_s)
        if is_complete:
            assert judged.end_s == last_s
        tracker = OutcomeTracker(RequestTerms(item.arrival_s, item.slo))
        times = sorted(
            time for place, all_s in run.tokens.items() if place[0] == index for time in all_s
        )
        for count, time_s in enumerate(times, start=1):
            tracker.sent(count, time_s)
        expected = tracker.finish(item.input_tokens, last_s, None if is_complete else "failed")
        assert judged.met == expected.met
        assert judged.goodput_tokens == expected.goodput_tokens
        assert _close(judged.ttft_s, expected.ttft_s)
        if is_complete or isinstance(item.slo, LatencySlo):
            assert _close(judged.worst_lateness_s, expected.worst_lateness_s)
        if isinstance(item.slo, LatencySlo) and mine:
            assert mine[0].on_time_tokens == expected.goodput_tokens


def _close(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, abs_tol=2e-6)
