"""The serving side of the graphs process: tells, listens, never waits, never raises."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from program_shapes import PACE, Part, call, life

import core.probe as probe_module
from core.channel import RouterChannel
from core.clock import ManualClock
from core.presence import SILENT_AFTER_S
from graphs import client as client_module
from graphs.client import GraphsClient, GraphsProbe
from graphs.protocol import (
    MAX_BATCH,
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
    ToGraphs,
    server_codec,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMEOUT_S = 100.0


class Wire:
    """Stands in for the channel: every message goes through the real codecs."""

    made: list[Wire]

    def __init__(self, address: str, codec: Any) -> None:
        self.codec = codec
        self.is_there = True
        self.room = 1 << 30
        self.sent: list[ToGraphs] = []
        self.inbox: list[FromGraphs] = []
        self.counters: Counter[str] = Counter()
        Wire.made.append(self)

    def send(self, message: ToGraphs) -> bool:
        frame = self.codec.encode(message)
        if not self.is_there or self.room <= 0:
            self.counters["unsent"] += 1
            return False
        self.room -= 1
        self.sent.append(server_codec().decode(frame))
        return True

    def receive(self, limit: int) -> list[FromGraphs]:
        found, self.inbox = self.inbox[:limit], self.inbox[limit:]
        return [self.codec.decode(server_codec().encode(message)) for message in found]

    def wait(self, _timeout_s: float) -> bool:
        return bool(self.inbox)

    def close(self) -> None:
        pass


class Serving:
    """A client with its clock and its wire."""

    def __init__(self) -> None:
        self.clock = ManualClock(1000.0)
        self.client = GraphsClient("ipc:///nowhere", self.clock, timeout_s=TIMEOUT_S)
        self.wire = Wire.made[-1]

    def arrive(self, program: int = 1, node: int = 1, **changes: Any) -> None:
        options = {"opened_s": 1000.0, "deadline_at_s": 1060.0, **changes}
        self.client.arrived(program, call(node, self.clock.now_s()), **options)

    def finish(
        self, program: int = 1, node: int = 1, tokens: int = 100, *, has_failed: bool = False
    ) -> None:
        self.client.finished(program, node, tokens, at_s=self.clock.now_s(), has_failed=has_failed)

    def close(self, program: int = 1, *, is_cancelled: bool = False) -> None:
        self.client.closed(program, is_cancelled=is_cancelled)

    def run(self, program: int, parts: list[Part], *, is_final: bool = False) -> None:
        """A whole program, as the scheduler tells of it."""
        for event in life(program, parts, opened_s=self.clock.now_s(), is_final=is_final):
            match event:
                case Arrived():
                    self.client.arrived(
                        program,
                        event.call,
                        opened_s=event.opened_s,
                        deadline_at_s=event.deadline_at_s,
                        is_final=event.is_final,
                    )
                case Finished():
                    self.client.finished(
                        program, event.node, event.output_tokens, at_s=event.at_s, has_failed=False
                    )

    def poll(self, *messages: FromGraphs) -> tuple[Outlook, ...]:
        self.wire.inbox += messages
        return self.client.poll(PACE)

    def pass_time(self, seconds: float, *, says: FromGraphs | None = None) -> None:
        """Poll ten times a second."""
        for _ in range(round(seconds * 10)):
            self.clock.advance(0.1)
            self.poll(*([] if says is None else [says]))

    def told(self) -> list[Event]:
        """Events that were sent since the last call."""
        found = [e for m in self.wire.sent if isinstance(m, Events) for e in m.events]
        self.wire.sent.clear()
        return found

    def count(self, name: str) -> int:
        return self.client.counters()[name]


def outlook(program: int = 1, num_calls: int = 1, **changes: Any) -> Outlook:
    made = Outlook(program, num_calls, 0, is_known=True, calls=3.0, stage_due_s=1020.0)
    return msgspec.structs.replace(made, **changes)


def says(*outlooks: Outlook) -> Outlooks:
    return Outlooks(outlooks)


def brief(events: list[Event]) -> list[tuple[str, int, int]]:
    """Kind, program, and node."""
    found = []
    for event in events:
        node = event.call.node if isinstance(event, Arrived) else getattr(event, "node", 0)
        found.append((type(event).__name__.lower(), event.program, node))
    return found


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Serving:
    Wire.made = []
    monkeypatch.setattr(client_module, "DealerChannel", Wire)
    monkeypatch.setattr(probe_module, "DealerChannel", Wire)
    return Serving()


# Telling ------------------------------------------------------------------------------------------


def test_what_happened_is_told_by_the_next_poll_in_its_order_and_once(serving: Serving) -> None:
    serving.arrive()
    serving.arrive(2)
    serving.finish()
    assert serving.told() == []
    serving.poll()
    assert brief(serving.told()) == [("arrived", 1, 1), ("arrived", 2, 1), ("finished", 1, 1)]
    serving.poll()
    assert serving.told() == []


def test_an_arrival_is_told_as_it_is(serving: Serving) -> None:
    made = call(9, 1001.5, role=4, parents=(1, 2), tools=(3,), input_tokens=77)
    serving.client.arrived(
        5, made, opened_s=1000.0, deadline_at_s=1030.0, application=8, is_final=True
    )
    serving.poll()
    assert serving.told() == [Arrived(5, 8, 0, made, 1000.0, 1030.0, is_final=True)]


def test_an_end_is_told_as_it_is(serving: Serving) -> None:
    serving.arrive()
    serving.finish(tokens=42, has_failed=True)
    serving.poll()
    assert serving.told()[1] == Finished(1, 1, 42, 1000.0, has_failed=True)


def test_each_call_of_a_program_has_its_place(serving: Serving) -> None:
    for node in (7, 5, 6):
        serving.arrive(1, node)
    serving.arrive(2, 9)
    serving.poll()
    places = [event.place for event in serving.told() if isinstance(event, Arrived)]
    assert places == [0, 1, 2, 0]


def test_the_pace_of_now_goes_with_it(serving: Serving) -> None:
    serving.arrive()
    pace = msgspec.structs.replace(PACE, step_s=0.123)
    serving.client.poll(pace)
    (message,) = [m for m in serving.wire.sent if isinstance(m, Events)]
    assert message.pace == pace


def test_much_goes_out_in_batches_in_order(serving: Serving) -> None:
    for node in range(1000):
        serving.arrive(1, node)
    serving.poll()
    sizes = [len(m.events) for m in serving.wire.sent if isinstance(m, Events)]
    assert max(sizes) <= MAX_BATCH
    assert [event.call.node for event in serving.told()] == list(range(1000))


def test_without_news_no_events_are_sent(serving: Serving) -> None:
    serving.pass_time(20)
    assert not any(isinstance(message, Events) for message in serving.wire.sent)


def test_it_says_hello_now_and_then(serving: Serving) -> None:
    serving.pass_time(10)
    assert 5 <= sum(isinstance(message, Hello) for message in serving.wire.sent) <= 15


def test_the_end_of_what_is_not_a_call_of_an_open_program_is_not_told(serving: Serving) -> None:
    serving.finish(99, 1)
    serving.arrive()
    serving.finish(1, 55)
    serving.poll()
    assert brief(serving.told()) == [("arrived", 1, 1)]
    serving.finish()
    serving.finish()
    serving.poll()
    assert brief(serving.told()) == [("finished", 1, 1)]


def test_a_program_that_its_client_ends_is_told_once_and_forgotten(serving: Serving) -> None:
    serving.arrive()
    serving.finish()
    serving.close()
    serving.close()
    serving.finish()
    serving.poll()
    events = serving.told()
    assert brief(events) == [("arrived", 1, 1), ("finished", 1, 1), ("closed", 1, 0)]
    assert serving.count("open") == 0


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_how_it_was_ended_is_told(serving: Serving, is_cancelled: bool) -> None:
    serving.arrive()
    serving.close(is_cancelled=is_cancelled)
    serving.poll()
    assert serving.told()[-1] == Closed(1, is_cancelled=is_cancelled)


def test_the_end_of_a_program_that_was_never_open_is_not_told(serving: Serving) -> None:
    serving.close(5)
    serving.poll()
    assert serving.told() == []


def test_a_program_is_forgotten_when_its_final_calls_have_ended(serving: Serving) -> None:
    serving.arrive()
    serving.finish()
    serving.arrive(1, 2, is_final=True)
    serving.arrive(1, 3, is_final=True)
    serving.finish(1, 2)
    assert serving.count("open") == 1
    serving.finish(1, 3)
    assert serving.count("open") == 0
    serving.poll()
    assert brief(serving.told())[-1] == ("finished", 1, 3)


def test_an_id_that_is_used_again_is_another_program(serving: Serving) -> None:
    for _ in range(3):
        serving.arrive(is_final=True)
        serving.finish()
    serving.poll()
    places = [event.place for event in serving.told() if isinstance(event, Arrived)]
    assert places == [0, 0, 0]


def test_a_program_that_has_gone_quiet_is_forgotten(serving: Serving) -> None:
    serving.arrive()
    serving.finish()
    serving.arrive(2)
    serving.pass_time(TIMEOUT_S - 3, says=Ready(1))
    assert serving.count("open") == 2
    serving.pass_time(6, says=Ready(1))
    # One has a call that still runs.
    assert serving.count("open") == 1
    serving.finish(2)
    serving.poll()
    assert brief(serving.told())[-1] == ("finished", 2, 1)


def test_the_latest_of_several_programs_keep_their_time(serving: Serving) -> None:
    for program in (1, 2, 3):
        serving.arrive(program)
        serving.finish(program)
    serving.pass_time(TIMEOUT_S - 10, says=Ready(1))
    serving.arrive(1, 2)
    serving.finish(1, 2)
    serving.pass_time(15, says=Ready(1))
    assert serving.count("open") == 1
    serving.arrive(1, 3)
    serving.told()
    serving.poll()
    assert serving.told()[0].place == 2


# Outlooks -----------------------------------------------------------------------------------------


def test_an_outlook_of_an_open_program_is_news_once(serving: Serving) -> None:
    serving.arrive()
    serving.poll()
    assert serving.poll(Ready(1), says(outlook())) == (outlook(),)
    assert serving.poll() == ()


def test_outlooks_of_programs_that_are_not_open_are_ignored(serving: Serving) -> None:
    serving.arrive()
    serving.arrive(2)
    serving.finish(2)
    serving.close(2)
    serving.poll()
    found = serving.poll(says(outlook(99), outlook(2), outlook(1)))
    assert [one.program for one in found] == [1]
    assert serving.count("bad") == 0


HOSTILE = {
    "negative-calls": {"calls": -1.0},
    "nan-stages": {"stages": math.nan},
    "infinite-input": {"input_tokens": math.inf},
    "huge-output": {"output_tokens": 1e300},
    "nan-stage-tokens": {"stage_tokens": math.nan},
    "negative-tools": {"tool_s": -5.0},
    "nan-due": {"stage_due_s": math.nan},
    "infinite-next": {"next_call_s": math.inf},
}


@pytest.mark.parametrize("changes", HOSTILE.values(), ids=HOSTILE)
def test_an_outlook_that_makes_no_sense_is_counted_and_not_used(
    serving: Serving, changes: dict[str, Any]
) -> None:
    serving.arrive()
    serving.arrive(2)
    serving.poll()
    found = serving.poll(says(outlook(1, **changes), outlook(2)))
    assert [one.program for one in found] == [2]
    assert serving.count("bad") == 1
    # A good one is taken afterwards.
    assert [one.program for one in serving.poll(says(outlook(1)))] == [1]


def test_only_so_many_messages_are_taken_in_by_one_poll(serving: Serving) -> None:
    serving.arrive()
    serving.poll()
    serving.wire.inbox += [says(outlook()) for _ in range(500)]
    serving.client.poll(PACE)
    assert 0 < len(serving.wire.inbox) < 500
    for _ in range(500):
        serving.client.poll(PACE)
    assert serving.wire.inbox == []


def test_a_status_that_nobody_asked_for_is_no_trouble(serving: Serving) -> None:
    assert serving.poll(Status(1, {})) == ()


def test_an_outlook_that_says_nothing_is_news_too(serving: Serving) -> None:
    # What was expected before no longer is.
    serving.arrive()
    serving.poll()
    nothing = Outlook(1, 1, 0, is_known=False)
    assert serving.poll(says(nothing)) == (nothing,)


# A process that is not there, or starts anew ------------------------------------------------------


def test_what_finds_nobody_is_told_when_somebody_is_there(serving: Serving) -> None:
    serving.wire.is_there = False
    serving.arrive()
    serving.pass_time(30)
    serving.finish()
    serving.pass_time(30)
    serving.wire.is_there = True
    serving.poll()
    assert brief(serving.told()) == [("arrived", 1, 1), ("finished", 1, 1)]


def test_where_the_queue_is_full_the_rest_is_told_later_in_order(serving: Serving) -> None:
    serving.poll()
    for node in range(3 * MAX_BATCH):
        serving.arrive(1, node)
    serving.wire.room = 1
    serving.poll()
    first = [event.call.node for event in serving.told()]
    assert first == list(range(MAX_BATCH))
    serving.wire.room = 100
    serving.poll()
    assert [event.call.node for event in serving.told()] == list(range(MAX_BATCH, 3 * MAX_BATCH))


def test_a_new_process_is_told_all_of_what_is_open_and_nothing_else(serving: Serving) -> None:
    serving.poll(Ready(1))
    serving.arrive()
    serving.finish()
    serving.arrive(2)
    serving.close(2, is_cancelled=True)
    serving.run(3, [Part(), Part()], is_final=True)
    serving.arrive(4, application=9)
    serving.arrive(1, 2)
    serving.poll()
    before = [event for event in serving.told() if event.program in (1, 4)]
    serving.poll(Ready(2))
    serving.poll()
    after = serving.told()
    # Each program from its beginning, in its order, as it was told before.
    for program in (1, 4):
        told = [event for event in after if event.program == program]
        assert told == [event for event in before if event.program == program]
    assert {event.program for event in after} == {1, 4}


def test_the_same_process_saying_so_again_is_told_nothing_again(serving: Serving) -> None:
    serving.arrive()
    serving.poll(Ready(1))
    serving.told()
    for _ in range(10):
        serving.poll(Ready(1))
    assert serving.told() == []


def test_the_first_process_is_told_everything_once(serving: Serving) -> None:
    serving.arrive()
    serving.poll()
    serving.poll(Ready(1))
    serving.finish()
    serving.poll()
    assert brief(serving.told()) == [("arrived", 1, 1), ("finished", 1, 1)]


def test_a_new_process_is_told_in_order_what_had_not_been_told_yet(serving: Serving) -> None:
    serving.poll(Ready(1))
    serving.arrive(1, 1)
    serving.arrive(2, 1)
    serving.poll()
    serving.wire.room = 0
    serving.finish(1, 1)
    serving.arrive(1, 2)
    serving.close(2)
    serving.poll()
    serving.told()
    serving.wire.room = 100
    serving.poll(Ready(2))
    serving.poll()
    told = brief([event for event in serving.told() if event.program == 1])
    # Whatever it was told before it had said that it is a new one.
    assert told[-3:] == [("arrived", 1, 1), ("finished", 1, 1), ("arrived", 1, 2)]
    serving.poll()
    assert serving.told() == []


def test_what_a_new_process_is_told_again_is_not_told_twice(serving: Serving) -> None:
    serving.poll(Ready(1))
    serving.arrive(1, 1)
    serving.poll()
    serving.told()
    serving.wire.room = 0
    serving.finish(1, 1)
    serving.arrive(1, 2)
    serving.poll(Ready(2))
    serving.wire.room = 100
    serving.poll()
    serving.poll()
    expected = [("arrived", 1, 1), ("finished", 1, 1), ("arrived", 1, 2)]
    assert brief(serving.told()) == expected


def test_what_ended_while_the_new_process_was_not_there_is_not_opened_again(
    serving: Serving,
) -> None:
    serving.poll(Ready(1))
    serving.arrive()
    serving.poll()
    serving.told()
    serving.wire.is_there = False
    serving.finish()
    serving.close()
    serving.pass_time(2)
    serving.wire.is_there = True
    serving.poll(Ready(2))
    serving.poll()
    assert not any(isinstance(event, Arrived) for event in serving.told())


def test_a_restart_is_told_in_the_log_once(
    serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        serving.poll(Ready(1))
        assert caplog.records == []
        for _ in range(5):
            serving.poll(Ready(2))
    assert len(caplog.records) == 1


def test_many_open_programs_are_told_again_in_full_batches(serving: Serving) -> None:
    serving.poll(Ready(1))
    for program in range(1, 601):
        serving.arrive(program)
    serving.poll()
    serving.told()
    serving.poll(Ready(2))
    for _ in range(10):
        serving.poll()
    sizes = [len(m.events) for m in serving.wire.sent if isinstance(m, Events)]
    assert max(sizes) <= MAX_BATCH
    assert len(sizes) <= 5
    assert sorted(event.program for event in serving.told()) == list(range(1, 601))


# Bounds -------------------------------------------------------------------------------------------


def test_only_so_much_is_kept_while_nobody_takes_it_and_the_oldest_is_lost(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "MAX_UNSENT", 100)
    serving.wire.is_there = False
    for program in range(1, 151):
        serving.arrive(program)
        serving.finish(program)
    serving.poll()
    assert serving.count("unsent") <= 100
    assert serving.count("lost") >= 200
    serving.wire.is_there = True
    serving.poll()
    assert brief(serving.told())[-1] == ("finished", 150, 1)


def test_of_a_program_whose_beginning_was_lost_the_rest_says_so(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "MAX_UNSENT", 10)
    serving.wire.is_there = False
    for node in range(1, 31):
        serving.arrive(1, node)
    serving.poll()
    serving.wire.is_there = True
    serving.poll()
    arrivals = [event for event in serving.told() if isinstance(event, Arrived)]
    assert arrivals
    assert all(event.place == event.call.node - 1 > 0 for event in arrivals)


def test_only_so_many_programs_are_remembered_and_the_quiet_are_forgotten(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "MAX_OPEN", 20)
    for program in range(1, 101):
        serving.arrive(program)
        serving.poll()
        assert serving.count("open") <= 20
    serving.told()
    serving.poll(Ready(1))
    assert [one.program for one in serving.poll(says(outlook(100), outlook(1)))] == [100]


def test_only_so_many_events_are_kept_to_be_told_again(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "MAX_KEPT", 50)
    serving.poll(Ready(1))
    for node in range(1, 201):
        serving.arrive(1 + node % 4, node)
        serving.poll()
    serving.arrive(9)
    serving.poll()
    serving.told()
    serving.poll(Ready(2))
    serving.poll()
    told = serving.told()
    assert len(told) <= 60
    assert ("arrived", 9, 1) in brief(told)
    # What begins in the middle says so.
    for event in told:
        if isinstance(event, Arrived) and event.program != 9:
            assert event.place == (event.call.node - 1) // 4


def kept(serving: Serving) -> int:
    """Events that a process that starts anew would be told."""
    serving.poll()
    serving.told()
    serving.poll(Ready(77 + len(serving.wire.sent) + serving.count("open")))
    serving.poll()
    return len(serving.told())


def test_events_of_a_program_that_never_ends_are_bounded(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One id for everything that a client ever asks.
    monkeypatch.setattr(client_module, "MAX_KEPT", 100)
    serving.poll(Ready(1))
    for node in range(1, 501):
        serving.arrive(1, node)
        serving.finish(1, node)
        serving.poll()
    assert len(serving.told()) == 1000
    assert serving.count("open") == 1
    assert kept(serving) <= 110


def test_events_of_busy_programs_behind_quiet_ones_are_bounded(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "MAX_KEPT", 100)
    serving.poll(Ready(1))
    for program in range(1, 6):
        serving.arrive(program)
    for node in range(2, 502):
        serving.arrive(6 + node % 2, node)
        serving.poll()
    assert kept(serving) <= 110


def test_a_program_whose_events_were_not_kept_is_told_on_and_listened_to(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "MAX_KEPT", 10)
    serving.poll(Ready(1))
    for node in range(1, 11):
        serving.arrive(1, node)
    for node in range(1, 11):
        serving.arrive(2, node)
    serving.poll()
    serving.told()
    assert serving.poll(says(outlook(1))) != ()
    serving.arrive(1, 11)
    serving.finish(1, 1)
    serving.poll()
    first, second = serving.told()
    assert isinstance(first, Arrived)
    assert first.place == 10
    assert isinstance(second, Finished)
    serving.close(is_cancelled=True)
    assert serving.count("open") == 1


def test_a_program_that_is_closed_goes_with_its_last_live_call(serving: Serving) -> None:
    serving.arrive()
    serving.close()
    assert serving.count("open") == 1
    serving.finish()
    assert serving.count("open") == 0


def test_where_the_last_call_came_to_nothing_another_may_follow(serving: Serving) -> None:
    serving.arrive(is_final=True)
    serving.finish(has_failed=True)
    assert serving.count("open") == 1
    serving.arrive(1, 2, is_final=True)
    serving.finish(1, 2)
    assert serving.count("open") == 0


# Silence and clocks -------------------------------------------------------------------------------


def test_who_was_never_heard_is_not_alive_and_not_warned_of(
    serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    serving.pass_time(60)
    assert not serving.client.is_alive()
    assert caplog.records == []


def test_silence_is_noticed_and_warned_of_once(
    serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    serving.poll(Ready(1))
    assert serving.client.is_alive()
    serving.pass_time(SILENT_AFTER_S / 2)
    assert serving.client.is_alive()
    serving.pass_time(60)
    assert not serving.client.is_alive()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_after_silence_it_is_alive_again_and_the_next_silence_is_warned_of_again(
    serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        serving.poll(Ready(1))
        assert serving.client.is_alive()
        serving.pass_time(20)
    assert len(caplog.records) == 2


def test_after_the_clock_has_jumped_back_hello_is_said_and_silence_noticed_soon(
    serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    serving.poll(Ready(1))
    serving.clock.advance(-900)
    serving.wire.sent.clear()
    serving.pass_time(20)
    assert sum(isinstance(message, Hello) for message in serving.wire.sent) >= 2
    assert not serving.client.is_alive()
    assert len(caplog.records) == 1


def test_after_the_clock_has_jumped_back_quiet_programs_are_forgotten_in_time(
    serving: Serving,
) -> None:
    for program in range(1, 21):
        serving.arrive(program)
        serving.finish(program)
    serving.clock.advance(-900)
    serving.pass_time(2, says=Ready(1))
    assert serving.count("open") == 20
    serving.pass_time(2 * TIMEOUT_S, says=Ready(1))
    assert serving.count("open") == 0


def test_after_the_clock_has_jumped_ahead_it_goes_on(serving: Serving) -> None:
    serving.poll(Ready(1))
    serving.arrive()
    serving.clock.advance(1e6)
    serving.poll()
    assert brief(serving.told()) == [("arrived", 1, 1)]
    serving.finish()
    assert serving.poll(Ready(1), says(outlook())) != ()
    assert serving.client.is_alive()


# Whatever comes -----------------------------------------------------------------------------------

PROGRAMS = st.integers(1, 3)
NODES = st.integers(1, 4)
EVENTS = st.one_of(
    st.tuples(st.just("arrive"), PROGRAMS, NODES),
    st.tuples(st.just("final"), PROGRAMS, NODES),
    st.tuples(st.just("finish"), PROGRAMS, NODES),
    st.tuples(st.just("close"), PROGRAMS, NODES),
    st.tuples(st.just("outlook"), PROGRAMS, NODES),
    st.tuples(st.just("nonsense"), PROGRAMS, NODES),
    st.tuples(st.just("ready"), PROGRAMS, NODES),
    st.tuples(st.just("there"), st.integers(0, 1), NODES),
    st.tuples(st.just("time"), st.sampled_from([-50, 5, 30]), NODES),
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(events=st.lists(EVENTS, max_size=40))
def test_in_any_order_nothing_raises_and_a_new_process_hears_of_what_is_open(
    serving: Serving, events: list[tuple[str, int, int]]
) -> None:
    serving = Serving()
    serving.poll(Ready(0))
    for kind, value, node in events:
        match kind:
            case "arrive" | "final":
                serving.arrive(value, node, is_final=kind == "final")
            case "finish":
                serving.finish(value, node)
            case "close":
                serving.close(value)
            case "outlook":
                assert len(serving.poll(says(outlook(value)))) <= 1
            case "nonsense":
                assert serving.poll(says(outlook(value, calls=math.nan))) == ()
            case "ready":
                serving.poll(Ready(value))
            case "there":
                serving.wire.is_there = bool(value)
            case _:
                serving.clock.advance(value)
        serving.poll()
    # Whatever has happened: a process that starts now hears of each program from its beginning.
    serving.wire.is_there = True
    serving.poll()
    serving.told()
    serving.poll(Ready(99))
    serving.poll()
    told = serving.told()
    assert len({event.program for event in told}) == serving.count("open")
    for program in {event.program for event in told}:
        places = [
            event.place for event in told if isinstance(event, Arrived) and event.program == program
        ]
        assert places == list(range(len(places)))


# The real socket ----------------------------------------------------------------------------------


@pytest.fixture
def address() -> Iterator[str]:
    # Not tmp_path: that is too long for the path of a socket.
    folder = tempfile.mkdtemp(prefix="gc", dir="/tmp")
    yield f"ipc://{folder}/s"
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("address_of_nobody", ["ipc:///no/such/folder/s", "tcp://127.0.0.1:9"])
def test_with_nobody_there_everything_returns_and_nothing_raises(address_of_nobody: str) -> None:
    clock = ManualClock()
    client = GraphsClient(address_of_nobody, clock, timeout_s=1e9)
    try:
        for program in range(1, 2001):
            client.arrived(program, call(1), opened_s=0.0, deadline_at_s=9.0)
            assert client.poll(PACE) == ()
            if program % 2:
                client.closed(program, is_cancelled=True)
            clock.advance(0.05)
        assert not client.is_alive()
        assert client.counters()["open"] == 1000
    finally:
        client.close()


@pytest.mark.parametrize("bad", ["", "nowhere", "ipc://", "tcp://x", "http://x:80"])
def test_an_address_that_is_none_is_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="ipc://PATH"):
        GraphsClient(bad, ManualClock(), timeout_s=5.0)
    with pytest.raises(ValueError, match="ipc://PATH"):
        GraphsProbe(bad)


def test_an_event_and_its_answer_go_over_the_real_socket(address: str) -> None:
    router: RouterChannel[FromGraphs, ToGraphs] = RouterChannel(address, server_codec())
    clock = ManualClock()
    client = GraphsClient(address, clock, timeout_s=5.0)
    try:
        client.arrived(7, call(1), opened_s=0.0, deadline_at_s=9.0)
        peers: list[bytes] = []
        while not peers:
            client.poll(PACE)
            clock.advance(0.5)
            if router.wait(0.02):
                found = router.receive(100)
                peers += [peer for peer, message in found if isinstance(message, Events)]
        assert router.send(peers[0], says(outlook(7)))
        news: tuple[Outlook, ...] = ()
        while not news:
            client.wait(0.02)
            news = client.poll(PACE)
        assert news == (outlook(7),)
        assert client.is_alive()
    finally:
        client.close()
        router.close()


# The probe ----------------------------------------------------------------------------------------


def test_a_probe_hears_whoever_answers(serving: Serving) -> None:
    probe = GraphsProbe("ipc:///nowhere")
    wire = Wire.made[-1]
    assert not probe.heard()
    assert any(isinstance(message, Hello) for message in wire.sent)
    wire.inbox.append(Ready(5))
    assert probe.heard()
    assert not probe.heard()
    probe.close()


def test_a_probe_asks_for_the_status(serving: Serving) -> None:
    probe = GraphsProbe("ipc:///nowhere")
    wire = Wire.made[-1]
    wire.inbox += [Ready(5), Status(5, {"running": 2})]
    assert probe.status(1.0) == Status(5, {"running": 2})
    assert any(isinstance(message, AskStatus) for message in wire.sent)
    assert probe.status(0.01) is None
    probe.close()
