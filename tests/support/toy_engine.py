"""A toy engine for tests: continuous batching in a few lines, driven by a real FrameManager.

It obeys every plan literally and keeps its own account of slots and KV, so a plan that asks
for more than there is fails here. Time is virtual.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from core.slo import OutcomeTracker, RequestTerms
from scheduler.frame import FrameManager
from scheduler.lifecycle import RequestState
from scheduler.plan import EngineCapacity, FramePlan
from scheduler.step_time import StepObservation


@dataclass
class Job:
    """A request and the length of the answer that the engine will give it."""

    request_id: str
    terms: RequestTerms
    input_tokens: int
    output_tokens: int
    max_output_tokens: int
    priority: int = 0
    generated: int = 0
    resident: bool = False
    tracker: OutcomeTracker | None = None


@dataclass
class ToyEngine:
    """Steps take ``base_s`` + ``decode_s`` per request + ``prefill_s`` per prompt token."""

    manager: FrameManager
    max_batch: int = 4
    total_kv: int = 2000
    total_slots: int = 8
    base_s: float = 0.01
    decode_s: float = 0.001
    prefill_s: float = 0.0001
    context_s: float = 0.0
    padding_s: float = 0.0
    now_s: float = 0.0
    waiting: dict[str, Job] = field(default_factory=dict)
    running: dict[str, Job] = field(default_factory=dict)
    parked: dict[str, Job] = field(default_factory=dict)
    ended: dict[str, tuple[RequestState, str]] = field(default_factory=dict)
    goodput: int = 0
    steps: int = 0
    admissions: tuple[str, ...] = ()

    def arrive(self, job: Job) -> None:
        job.tracker = OutcomeTracker(job.terms)
        self.waiting[job.request_id] = job
        self.manager.arrive(
            job.request_id,
            job.terms,
            input_tokens=job.input_tokens,
            max_output_tokens=job.max_output_tokens,
            priority=job.priority,
            known_output_tokens=min(job.output_tokens, job.max_output_tokens),
        )

    @property
    def used_kv(self) -> int:
        holders = [*self.running.values(), *self.parked.values()]
        return sum(job.input_tokens + job.generated for job in holders)

    def capacity(self) -> EngineCapacity:
        held = len(self.running) + len(self.parked)
        return EngineCapacity(
            max_batch=self.max_batch,
            free_kv_tokens=self.total_kv - self.used_kv,
            total_kv_tokens=self.total_kv,
            free_slots=self.total_slots - held,
        )

    def step(self) -> FramePlan | None:
        """Tick, obey, prefill what is admitted, decode one token each."""
        plan = self.manager.tick(self.now_s, self.capacity())
        if plan is not None:
            self._obey(plan)
        prefilled = self._prefill()
        self._relieve_pressure()
        decoding = list(self.running.values())
        context = sum(job.input_tokens + job.generated for job in decoding)
        longest = max((job.input_tokens + job.generated for job in decoding), default=0)
        padding = longest * len(decoding) - context
        duration_s = self.base_s + self.decode_s * len(decoding) + self.prefill_s * prefilled
        duration_s += self.context_s * context + self.padding_s * padding
        self.now_s += duration_s
        self.steps += 1
        if decoding:
            observed = StepObservation(duration_s, len(decoding), context, prefilled, padding)
            self.manager.observe_step(observed)
        for job in decoding:
            self._decode(job)
        self.check()
        return plan

    def _check_plan(self, plan: FramePlan) -> None:
        """No plan exceeds slots, tokens or the bound on moves, and each request has one fate."""
        config = self.manager.config
        assert 1 <= plan.num_run <= self.max_batch
        assert sum(plan.tokens.values()) <= plan.num_run * plan.frame_tokens
        assert all(1 <= tokens <= plan.frame_tokens for tokens in plan.tokens.values())
        most = max(1, int(self.max_batch * config.max_moves_fraction))
        assert len(plan.park) + len(plan.preempt) <= most, "churn"
        endings = [ending.request_id for ending in (*plan.drop, *plan.cancel)]
        fates = [*plan.run, *plan.park, *plan.preempt, *plan.resume, *endings]
        assert len(set(fates)) == len(fates), "a request has two fates"
        assert not set(plan.admit) & (set(fates) - set(plan.preempt))
        for decision in plan.decisions:
            for number in (decision.score, decision.in_time_fraction, decision.slack_s):
                assert number is None or math.isfinite(number)

    def _obey(self, plan: FramePlan) -> None:
        self._check_plan(plan)
        for ending in plan.drop:
            self.end(ending.request_id, RequestState.DROPPED, ending.reason)
        for ending in plan.cancel:
            self.end(ending.request_id, RequestState.ABORTED, ending.reason)
        for request_id in plan.preempt:
            self.preempt(request_id)
        for request_id in plan.park:
            self.parked[request_id] = self.running.pop(request_id)
            self.manager.parked(request_id)
        for request_id in plan.resume:
            self.running[request_id] = self.parked.pop(request_id)
            self.manager.resumed(request_id)
        self.admissions = plan.admit
        admitted = [item for item in plan.admit if item in self.waiting]
        assert len(self.running) + len(admitted) <= self.max_batch, "a plan exceeds the batch"
        assert len(self.running) + len(self.parked) + len(admitted) <= self.total_slots, (
            "a plan exceeds the request slots"
        )

    def _prefill(self) -> int:
        prefilled = 0
        for request_id in self.admissions:
            job = self.waiting.get(request_id)
            if job is None or len(self.running) >= self.max_batch:
                continue
            need = job.input_tokens + job.generated
            if need > self.total_kv - self.used_kv or self.capacity().free_slots < 1:
                continue
            self.running[request_id] = self.waiting.pop(request_id)
            self.manager.started(request_id, self.now_s)
            prefilled += need
        return prefilled

    def _relieve_pressure(self) -> None:
        if self.used_kv + len(self.running) <= self.total_kv:
            return
        for request_id in self.manager.victims(self.now_s, self.capacity()):
            if self.used_kv + len(self.running) <= self.total_kv or len(self.running) <= 1:
                if not self.parked:
                    return
                if self.used_kv + len(self.running) <= self.total_kv:
                    return
            if len(self.running) == 1 and request_id in self.running:
                continue
            self.preempt(request_id)

    def preempt(self, request_id: str) -> None:
        source = self.running if request_id in self.running else self.parked
        self.waiting[request_id] = source.pop(request_id)
        self.manager.preempted(request_id)

    def _decode(self, job: Job) -> None:
        job.generated += 1
        assert job.tracker is not None
        job.tracker.sent(job.generated, self.now_s)
        self.manager.progressed(job.request_id, job.generated)
        if job.generated >= min(job.output_tokens, job.max_output_tokens):
            self.end(job.request_id, RequestState.FINISHED, "")

    def end(self, request_id: str, state: RequestState, reason: str) -> None:
        assert request_id not in self.ended, "a request ended twice"
        for place in (self.waiting, self.running, self.parked):
            job = place.pop(request_id, None)
            if job is not None:
                assert job.tracker is not None
                outcome = job.tracker.finish(job.input_tokens, self.now_s, reason or None)
                self.goodput += outcome.goodput_tokens
        self.ended[request_id] = (state, reason)
        self.manager.ended(request_id, state)

    def check(self) -> None:
        """The engine's account and the manager's agree, and nothing is over its limit."""
        assert self.used_kv <= self.total_kv, "KV over its limit"
        assert len(self.running) <= self.max_batch
        assert len(self.running) + len(self.parked) <= self.total_slots
        states = {request.request_id: request.state for request in self.manager.live()}
        for request_id in self.running:
            assert states.pop(request_id) is RequestState.RUNNING
        for request_id in self.parked:
            assert states.pop(request_id) is RequestState.PARKED
        for request_id in self.waiting:
            assert states.pop(request_id) in (RequestState.WAITING, RequestState.PREEMPTED)
        assert not states, f"the manager knows requests that the engine does not: {states}"

    def run(self, jobs: list[Job], max_steps: int = 100_000) -> None:
        """Feed ``jobs`` as they arrive and step until all have ended."""
        pending = sorted(jobs, key=lambda job: job.terms.arrival_s)
        while pending or self.waiting or self.running or self.parked:
            while pending and pending[0].terms.arrival_s <= self.now_s:
                self.arrive(pending.pop(0))
            if not (self.waiting or self.running or self.parked):
                self.now_s = pending[0].terms.arrival_s
                continue
            self.step()
            assert self.steps < max_steps, "the engine does not come to an end"
