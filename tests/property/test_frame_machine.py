"""Hypothesis drives the frame manager through a toy engine that keeps its own account."""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from toy_engine import Job, ToyEngine

from core.slo import (
    BestEffortSlo,
    CompoundSlo,
    DeadlineSlo,
    LatencySlo,
    OnMiss,
    ReasoningSlo,
    RequestTerms,
    Slo,
)
from scheduler.config import SchedulerConfig
from scheduler.frame import FrameManager
from scheduler.lifecycle import RequestState
from scheduler.policies import POLICIES
from scheduler.programs import ProgramOutlook
from scheduler.step_time import StepObservation

seconds = st.floats(min_value=1e-3, max_value=1e6, allow_nan=False)
slos = st.one_of(
    st.builds(LatencySlo, seconds, seconds),
    st.builds(DeadlineSlo, seconds),
    st.builds(
        lambda left, program, final: CompoundSlo(left, program, final=final),
        st.floats(-10, 1e6, allow_nan=False),
        st.sampled_from(["p", "q"]),
        st.booleans(),
    ),
    st.builds(BestEffortSlo, seconds),
    st.builds(ReasoningSlo, seconds, seconds),
)
forecasts = st.lists(st.floats(0, 1e30), min_size=1, max_size=5)
nonsense = st.lists(st.sampled_from([math.nan, math.inf, -1.0]), max_size=3)
odd_durations = st.sampled_from([0.0, -1.0, math.nan, math.inf, 1e-12, 1e9])


class FrameMachine(RuleBasedStateMachine):
    """Arrivals, steps, aborts, odd clocks and odd observations in any order."""

    @initialize(
        policy=st.sampled_from(list(POLICIES)),
        max_batch=st.integers(1, 5),
        spare_slots=st.integers(0, 4),
        total_kv=st.integers(60, 800),
        frame_steps=st.integers(1, 10),
    )
    def build(
        self, policy: str, max_batch: int, spare_slots: int, total_kv: int, frame_steps: int
    ) -> None:
        config = SchedulerConfig(policy=policy, frame_steps=frame_steps, frame_s=0.1)
        self.engine = ToyEngine(
            FrameManager(config),
            max_batch=max_batch,
            total_kv=total_kv,
            total_slots=max_batch + spare_slots,
        )
        self.num_arrived = 0

    @rule(
        slo=slos,
        input_tokens=st.integers(1, 40),
        output_tokens=st.integers(1, 15),
        max_output=st.integers(1, 15),
        waiting_time_s=st.none() | seconds,
        on_miss=st.sampled_from(OnMiss),
        tenant=st.sampled_from(["", "a", "b"]),
        priority=st.integers(-(2**70), 2**70),
    )
    def arrive(
        self,
        slo: Slo,
        input_tokens: int,
        output_tokens: int,
        max_output: int,
        waiting_time_s: float | None,
        on_miss: OnMiss,
        tenant: str,
        priority: int,
    ) -> None:
        terms = RequestTerms(self.engine.now_s, slo, waiting_time_s, on_miss, tenant)
        name = f"r{self.num_arrived}"
        self.num_arrived += 1
        self.engine.arrive(Job(name, terms, input_tokens, output_tokens, max_output, priority))

    @rule(data=st.data(), lengths=forecasts)
    def forecast(self, data: st.DataObject, lengths: list[float]) -> None:
        name = f"r{data.draw(st.integers(0, self.num_arrived))}"
        self.engine.manager.forecast(name, lengths)

    @rule(data=st.data(), lengths=nonsense)
    def nonsense_is_refused(self, data: st.DataObject, lengths: list[float]) -> None:
        live = [request.request_id for request in self.engine.manager.live()]
        if live:
            with pytest.raises(ValueError, match="length forecast"):
                self.engine.manager.forecast(data.draw(st.sampled_from(sorted(live))), lengths)

    @rule(data=st.data())
    def answer_begins(self, data: st.DataObject) -> None:
        self.engine.manager.answer_began(f"r{data.draw(st.integers(0, self.num_arrived))}")

    @rule(program=st.sampled_from(["p", "q", "never"]), tokens=st.floats())
    def a_pattern_matches(self, program: str, tokens: float) -> None:
        outlook = ProgramOutlook(future_output_tokens=tokens, stage_due_s=tokens)
        self.engine.manager.expect("a", program, outlook)

    @rule(num_steps=st.integers(1, 12))
    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.engine.step()

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        engine = self.engine
        live = [*engine.waiting, *engine.running, *engine.parked]
        if live:
            engine.end(data.draw(st.sampled_from(sorted(live))), RequestState.ABORTED, "client")

    @rule(jump_s=st.sampled_from([-3600.0, -1.0, 3600.0]))
    def clock_jumps(self, jump_s: float) -> None:
        self.engine.now_s += jump_s

    @rule(duration_s=odd_durations)
    def odd_observation(self, duration_s: float) -> None:
        self.engine.manager.observe_step(StepObservation(duration_s, 3, 1000, 0))

    @rule(policy=st.sampled_from(list(POLICIES)))
    def policy_changes(self, policy: str) -> None:
        self.engine.manager.use_policy(policy)

    @invariant()
    def accounts_agree(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()

    def teardown(self) -> None:
        """Whatever happened, everything comes to an end, each request once."""
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        engine.run([], max_steps=engine.steps + 20_000)
        assert len(engine.ended) == self.num_arrived
        assert engine.used_kv == 0
        manager = engine.manager
        assert sum(manager.num_ended.values()) == manager.num_arrived == self.num_arrived


TestFrameMachine = FrameMachine.TestCase
TestFrameMachine.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
