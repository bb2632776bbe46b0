"""A running graphs process: it answers, learns, and bears whatever comes over its socket."""

from __future__ import annotations

import itertools
import os
import signal
from typing import TYPE_CHECKING

import psutil
import pytest
from graphs_child import THREE, GraphsChild, Scheduler
from program_shapes import PACE, Part, call
from service_child import Stranger, wait_until

from core.channel import MAX_FRAME_BYTES
from graphs.client import GraphsProbe
from graphs.protocol import (
    MAGIC,
    SCHEMA_VERSION,
    Arrived,
    AskStatus,
    Events,
    Finished,
    client_codec,
)

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.timeout(120)

NEW = itertools.count(1)
"""Programs of which nobody has heard."""
STRANGE = Arrived(1 << 60, 0, 0, call(1, 5.0), 5.0, 65.0, is_final=False)
GOOD = client_codec().encode(Events((STRANGE,), PACE))


@pytest.fixture
def scheduler(shared_graphs: GraphsChild, schedule: Callable[[str], Scheduler]) -> Scheduler:
    return schedule(shared_graphs.address)


def answers(scheduler: Scheduler) -> bool:
    """Whether something is said of a new program, now."""
    program = next(NEW)
    scheduler.known(program)
    scheduler.client.closed(program, is_cancelled=True)
    return True


# Answering ----------------------------------------------------------------------------------------


def test_a_client_is_greeted_and_knows_that_the_process_is_there(scheduler: Scheduler) -> None:
    assert not scheduler.client.is_alive()
    scheduler.until(scheduler.client.is_alive)


def test_programs_that_have_finished_make_the_next_outlook_better(
    shared_graphs: GraphsChild, scheduler: Scheduler
) -> None:
    program = next(NEW)
    scheduler.known(program)
    scheduler.client.closed(program, is_cancelled=True)
    # As no program before: nothing is known, or what others did.
    parts = [Part((100,), 777, model=55), *THREE, Part((900,)), Part((9,))]
    before = shared_graphs.counter("learnt")
    scheduler.teach((next(NEW) for _ in range(40)), parts)
    wait_until(lambda: shared_graphs.counter("learnt") == before + 40)
    first, second, *_ = scheduler.stages(next(NEW), parts)
    (program,) = {event.program for event in first}
    scheduler.tell(first[:1])
    scheduler.until(lambda: program in scheduler.outlooks)
    outlook = scheduler.last(program)
    assert outlook.is_known
    assert outlook.stages == pytest.approx(5, abs=0.1)
    assert outlook.output_tokens == pytest.approx(100 + 500 + 50 + 900 + 9, rel=0.1)
    now_s = scheduler.clock.now_s()
    assert outlook.stage_due_s is not None
    assert now_s - 60 < outlook.stage_due_s < now_s + 60
    # And with every stage there is less to come.
    scheduler.tell([*first[1:], *second[:1]])
    scheduler.until(lambda: scheduler.last(program).num_calls == 2)
    assert scheduler.last(program).stages == pytest.approx(4, abs=0.1)
    assert scheduler.last(program).stage_due_s > outlook.stage_due_s


def test_a_thousand_programs_are_all_answered(scheduler: Scheduler) -> None:
    programs = [next(NEW) for _ in range(1000)]
    scheduler.known(*programs)
    assert scheduler.client.counters()["unsent"] == 0
    for program in programs:
        scheduler.client.closed(program, is_cancelled=True)
    scheduler.send()


def test_two_schedulers_hear_of_their_own_programs(
    shared_graphs: GraphsChild, schedule: Callable[[str], Scheduler]
) -> None:
    first, second = schedule(shared_graphs.address), schedule(shared_graphs.address)
    mine, yours = next(NEW), next(NEW)
    first.open(mine)
    second.open(yours)
    first.until(lambda: mine in first.outlooks)
    second.until(lambda: yours in second.outlooks)
    assert set(first.outlooks) == {mine}
    assert set(second.outlooks) == {yours}


def test_cancelled_programs_are_freed_and_not_learnt(
    shared_graphs: GraphsChild, scheduler: Scheduler
) -> None:
    learnt, running = shared_graphs.counter("learnt"), shared_graphs.counter("running")
    programs = [next(NEW) for _ in range(50)]
    scheduler.known(*programs)
    wait_until(lambda: shared_graphs.counter("running") == running + 50)
    for program in programs:
        scheduler.client.closed(program, is_cancelled=True)
    scheduler.send()
    wait_until(lambda: shared_graphs.counter("running") == running)
    assert shared_graphs.counter("learnt") == learnt


def test_a_probe_hears_a_process_that_runs(shared_graphs: GraphsChild) -> None:
    probe = GraphsProbe(shared_graphs.address)
    try:
        wait_until(probe.heard)
    finally:
        probe.close()


# What is no message -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "frames"),
    [
        ("garbage", [b""]),
        ("garbage", [b"GET / HTTP/1.1\r\n\r\n"]),
        ("garbage", [os.urandom(100_000)]),
        ("garbage", [MAGIC + bytes([SCHEMA_VERSION])]),
        ("garbage", [GOOD[:-1]]),
        ("garbage", [GOOD + b"\x00"]),
        ("garbage", [MAGIC + bytes([SCHEMA_VERSION]) + b"\x91" * 200_000]),
        ("garbage", [b"JSP" + GOOD[3:]]),
        ("garbage", [GOOD, GOOD]),
        ("garbage", [b"", GOOD]),
        ("version", [MAGIC + bytes([SCHEMA_VERSION - 1]) + GOOD[4:]]),
        ("version", [MAGIC + bytes([SCHEMA_VERSION + 1]) + GOOD[4:]]),
    ],
    ids=[
        "empty",
        "http",
        "random",
        "header-only",
        "cut",
        "longer",
        "nested",
        "another-service",
        "two-frames",
        "empty-frame-first",
        "old-version",
        "next-version",
    ],
)
def test_what_is_no_message_is_counted_and_the_rest_is_answered(
    shared_graphs: GraphsChild,
    scheduler: Scheduler,
    graphs_stranger: Stranger,
    kind: str,
    frames: list[bytes],
) -> None:
    before = shared_graphs.counter(f"wire_{kind}")
    graphs_stranger.send(*frames)
    wait_until(lambda: shared_graphs.counter(f"wire_{kind}") > before)
    assert shared_graphs.counter(f"wire_{kind}") == before + 1
    assert answers(scheduler)


def test_a_message_cut_short_anywhere_is_counted(
    shared_graphs: GraphsChild, scheduler: Scheduler, graphs_stranger: Stranger
) -> None:
    before, sent = shared_graphs.dropped(), range(len(GOOD))
    for length in sent:
        graphs_stranger.send(GOOD[:length])
    wait_until(lambda: shared_graphs.dropped() >= before + len(sent))
    assert shared_graphs.dropped() == before + len(sent)
    assert answers(scheduler)


def test_a_flood_of_garbage_does_not_keep_others_from_being_answered(
    shared_graphs: GraphsChild, scheduler: Scheduler, graphs_stranger: Stranger
) -> None:
    before = shared_graphs.counter("wire_garbage")
    for _ in range(5000):
        graphs_stranger.send(b"x" * 1000)
    assert answers(scheduler)
    wait_until(lambda: shared_graphs.counter("wire_garbage") == before + 5000)


@pytest.mark.parametrize("size", [MAX_FRAME_BYTES + 1, 10 * MAX_FRAME_BYTES])
def test_after_a_huge_message_all_are_answered_as_before(
    shared_graphs: GraphsChild, scheduler: Scheduler, graphs_stranger: Stranger, size: int
) -> None:
    session = shared_graphs.status().session
    assert answers(scheduler)
    graphs_stranger.send(GOOD + b"\x00" * (size - len(GOOD)))
    assert answers(scheduler)
    # Its sender, too, is heard again.
    before = shared_graphs.counter("events")
    while shared_graphs.counter("events") == before:
        graphs_stranger.send(GOOD)
    assert shared_graphs.status().session == session


def test_events_that_make_no_sense_are_counted(
    shared_graphs: GraphsChild, scheduler: Scheduler, graphs_stranger: Stranger
) -> None:
    before = shared_graphs.counter("bad_events")
    bad = Finished(5, 1, 5, float("nan"), has_failed=False)
    graphs_stranger.send(client_codec().encode(Events((bad, STRANGE), PACE)))
    wait_until(lambda: shared_graphs.counter("bad_events") == before + 1)
    assert answers(scheduler)


def test_a_peer_that_never_reads_keeps_nobody_from_being_answered(
    scheduler: Scheduler, graphs_stranger: Stranger
) -> None:
    ask = client_codec().encode(AskStatus())
    for _ in range(3000):
        graphs_stranger.send(ask)
    assert answers(scheduler)


def test_after_all_of_this_it_is_the_same_process(shared_graphs: GraphsChild) -> None:
    assert shared_graphs.is_running()
    assert shared_graphs.num_starts == 1
    assert "Traceback" not in shared_graphs.log


# Stopped ------------------------------------------------------------------------------------------


def test_while_it_is_stopped_every_poll_returns_and_afterwards_all_is_answered(
    shared_graphs: GraphsChild, scheduler: Scheduler
) -> None:
    assert answers(scheduler)
    shared_graphs.send(signal.SIGSTOP)
    programs = [next(NEW) for _ in range(2000)]
    try:
        for program in programs:
            scheduler.open(program)
            scheduler.poll()
        # What does not fit into the queue is kept.
        assert scheduler.client.counters()["unsent"] > 0
        assert not any(program in scheduler.outlooks for program in programs)
        for program in programs[:1000]:
            scheduler.client.closed(program, is_cancelled=True)
        for _ in range(1000):
            scheduler.poll()
    finally:
        shared_graphs.send(signal.SIGCONT)
    scheduler.until(lambda: all(program in scheduler.outlooks for program in programs[1000:]))
    assert scheduler.client.counters()["lost"] == 0
    assert not any(program in scheduler.outlooks for program in programs[:1000])
    for program in programs[1000:]:
        scheduler.client.closed(program, is_cancelled=True)
    scheduler.send()


# Bounded ------------------------------------------------------------------------------------------


def test_ten_thousand_programs_opened_and_never_finished_stay_bounded(
    make_graphs: Callable[..., GraphsChild], schedule: Callable[[str], Scheduler]
) -> None:
    child = make_graphs()
    child.start_and_wait()
    scheduler = schedule(child.address)
    scheduler.teach(range(1, 6))
    wait_until(lambda: child.counter("learnt") == 5)
    process = psutil.Process(child.pid)
    before = process.memory_info().rss
    opened = 0
    for block in range(24):
        first = 1000 * (block + 1)
        scheduler.open(*range(first, first + 500))
        opened += 500
        scheduler.until(lambda count=opened: child.counter("opened") >= count + 5)
        scheduler.outlooks.clear()
    wait_until(lambda: child.counter("running") <= 10_000)
    assert child.counter("running") == 10_000
    assert process.memory_info().rss - before < 150 << 20
    # It answers and learns as before.
    scheduler.teach(range(100_000, 100_003))
    wait_until(lambda: child.counter("learnt") == 8)
    scheduler.known(200_000)
    assert scheduler.last(200_000).is_known
