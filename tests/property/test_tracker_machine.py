"""Hypothesis drives the tracker with programs that unfold, break off, fail and come again."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from program_shapes import PACE, call

from graphs.amortise import Amortisation
from graphs.protocol import Arrived, Closed, Finished, check_outlook
from graphs.request_graph import validate
from graphs.store import PatternStore
from graphs.tracker import Tracker

TIMEOUT_S = 50.0
PROGRAMS = st.integers(1, 8)
NODES = st.integers(1, 6)
CALLS = st.fixed_dictionaries(
    {
        "model": st.sampled_from([7, 7, 7, 8]),
        "role": st.sampled_from([0, 0, 5]),
        "tools": st.sampled_from([(), (), (3,), (3, 4)]),
        "parents": st.lists(NODES, max_size=2).map(tuple),
        "input_tokens": st.sampled_from([0, 10, 300, 20_000]),
    }
)
ODD_TIMES = st.sampled_from([0.0, 0.0, 0.0, -30.0, 30.0, 1e6])


class TrackerMachine(RuleBasedStateMachine):
    """Arrivals, ends, closings, silences, odd clocks and clusterings in any order."""

    @initialize(
        how=st.sampled_from(Amortisation),
        max_programs=st.integers(1, 6),
        capacity=st.integers(2, 6),
    )
    def build(self, how: Amortisation, max_programs: int, capacity: int) -> None:
        self.max_programs = max_programs
        self.store = PatternStore(capacity)
        self.tracker = Tracker(self.store, timeout_s=TIMEOUT_S, how=how, max_programs=max_programs)
        self.now_s = 0.0
        self.places: dict[int, int] = {}
        self.num_taken = 0
        self.clustered: Any = None

    def take(self, event: Arrived | Finished | Closed) -> None:
        self.num_taken += 1
        self.tracker.take(event, PACE, self.now_s, b"p%d" % (self.num_taken % 3))

    @rule(
        program=PROGRAMS,
        node=NODES,
        of_call=CALLS,
        odd_s=ODD_TIMES,
        is_final=st.sampled_from([False, False, False, True]),
        deadline_s=st.sampled_from([0.001, 10.0, 1e5, -5.0]),
        application=st.integers(0, 1),
    )
    def arrive(
        self,
        program: int,
        node: int,
        of_call: dict[str, Any],
        odd_s: float,
        is_final: bool,
        deadline_s: float,
        application: int,
    ) -> None:
        place = self.places.get(program, 0) if self.tracker.get(program) else 0
        self.places[program] = place + 1
        arrival = Arrived(
            program=program,
            application=application,
            place=place,
            call=call(node, self.now_s + odd_s, **of_call),
            opened_s=self.now_s - 1,
            deadline_at_s=self.now_s + deadline_s,
            is_final=is_final,
        )
        self.take(arrival)
        running = self.tracker.get(program)
        assert running is not None
        assert running.graph.knows(node)

    @rule(program=PROGRAMS, node=NODES)
    def arrive_in_the_middle(self, program: int, node: int) -> None:
        event = Arrived(program, 0, 3, call(node, self.now_s), 0.0, 60.0, is_final=False)
        self.take(event)

    @rule(
        program=PROGRAMS,
        node=NODES,
        tokens=st.sampled_from([0, 1, 100, 30_000]),
        odd_s=ODD_TIMES,
        has_failed=st.sampled_from([False, False, False, True]),
    )
    def finish(self, program: int, node: int, tokens: int, odd_s: float, has_failed: bool) -> None:
        self.take(Finished(program, node, tokens, self.now_s + odd_s, has_failed))

    @rule(program=PROGRAMS)
    def finish_all(self, program: int) -> None:
        for node in range(1, 7):
            self.take(Finished(program, node, 50, self.now_s, has_failed=False))

    @rule(program=PROGRAMS, is_cancelled=st.booleans())
    def close(self, program: int, is_cancelled: bool) -> None:
        self.take(Closed(program, is_cancelled))
        left = self.tracker.get(program)
        assert left is None or (left.graph.num_live and not is_cancelled)

    @rule(seconds=st.sampled_from([0.1, 5.0, 60.0, 60.0, 5000.0, -40.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.tracker.expire(self.now_s)
        self.store.decay(self.now_s)
        assert len(self.tracker) <= self.max_programs

    @rule()
    def cluster(self) -> None:
        if self.store.is_clustering_due:
            self.clustered = self.store.clustering().run()

    @rule()
    def adopt(self) -> None:
        if self.clustered is not None:
            self.store.adopt(self.clustered)

    @rule()
    def look(self) -> None:
        for running, outlook in self.tracker.outlooks():
            check_outlook(outlook)
            graph = running.graph
            assert self.tracker.get(outlook.program) is running
            assert outlook.num_calls == graph.num_calls
            assert 0 <= outlook.stage < graph.num_stages
            for value in msgspec.structs.astuple(outlook):
                assert value is None or math.isfinite(value)
            if outlook.stage_due_s is not None:
                assert outlook.stage_due_s <= running.deadline_at_s + 1e-6
            assert outlook.stage_due_s is None or outlook.next_call_s is None
        assert self.tracker.outlooks() == []

    @invariant()
    def every_program_is_accounted_for_once(self) -> None:
        if not hasattr(self, "tracker"):
            return
        counters = self.tracker.counters
        ended = counters["learnt"] + counters["unlearnt"]
        assert counters["opened"] == len(self.tracker) + ended
        assert counters["events"] == self.num_taken
        assert counters["learnt"] == self.store.num_added
        for program in range(1, 9):
            running = self.tracker.get(program)
            if running is not None:
                validate(running.graph.graph)

    def teardown(self) -> None:
        """Whatever happened, everything comes to an end, each program once."""
        if not hasattr(self, "tracker"):
            return
        for _ in range(3):
            self.now_s += 100 * TIMEOUT_S
            self.tracker.expire(self.now_s)
        assert len(self.tracker) == 0
        assert self.tracker.outlooks() == []
        self.every_program_is_accounted_for_once()


TestTrackerMachine = TrackerMachine.TestCase
TestTrackerMachine.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
