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
    program_of,
)
from scheduler.config import SchedulerConfig
from scheduler.frame import FrameManager
from scheduler.lifecycle import RequestState
from scheduler.policies import POLICIES
from scheduler.programs import ProgramOutlook
from scheduler.step_time import StepObservation

TENANTS = ("", "a", "b")
PROGRAMS = ("p", "q")
seconds = st.floats(min_value=1e-3, max_value=1e6, allow_nan=False)
slos = st.one_of(
    st.builds(LatencySlo, seconds, seconds),
    st.builds(DeadlineSlo, seconds),
    st.builds(
        lambda left, program, final: CompoundSlo(left, program, final=final),
        st.floats(-10, 1e6, allow_nan=False),
        st.sampled_from(PROGRAMS),
        st.booleans(),
    ),
    st.builds(BestEffortSlo, seconds),
    st.builds(ReasoningSlo, seconds, seconds),
)
forecasts = st.lists(st.floats(0, 1e30), min_size=1, max_size=5)
nonsense = st.lists(st.sampled_from([math.nan, math.inf, -1.0]), max_size=3)
odd_durations = st.sampled_from([0.0, -1.0, math.nan, math.inf, 1e-12, 1e9])
amounts = st.floats() | st.floats(0, 1000)


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
        config = SchedulerConfig(
            policy=policy, frame_steps=frame_steps, frame_s=0.1, program_timeout_s=2.0
        )
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
        tenant=st.sampled_from(TENANTS),
        priority=st.integers(-(2**70), 2**70),
        closes=st.sampled_from(["", "", *PROGRAMS]),
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
        closes: str,
    ) -> None:
        closed = closes if isinstance(slo, LatencySlo) else ""
        terms = RequestTerms(self.engine.now_s, slo, waiting_time_s, on_miss, tenant, closed)
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

    @rule(
        tenant=st.sampled_from(TENANTS),
        program=st.sampled_from([*PROGRAMS, "never"]),
        is_known=st.booleans(),
        tokens=amounts,
        tool_s=amounts,
        in_s=st.none() | amounts,
    )
    def a_pattern_matches(
        self,
        tenant: str,
        program: str,
        is_known: bool,
        tokens: float,
        tool_s: float,
        in_s: float | None,
    ) -> None:
        at_s = None if in_s is None else self.engine.now_s + in_s
        outlook = ProgramOutlook(
            future_input_tokens=tokens,
            future_output_tokens=tokens,
            future_stage_tokens=tokens,
            future_spread_tokens=tokens,
            future_tool_s=tool_s,
            next_call_s=at_s,
            next_input_tokens=tokens,
            stage_due_s=at_s,
        )
        self.engine.manager.expect(tenant, program, outlook if is_known else None)

    @rule(tenant=st.sampled_from(TENANTS), program=st.sampled_from([*PROGRAMS, "never"]))
    def a_client_ends_its_program(self, tenant: str, program: str) -> None:
        self.engine.manager.program_closed(tenant, program)

    @rule(tenant=st.sampled_from(TENANTS), program=st.sampled_from(PROGRAMS))
    def a_client_cancels_its_program(self, tenant: str, program: str) -> None:
        engine = self.engine
        engine.manager.program_closed(tenant, program)
        for request in list(engine.manager.live()):
            if (request.terms.tenant, program_of(request.terms)) == (tenant, program):
                engine.end(request.request_id, RequestState.ABORTED, "program_cancelled")
        # Nobody has heard of it any more: nothing is left to close.
        known = len(engine.manager.programs)
        engine.manager.program_closed(tenant, program)
        assert len(engine.manager.programs) == known

    @rule(pause_s=st.floats(0, 5))
    def time_passes(self, pause_s: float) -> None:
        self.engine.now_s += pause_s

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

    @invariant()
    def each_program_has_one_place(self) -> None:
        if not hasattr(self, "engine"):
            return
        manager = self.engine.manager
        places: dict[tuple[str, str], set[int]] = {}
        for request in manager.live():
            program = program_of(request.terms)
            place = int(manager.table.program[request.row])
            assert (place >= 0) == bool(program)
            if program:
                places.setdefault((request.terms.tenant, program), set()).add(place)
        assert all(len(found) == 1 for found in places.values())
        assert len(set().union(*places.values())) == len(places)
        assert len(places) <= len(manager.programs) <= len(TENANTS) * len(PROGRAMS)
        assert manager.programs.num_indices <= len(TENANTS) * len(PROGRAMS)
        now_s = self.engine.now_s
        assert manager.programs.foreseen_tokens(now_s, now_s + 1) >= 0

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
        manager.programs.expire(math.inf)
        assert len(manager.programs) == 0, "an idle program outlives its timeout"


TestFrameMachine = FrameMachine.TestCase
TestFrameMachine.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
