"""A running predictor: it answers, learns, and bears whatever comes over its socket."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import numpy as np
import pytest
from predictor_child import ROW, Child, Serving, Stranger, wait_until

from core.channel import MAX_FRAME_BYTES
from predictor.calibration import NUM_BUCKETS
from predictor.client import PredictorProbe
from predictor.distribution import NUM_POINTS
from predictor.protocol import (
    MAGIC,
    SCHEMA_VERSION,
    Ask,
    Ended,
    Ending,
    Hello,
    Question,
    client_codec,
)

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.timeout(120)

QUESTION = Question("stranger", 1, 2, 3, ROW.astype("<f4").tobytes(), (1, 2, 3))
GOOD = client_codec().encode(Ask((QUESTION,), -1))


@pytest.fixture
def serving(shared: Child, serve: Callable[[str], Serving]) -> Serving:
    return serve(shared.address)


def dropped(shared: Child) -> int:
    """Messages that the socket's side has counted as no messages."""
    counters = shared.status().counters
    return sum(counters.get(f"wire_{kind}", 0) for kind in ("garbage", "version", "size"))


def answers(serving: Serving, name: str) -> bool:
    """Whether a forecast comes, now."""
    serving.forecast([name])
    serving.client.forget(name)
    return True


# Answering ----------------------------------------------------------------------------------------


def test_a_client_is_greeted_and_knows_that_the_predictor_is_there(serving: Serving) -> None:
    assert not serving.client.is_alive()
    serving.until(serving.client.is_alive)


def test_a_question_is_answered_with_a_distribution(serving: Serving) -> None:
    serving.forecast(["r"], tenant="acme", node="planner")
    (points,) = serving.points["r"]
    assert points.shape == (NUM_POINTS,)
    assert np.isfinite(points).all()
    assert points[0] >= 0
    assert (np.diff(points) >= 0).all()
    assert points[-1] > points[0]
    assert serving.num_calibrations >= 1


def test_a_thousand_questions_are_all_answered_once(serving: Serving) -> None:
    names = [f"m{n}" for n in range(1000)]
    serving.forecast(names)
    assert sorted(serving.points) == sorted(names)
    assert serving.client.counters()["unanswered"] == 0


def test_two_clients_with_the_same_ids_get_their_own_answers(
    shared: Child, serve: Callable[[str], Serving]
) -> None:
    first, second = serve(shared.address), serve(shared.address)
    first.ask(["same", "a"])
    second.ask(["same", "b"])
    first.until(lambda: len(first.points) == 2)
    second.until(lambda: len(second.points) == 2)
    assert set(first.points) == {"same", "a"}
    assert set(second.points) == {"same", "b"}


def test_what_ends_is_learnt(shared: Child, serving: Serving) -> None:
    before = shared.counter("learnt")
    serving.teach(f"l{n}" for n in range(60))
    wait_until(lambda: shared.counter("learnt") >= before + 60)
    assert shared.counter("learnt") == before + 60
    assert shared.counter("endings") >= 60


def test_what_was_learnt_shows_and_a_forest_is_fitted(shared: Child, serving: Serving) -> None:
    def median() -> float:
        serving.points.pop("now", None)
        serving.forecast(["now"])
        serving.client.forget("now")
        return float(np.median(serving.points["now"][-1]))

    # A forest that is fitted while lengths have just changed expects too much; not for long.
    for block in range(60):
        serving.teach((f"f{block}-{n}" for n in range(100)), tokens=3000)
        wait_until(lambda: shared.counter("backlog") == 0)
        if shared.counter("fits") >= 1 and 1000 < median() < 9000:
            return
    pytest.fail(f"after 6,000 answers of 3,000 tokens the median is {median():.0f}")


def test_an_answer_that_was_cut_is_counted_apart(shared: Child, serving: Serving) -> None:
    # What other tests have forgotten counts as cut, too.
    wait_until(lambda: shared.counter("backlog") == 0)
    before, ended = shared.counter("cut_endings"), shared.counter("endings")
    serving.forecast(["cut"])
    serving.client.ended("cut", 64, is_cut=True)
    serving.poll()
    wait_until(lambda: shared.counter("cut_endings") == before + 1)
    assert shared.counter("endings") == ended


STRANGE = ["", "\ud800", "\x00", "é" * 5000]


def test_requests_of_any_ids_are_forecast_and_learnt(shared: Child, serving: Serving) -> None:
    wait_until(lambda: shared.counter("backlog") == 0)
    before = shared.counter("learnt")
    serving.teach(STRANGE, tokens=150)
    assert all(serving.points[name][0].shape == (NUM_POINTS,) for name in STRANGE)
    wait_until(lambda: shared.counter("learnt") == before + len(STRANGE))
    assert serving.client.counters()["open"] == 0


def test_an_id_that_is_used_again_is_another_request(shared: Child, serving: Serving) -> None:
    wait_until(lambda: shared.counter("backlog") == 0)
    before, pending = shared.counter("learnt"), shared.counter("pending")
    for _ in range(50):
        serving.points.clear()
        serving.forecast(["same"])
    serving.client.ended("same", 150, is_cut=False)
    serving.poll()
    wait_until(lambda: shared.counter("pending") == pending)
    assert shared.counter("learnt") == before + 1


def test_the_status_tells_the_coverage(shared: Child) -> None:
    coverage = shared.status().coverage
    assert len(coverage) == NUM_BUCKETS
    assert all(value == -1 or 0 <= value <= 1 for value in coverage)


def test_a_probe_hears_a_predictor_that_runs(shared: Child) -> None:
    probe = PredictorProbe(shared.address)
    try:
        wait_until(probe.heard)
    finally:
        probe.close()


# What is no message -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "frames"),
    [
        ("garbage", [b""]),
        ("garbage", [b"hello"]),
        ("garbage", [b"GET / HTTP/1.1\r\n\r\n"]),
        ("garbage", [os.urandom(100_000)]),
        ("garbage", [MAGIC + bytes([SCHEMA_VERSION])]),
        ("garbage", [GOOD[:-1]]),
        ("garbage", [GOOD + b"\x00"]),
        ("garbage", [MAGIC + bytes([SCHEMA_VERSION]) + b"\x91" * 200_000]),
        ("garbage", [GOOD, GOOD]),
        ("garbage", [b"", GOOD]),
        ("garbage", [GOOD] * 20),
        ("version", [MAGIC + bytes([SCHEMA_VERSION - 1]) + GOOD[4:]]),
        ("version", [MAGIC + bytes([SCHEMA_VERSION + 1]) + GOOD[4:]]),
        ("version", [MAGIC + b"\xff" + GOOD[4:]]),
    ],
    ids=[
        "empty",
        "text",
        "http",
        "random",
        "header-only",
        "cut",
        "longer",
        "nested",
        "two-frames",
        "empty-frame-first",
        "many-frames",
        "old-version",
        "next-version",
        "far-version",
    ],
)
def test_what_is_no_message_is_counted_and_the_rest_is_answered(
    shared: Child, serving: Serving, stranger: Stranger, kind: str, frames: list[bytes]
) -> None:
    before = shared.counter(f"wire_{kind}")
    stranger.send(*frames)
    wait_until(lambda: shared.counter(f"wire_{kind}") > before)
    assert shared.counter(f"wire_{kind}") == before + 1
    assert answers(serving, "after")


def test_a_message_cut_short_anywhere_is_counted(
    shared: Child, serving: Serving, stranger: Stranger
) -> None:
    before = dropped(shared)
    for length in range(0, len(GOOD), 3):
        stranger.send(GOOD[:length])
    sent = len(range(0, len(GOOD), 3))
    wait_until(lambda: dropped(shared) >= before + sent)
    assert dropped(shared) == before + sent
    assert answers(serving, "after")


def test_a_flood_of_garbage_does_not_keep_others_from_being_answered(
    shared: Child, serving: Serving, stranger: Stranger
) -> None:
    before = shared.counter("wire_garbage")
    for _ in range(5000):
        stranger.send(b"x" * 1000)
    assert answers(serving, "amid")
    wait_until(lambda: shared.counter("wire_garbage") == before + 5000)


@pytest.mark.parametrize("size", [MAX_FRAME_BYTES + 1, 4 * MAX_FRAME_BYTES, 10 * MAX_FRAME_BYTES])
def test_after_a_huge_message_all_are_answered_as_before(
    shared: Child, serving: Serving, stranger: Stranger, size: int
) -> None:
    session, learnt = shared.status().session, shared.counter("learnt")
    assert answers(serving, "before")
    stranger.send(GOOD + b"\x00" * (size - len(GOOD)))
    assert answers(serving, "after")
    # Its sender, too, is heard again.
    before = shared.counter("forecasts")
    while shared.counter("forecasts") == before:
        stranger.send(GOOD)
    assert (shared.status().session, shared.counter("learnt")) == (session, learnt)


def test_a_huge_message_is_counted(shared: Child, serving: Serving, stranger: Stranger) -> None:
    before, greeted = dropped(shared), shared.counter("forecasts")
    stranger.send(GOOD)
    wait_until(lambda: shared.counter("forecasts") > greeted)
    stranger.send(GOOD + b"\x00" * MAX_FRAME_BYTES)
    # By the time that its sender is heard again, the huge one has long been there.
    greeted = shared.counter("forecasts")
    while shared.counter("forecasts") == greeted:
        stranger.send(GOOD)
    assert dropped(shared) > before


def test_a_question_that_makes_no_sense_is_counted(shared: Child, stranger: Stranger) -> None:
    before = shared.counter("bad_questions")
    bad = Question("bad", 1, 2, 3, b"\xff" * len(QUESTION.features), ())
    stranger.send(client_codec().encode(Ask((bad, QUESTION), -1)))
    wait_until(lambda: shared.counter("bad_questions") == before + 1)


def test_an_end_of_nothing_is_counted(shared: Child, stranger: Stranger) -> None:
    before = shared.counter("unknown_endings")
    stranger.send(client_codec().encode(Ended((Ending("never", 5, is_cut=False),))))
    wait_until(lambda: shared.counter("unknown_endings") == before + 1)


def test_a_peer_that_never_reads_keeps_nobody_from_being_answered(
    shared: Child, serving: Serving, stranger: Stranger
) -> None:
    ask = client_codec().encode(Ask((QUESTION,) * 50, -1))
    for _ in range(1500):
        stranger.send(ask)
    assert answers(serving, "meanwhile")
    for _ in range(1000):
        stranger.send(client_codec().encode(Hello()))
    assert answers(serving, "afterwards")


def test_after_all_of_this_it_is_the_same_process(shared: Child) -> None:
    assert shared.is_running()
    assert shared.num_starts == 1
    assert "Traceback" not in shared.log


# Stopped ------------------------------------------------------------------------------------------


def test_while_it_is_stopped_every_poll_returns_and_afterwards_all_is_answered(
    shared: Child, serving: Serving
) -> None:
    serving.forecast(["before"])
    shared.send(signal.SIGSTOP)
    try:
        names = [f"s{n}" for n in range(4000)]
        for name in names:
            serving.ask([name])
            serving.poll()
        # What does not fit into the queue is not sent, and nothing is forgotten.
        counters = serving.client.counters()
        assert counters["unanswered"] == len(names)
        assert counters["unsent"] > 0
        assert not any(name in serving.points for name in names)
        for name in names[:2000]:
            serving.client.ended(name, 5, is_cut=False)
        serving.client.ended("before", 5, is_cut=False)
        for _ in range(1000):
            serving.poll()
    finally:
        shared.send(signal.SIGCONT)
    serving.until(lambda: all(name in serving.points for name in names[2000:]))
    assert serving.client.counters()["unanswered"] == 0
    assert not any(name in serving.points for name in names[:2000])
