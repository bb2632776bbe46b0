"""An engine of a few lines: it carries out plans to the letter and keeps account."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from core.clock import ManualClock
from core.slo import BestEffortSlo, DeadlineSlo, OnMiss, RequestTerms, Slo
from scheduler.config import SchedulerConfig
from scheduler.frame import FrameManager
from scheduler.lifecycle import RequestState
from scheduler.plan import EngineCapacity, FramePlan, PlanKind
from scheduler.step_time import StepObservation, StepTimeModel

if TYPE_CHECKING:
    from scheduler.fairness import FairFunction
    from scheduler.objective import GoodputObjective
    from scheduler.request import Request

FRAME_S = 1.0
BEST_EFFORT = BestEffortSlo(600)
RUNNING, PARKED = RequestState.RUNNING, RequestState.PARKED


class Engine:
    """Carries out plans to the letter and keeps the account of KV and request slots."""

    def __init__(
        self,
        policy: str = "edf",
        *,
        max_batch: int = 2,
        total_kv: int = 100_000,
        total_slots: int = 64,
        objective: GoodputObjective | None = None,
        fair: FairFunction | None = None,
        step_time: StepTimeModel | None = None,
        **config: Any,
    ) -> None:
        given: dict[str, Any] = {} if fair is None else {"fair": fair}
        self.frames = FrameManager(
            SchedulerConfig(policy=policy, frame_s=FRAME_S, **config),
            objective=objective,
            step_time=step_time,
            **given,
        )
        self.clock = ManualClock(1000.0)
        self.max_batch = max_batch
        self.total_kv = total_kv
        self.total_slots = total_slots

    def arrive(
        self,
        name: str,
        slo: Slo = BEST_EFFORT,
        *,
        input_tokens: int = 100,
        max_output_tokens: int = 100,
        waiting_time_s: float | None = None,
        on_miss: OnMiss = OnMiss.FINISH,
        tenant: str = "",
        **more: Any,
    ) -> Request:
        """A request arrives now."""
        return self.frames.arrive(
            name,
            RequestTerms(self.clock.now_s(), slo, waiting_time_s, on_miss, tenant),
            input_tokens=input_tokens,
            max_output_tokens=max_output_tokens,
            **more,
        )

    def capacity(self) -> EngineCapacity:
        holders = [request for request in self.frames.live() if request.holds_kv]
        used = sum(request.context_tokens for request in holders)
        return EngineCapacity(
            self.max_batch, self.total_kv - used, self.total_kv, self.total_slots - len(holders)
        )

    def tick(self) -> FramePlan | None:
        """Plan the next step and carry the plan out."""
        plan = self.frames.tick(self.clock.now_s(), self.capacity())
        if plan is not None:
            self.obey(plan)
        return plan

    def obey(self, plan: FramePlan) -> None:
        for endings, state in (
            (plan.drop, RequestState.DROPPED),
            (plan.cancel, RequestState.ABORTED),
        ):
            for ending in endings:
                self.frames.ended(ending.request_id, state)
        for name in plan.preempt:
            self.frames.preempted(name)
        for name in plan.park:
            self.frames.parked(name)
        for name in plan.resume:
            self.frames.resumed(name)
        for name in plan.admit:
            self.frames.started(name, self.clock.now_s())
        assert len(self.names(RUNNING)) <= min(self.max_batch, plan.num_run)

    def plan(self) -> FramePlan:
        """Tick, where there must be a plan."""
        plan = self.tick()
        assert plan is not None
        return plan

    def next_frame(self) -> FramePlan:
        """Let the frame pass and plan the next one."""
        self.clock.advance(FRAME_S)
        plan = self.plan()
        assert plan.kind is PlanKind.FRAME
        return plan

    def decode_steps(self, num_steps: int) -> None:
        """So many steps of decoding, of next to no time."""
        for _ in range(num_steps):
            self.frames.observe_step(StepObservation(1e-3, 2, 200, 0))

    def decode(self, num_steps: int, step_s: float) -> None:
        """So many steps without a plan in between, each a token for everybody who runs."""
        for _ in range(num_steps):
            running = [request for request in self.frames.live() if request.state is RUNNING]
            context = sum(request.context_tokens for request in running)
            self.clock.advance(step_s)
            self.frames.observe_step(StepObservation(step_s, len(running), context, 0))
            for request in running:
                self.frames.progressed(request.request_id, request.generated_tokens + 1)

    def finish_all(self) -> None:
        """Whatever lives finishes, once it has started."""
        for request in list(self.frames.live()):
            if request.state in (RequestState.WAITING, RequestState.PREEMPTED):
                self.run(request.request_id)
            self.finish(request.request_id)

    def finish(self, name: str) -> None:
        self.frames.ended(name, RequestState.FINISHED)

    def run(self, *names: str) -> None:
        """Have these running, whatever the policy thinks."""
        for name in names:
            self.frames.started(name, self.clock.now_s())

    def names(self, state: RequestState) -> list[str]:
        return [request.request_id for request in self.frames.live() if request.state is state]


def running_engine(*loose: str, policy: str = "edf", due_s: float = 100.0, **more: Any) -> Engine:
    """These requests run, with that deadline, and the frame has just begun."""
    engine = Engine(policy, max_batch=len(loose), **more)
    for name in loose:
        engine.arrive(name, DeadlineSlo(due_s))
    plan = engine.plan()
    assert set(plan.admit) == set(loose)
    return engine
