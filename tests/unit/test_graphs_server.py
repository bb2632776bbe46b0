"""The graphs process without its socket: answers, clusters and saves, whatever it is sent."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inline_jobs import Desk
from program_shapes import PACE, Part, call, life, shape_of

from core import keeper as keeper_module
from core.checkpoint import CheckpointStore
from core.clock import ManualClock
from graphs import server as server_module
from graphs.protocol import (
    MAX_BATCH,
    MAX_OUTLOOKS,
    Arrived,
    AskStatus,
    Closed,
    Event,
    Events,
    Finished,
    FromGraphs,
    Hello,
    Outlook,
    Outlooks,
    Ready,
    Status,
    check_outlook,
    server_codec,
)
from graphs.server import GraphsServer, restored_store
from graphs.state import FORMAT_VERSION
from graphs.store import PatternStore
from graphs.tracker import Tracker

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

A, B = b"peer-a", b"peer-b"
SESSION = 77
TIMEOUT_S = 100.0
THREE = [Part((100,)), Part((300, 200)), Part((50,), tool_s=5.0)]


class Served:
    """A server, its clock, its disk and what it has sent."""

    def __init__(self, folder: Path | None = None, capacity: int = 50) -> None:
        self.clock = ManualClock(100.0)
        self.sent: list[tuple[bytes, FromGraphs]] = []
        self.deaf: set[bytes] = set()
        self.checkpoints = folder and CheckpointStore(folder, "graphs", version=FORMAT_VERSION)
        self.store = PatternStore(capacity, 100.0)
        self.tracker = Tracker(self.store, timeout_s=TIMEOUT_S)
        self.server = GraphsServer(
            self.tracker,
            self.send,
            self.clock,
            session=SESSION,
            store=self.checkpoints,
            checkpoint_every_s=60.0,
        )

    def send(self, peer: bytes, message: FromGraphs) -> bool:
        if peer in self.deaf:
            return False
        server_codec().encode(message)
        self.sent.append((peer, message))
        return True

    def say(self, *messages: Any, peer: bytes = A) -> list[FromGraphs]:
        """What comes back to this peer."""
        self.sent.clear()
        self.server.handle([(peer, message) for message in messages])
        return [message for to, message in self.sent if to == peer]

    def tell(self, *events: Event, peer: bytes = A) -> list[Outlook]:
        """Outlooks that come back for these events."""
        self.sent.clear()
        messages = [
            (peer, Events(tuple(events[start : start + MAX_BATCH]), PACE))
            for start in range(0, len(events), MAX_BATCH)
        ]
        self.server.handle(messages)
        return self.heard(peer)

    def heard(self, peer: bytes) -> list[Outlook]:
        return [
            outlook
            for to, message in self.sent
            if to == peer and isinstance(message, Outlooks)
            for outlook in message.outlooks
        ]

    def teach(self, count: int, first: int = 0) -> None:
        """So many programs that are all unlike each other."""
        for number in range(first, first + count):
            parts = [Part(), Part((100,), model=1000 + number)]
            self.tell(*life(100_000 + number, parts, opened_s=self.clock.now_s()))

    def pass_time(self, seconds: float) -> None:
        """Tend twice a second."""
        for _ in range(round(seconds * 2)):
            self.clock.advance(0.5)
            self.server.tend()

    def counters(self) -> dict[str, int]:
        return self.server.status().counters


def arrived(program: int = 1, node: int = 1, **changes: Any) -> Arrived:
    made = Arrived(program, 0, node - 1, call(node, 100.0), 100.0, 160.0, is_final=False)
    return msgspec.structs.replace(made, **changes)


def finished(program: int = 1, node: int = 1, tokens: int = 100) -> Finished:
    return Finished(program, node, tokens, 101.0, has_failed=False)


@pytest.fixture(autouse=True)
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    made = Desk()
    monkeypatch.setattr(server_module, "Job", made)
    monkeypatch.setattr(keeper_module, "Job", made)
    return made


@pytest.fixture
def served() -> Served:
    return Served()


@pytest.fixture
def saving(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path)
    yield made
    assert made.checkpoints is not None
    made.checkpoints.close()


# Answering ----------------------------------------------------------------------------------------


def test_a_hello_is_answered_with_the_session(served: Served) -> None:
    assert set(served.say(Hello())) == {Ready(SESSION)}
    assert Ready(SESSION) in served.say(Hello())


def test_a_new_peer_is_greeted_before_anything_else_is_said(served: Served) -> None:
    messages = served.say(Events((arrived(),), PACE))
    assert messages[0] == Ready(SESSION)
    assert isinstance(messages[1], Outlooks)


def test_a_known_peer_is_not_greeted_with_every_event(served: Served) -> None:
    served.say(Hello())
    assert not any(isinstance(m, Ready) for m in served.say(Events((arrived(),), PACE)))


def test_events_are_answered_with_what_is_expected(served: Served) -> None:
    for number in range(5):
        served.tell(*life(50 + number, THREE))
    (outlook,) = served.tell(arrived())
    assert (outlook.program, outlook.num_calls, outlook.is_known) == (1, 1, True)
    assert outlook.stages == pytest.approx(2)


def test_each_program_is_looked_at_once_per_pass(served: Served) -> None:
    events = [arrived(program, node) for node in range(1, 6) for program in (1, 2)]
    found = served.tell(*events)
    assert sorted((one.program, one.num_calls) for one in found) == [(1, 5), (2, 5)]
    assert served.tell() == []
    assert served.counters()["outlooks"] == 2


def test_peers_hear_of_their_own_programs(served: Served) -> None:
    served.server.handle(
        [(A, Events((arrived(1), arrived(2)), PACE)), (B, Events((arrived(3),), PACE))]
    )
    assert {one.program for one in served.heard(A)} == {1, 2}
    assert {one.program for one in served.heard(B)} == {3}


def test_a_program_that_two_schedulers_serve_is_one_and_both_hear_of_it(served: Served) -> None:
    served.tell(arrived(1, 1), peer=A)
    served.tell(arrived(1, 2), peer=B)
    assert [one.num_calls for one in served.heard(A)] == [2]
    assert [one.num_calls for one in served.heard(B)] == [2]


def test_no_message_has_more_outlooks_than_a_scheduler_takes_in_at_once(served: Served) -> None:
    events = [arrived(program) for program in range(1, 301)]
    found = served.tell(*events)
    sizes = [len(m.outlooks) for _, m in served.sent if isinstance(m, Outlooks)]
    assert max(sizes) <= MAX_OUTLOOKS
    assert [one.program for one in found] == list(range(1, 301))


def test_after_the_end_of_a_program_nothing_is_said_of_it(served: Served) -> None:
    assert served.tell(arrived(), finished(), Closed(1, is_cancelled=False)) == []
    assert served.tell(arrived(2, is_final=True), finished(2)) == []
    assert served.counters()["running"] == 0
    assert served.counters()["learnt"] == 2


def test_no_events_are_no_trouble(served: Served) -> None:
    assert served.tell() == []
    assert served.say(Events((), PACE)) == [Ready(SESSION)]
    served.server.handle([])
    assert not served.server.is_behind


def test_the_status_tells_session_and_counts(served: Served) -> None:
    served.teach(3)
    served.teach(1)
    served.tell(arrived())
    (status,) = [m for m in served.say(AskStatus()) if isinstance(m, Status)]
    assert status.session == SESSION
    assert status.counters["running"] == 1
    assert status.counters["patterns"] == 3
    assert status.counters["learnt"] == status.counters["finished"] == 4
    assert status.counters["merged"] == 1
    assert status.counters["opened"] == 5
    assert status.counters["events"] == 17


BAD = {
    "nan": arrived(7, call=call(1, math.nan)),
    "infinite-deadline": arrived(7, deadline_at_s=math.inf),
    "negative-model": arrived(7, call=call(1, 100.0, model=-1)),
    "many-tools": arrived(7, call=call(1, 100.0, tools=(1,) * 100_000)),
    "negative-tokens": arrived(7, call=call(1, 100.0, input_tokens=-5)),
    "end-at-no-time": Finished(1, 1, 5, math.nan, has_failed=False),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_an_event_that_makes_no_sense_is_counted_and_the_others_are_followed(
    served: Served, bad: Event
) -> None:
    found = served.tell(arrived(1), bad, arrived(2))
    assert [one.program for one in found] == [1, 2]
    assert served.counters()["bad_events"] == 1
    assert served.counters()["running"] == 2


@pytest.mark.parametrize("step_s", [math.nan, -1.0, math.inf])
def test_events_at_a_pace_that_makes_no_sense_are_counted(served: Served, step_s: float) -> None:
    pace = msgspec.structs.replace(PACE, step_s=step_s)
    served.say(Events((arrived(1), arrived(2)), pace))
    assert served.counters()["bad_events"] == 2
    assert served.counters()["running"] == 0
    assert served.tell(arrived(3)) != []


def test_a_peer_that_does_not_read_holds_nobody_up(served: Served) -> None:
    served.deaf.add(A)
    served.server.handle(
        [(A, Events((arrived(1),), PACE)), (B, Events((arrived(2),), PACE)), (A, AskStatus())]
    )
    assert [one.program for one in served.heard(B)] == [2]
    assert served.counters()["running"] == 2


def test_only_so_many_peers_are_remembered_and_all_are_served(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MAX_PEERS", 5)
    for number in range(50):
        peer = b"p%d" % number
        assert [one.program for one in served.tell(arrived(number), peer=peer)] == [number]
    assert served.tell(arrived(0, 2), peer=b"p0") != []


def test_peers_that_come_and_go_are_not_remembered_with_a_program_for_ever(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A scheduler that starts anew again and again, and one program that goes on.
    monkeypatch.setattr(server_module, "MAX_PEERS", 5)
    for number in range(1, 200):
        served.tell(arrived(1, number), peer=b"p%d" % number)
    running = served.tracker.get(1)
    assert running is not None
    assert len(running.peers) <= 20


# Time ---------------------------------------------------------------------------------------------


def test_programs_that_have_gone_quiet_are_closed_and_learnt(served: Served) -> None:
    served.tell(arrived(), finished())
    served.pass_time(TIMEOUT_S + 2)
    assert served.counters()["running"] == 0
    assert served.counters()["learnt"] == served.counters()["quiet"] == 1


def test_what_was_learnt_is_forgotten_in_time(served: Served) -> None:
    served.teach(3)
    served.pass_time(3600)
    assert served.store.pack.weight.tolist() == pytest.approx([0.9] * 3, rel=0.01)


def test_after_the_clock_has_jumped_back_it_goes_on(served: Served) -> None:
    served.tell(arrived(), finished())
    served.server.tend()
    served.clock.advance(-1e5)
    served.pass_time(2)
    assert served.counters()["running"] == 1
    served.pass_time(2 * TIMEOUT_S)
    assert served.counters()["running"] == 0


# Clustering ---------------------------------------------------------------------------------------


def test_above_the_capacity_it_is_clustered_beside_the_loop(served: Served, desk: Desk) -> None:
    desk.holds = True
    served.teach(51)
    served.pass_time(2)
    assert len(desk.held) == 1
    # Meanwhile it answers and learns.
    assert served.tell(arrived())[0].is_known
    served.teach(5, first=51)
    assert served.counters()["patterns"] == 56
    desk.work()
    served.pass_time(1)
    assert served.counters()["clusterings"] == 1
    assert served.counters()["patterns"] == 37 + 5
    new = shape_of(Part(), Part((100,), model=1055))
    assert new in served.store.shapes
    # And the program that ran is matched with what is left.
    assert served.tell(finished())[0].is_known


def test_below_the_capacity_nothing_is_clustered(served: Served, desk: Desk) -> None:
    served.teach(50)
    served.pass_time(10)
    assert desk.held == []
    assert served.counters()["clusterings"] == 0


def test_a_clustering_that_fails_is_counted_and_not_tried_in_every_pass(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_args: object, **_options: object) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as broken:
        broken.setattr("graphs.store.k_medoids", fail)
        served.teach(51)
        served.pass_time(20)
        assert 1 <= served.counters()["failed_clusterings"] <= 2
        assert served.counters()["patterns"] == 51
        assert served.tell(arrived())[0].is_known
    assert "no room" in caplog.text
    served.pass_time(server_module.FAILED_PAUSE_S + 5)
    assert served.counters()["clusterings"] == 1
    assert served.counters()["patterns"] <= 50


def test_it_is_clustered_again_when_it_is_time_again(served: Served) -> None:
    for block in range(6):
        served.teach(30, first=30 * block)
        served.pass_time(3)
        assert served.counters()["patterns"] <= 50
    assert served.counters()["clusterings"] >= 3


# Saving -------------------------------------------------------------------------------------------


def on_disk(folder: Path) -> int:
    """Patterns that a process that starts now would know; -1 where there is no checkpoint."""
    checkpoints = CheckpointStore(folder, "graphs", version=FORMAT_VERSION)
    try:
        store, source = restored_store(PatternStore, checkpoints)
    finally:
        checkpoints.close()
    return len(store) if source == "checkpoint" else -1


def test_what_was_learnt_is_saved_when_it_is_time(saving: Served, tmp_path: Path) -> None:
    saving.teach(7)
    saving.server.tend()
    assert on_disk(tmp_path) == -1
    saving.pass_time(62)
    assert on_disk(tmp_path) == 7


def test_what_was_learnt_is_saved_at_the_end(saving: Served, tmp_path: Path) -> None:
    saving.teach(7)
    saving.server.close()
    assert on_disk(tmp_path) == 7


def test_a_program_that_only_strengthens_a_pattern_is_news(saving: Served, tmp_path: Path) -> None:
    saving.teach(3)
    saving.pass_time(62)
    first = sorted(tmp_path.glob("*.checkpoint"))
    saving.teach(1)
    saving.server.close()
    assert len(sorted(tmp_path.glob("*.checkpoint"))) == len(first) + 1


def test_nothing_is_saved_while_nothing_was_learnt(saving: Served, tmp_path: Path) -> None:
    saving.tell(arrived())
    saving.pass_time(200)
    saving.server.close()
    assert on_disk(tmp_path) == -1


def test_a_start_from_a_checkpoint_expects_the_same(saving: Served, tmp_path: Path) -> None:
    for number in range(5):
        saving.tell(*life(50 + number, THREE))
    before = saving.tell(arrived())
    saving.server.close()
    assert saving.checkpoints is not None
    saving.checkpoints.close()
    other = Served(tmp_path)
    assert other.checkpoints is not None
    store, source = restored_store(PatternStore, other.checkpoints)
    other.checkpoints.close()
    assert source == "checkpoint"
    tracker = Tracker(store)
    tracker.take(arrived(), PACE, 100.0)
    ((_, after),) = tracker.outlooks()
    assert [after] == before


# Whatever comes -----------------------------------------------------------------------------------

NUMBERS = st.integers(-1, 4) | st.sampled_from([1 << 62, 1 << 63, -(1 << 40)])
TIMES = st.sampled_from([0.0, 99.0, 100.0, 130.0, -1e9, 1e11, 1e13, math.nan, math.inf])
TOKENS = st.sampled_from([-1, 0, 1, 500, 1 << 29, 1 << 40])
CALLS = st.builds(
    lambda node, role, model, parents, tools, tokens, at: call(
        node,
        at,
        role=role,
        model=model,
        parents=tuple(parents),
        tools=tuple(tools),
        input_tokens=tokens,
    ),
    NUMBERS,
    NUMBERS,
    NUMBERS,
    st.lists(NUMBERS, max_size=3),
    st.lists(NUMBERS, max_size=3),
    TOKENS,
    TIMES,
)
ARRIVALS = st.builds(
    Arrived,
    program=st.integers(0, 3),
    application=st.integers(0, 2),
    place=st.integers(0, 3),
    call=CALLS,
    opened_s=TIMES,
    deadline_at_s=TIMES,
    is_final=st.booleans(),
)
ENDS = st.builds(
    Finished,
    program=st.integers(0, 3),
    node=NUMBERS,
    output_tokens=TOKENS,
    at_s=TIMES,
    has_failed=st.booleans(),
)
ANY_EVENT = ARRIVALS | ENDS | st.builds(Closed, st.integers(0, 3), st.booleans())
MESSAGES = st.one_of(
    st.just(Hello()),
    st.just(AskStatus()),
    st.builds(
        Events,
        events=st.lists(ANY_EVENT, max_size=6).map(tuple),
        pace=st.just(PACE) | st.just(msgspec.structs.replace(PACE, step_s=math.nan)),
    ),
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    messages=st.lists(
        st.tuples(st.sampled_from([A, B]), MESSAGES, st.sampled_from([0.0, 0.3, 120.0, -500.0])),
        max_size=15,
    )
)
def test_whatever_it_is_told_it_goes_on_and_says_only_what_can_be(
    served: Served, messages: list[tuple[bytes, Any, float]]
) -> None:
    served = Served(capacity=3)
    for peer, message, seconds in messages:
        served.server.handle([(peer, message)])
        served.clock.advance(seconds)
        served.server.tend()
        for _, said in served.sent:
            if isinstance(said, Outlooks):
                for outlook in said.outlooks:
                    check_outlook(outlook)
        served.sent.clear()
    counters = served.counters()
    assert counters.get("opened", 0) == (
        counters["running"] + counters.get("learnt", 0) + counters.get("unlearnt", 0)
    )
    served.tell(*life(9, THREE, opened_s=served.clock.now_s()))
    assert served.counters().get("learnt", 0) == counters.get("learnt", 0) + 1
