"""The serving side of the predictor: asks, listens, never waits, never raises."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import core.probe as probe_module
from core.channel import RouterChannel
from core.clock import ManualClock
from core.names import name_hash
from predictor import client as client_module
from predictor.book import LengthBook
from predictor.calibration import MAX_FACTOR, NUM_BUCKETS
from predictor.client import MAX_ENDINGS, NO_NEWS, News, PredictorClient, PredictorProbe
from predictor.distribution import MAX_TOKENS, NUM_LEVELS, NUM_POINTS, points_of_sample
from predictor.features import NO_CUES, NUM_FEATURES, EngineFacts, feature_row
from predictor.progress import NUM_PROGRESS
from predictor.protocol import (
    MAX_BATCH,
    MAX_ID_CHARS,
    Ask,
    AskStatus,
    CalibrationUpdate,
    Ended,
    Ending,
    Forecast,
    Forecasts,
    FromPredictor,
    Hello,
    Question,
    Ready,
    Status,
    ToPredictor,
    features_of,
    floats_of,
    server_codec,
)
from predictor.tilt import MAX_WEIGHT, no_tilts

if TYPE_CHECKING:
    from collections.abc import Iterator

ROW = feature_row(NO_CUES, EngineFacts(50, 500))
POINTS = points_of_sample([10, 200, 300, 900])
FACTORS = np.full((NUM_BUCKETS, NUM_LEVELS), 1.5, dtype="<f4")


class Wire:
    """Stands in for the channel: every message goes through the real codecs."""

    made: list[Wire]

    def __init__(self, address: str, codec: Any) -> None:
        self.codec = codec
        self.is_there = True
        self.room = 1 << 30
        self.sent: list[ToPredictor] = []
        self.inbox: list[FromPredictor] = []
        self.counters: Counter[str] = Counter()
        Wire.made.append(self)

    def send(self, message: ToPredictor) -> bool:
        frame = self.codec.encode(message)
        if not self.is_there or self.room <= 0:
            self.counters["unsent"] += 1
            return False
        self.room -= 1
        self.sent.append(server_codec().decode(frame))
        return True

    def receive(self, limit: int) -> list[FromPredictor]:
        found, self.inbox = self.inbox[:limit], self.inbox[limit:]
        return [self.codec.decode(server_codec().encode(message)) for message in found]

    def wait(self, _timeout_s: float) -> bool:
        return bool(self.inbox)

    def close(self) -> None:
        pass


class Serving:
    """A client with its clock and its wire; a test speaks of its requests by their ids."""

    def __init__(self) -> None:
        self.clock = ManualClock(1000.0)
        self.client = PredictorClient("ipc:///nowhere", self.clock, model="m")
        self.wire = Wire.made[-1]
        self.names: dict[str, str] = {}
        """Ids by the numbers under which they are asked about on the wire."""

    def ask(self, *names: str, features: Any = ROW, **whose: Any) -> None:
        for name in names:
            self.client.ask(name, features, **whose)
            self.names[str(len(self.names) + 1)] = name

    def number(self, name: str) -> str:
        """Under which it was asked about last; a number of its own for what never was."""
        found = [number for number, asked in self.names.items() if asked == name]
        return found[-1] if found else "999999"

    def poll(self, *messages: FromPredictor) -> News:
        self.wire.inbox += messages
        return self.client.poll()

    def pass_time(self, seconds: float, *, says: FromPredictor | None = None) -> None:
        """Poll ten times a second."""
        for _ in range(round(seconds * 10)):
            self.clock.advance(0.1)
            if says is not None:
                self.wire.inbox.append(says)
            self.client.poll()

    def questions(self) -> list[Question]:
        """What was asked since the last look at what was sent."""
        return [q for m in self.wire.sent if isinstance(m, Ask) for q in m.questions]

    def asked(self) -> list[str]:
        """Ids of what was asked about since the last call."""
        found = [self.names[question.request_id] for question in self.questions()]
        self.wire.sent.clear()
        return found

    def endings(self) -> list[tuple[str, int, bool]]:
        """Ids, tokens and whether it was cut, of what was told since the last call."""
        found = [e for m in self.wire.sent if isinstance(m, Ended) for e in m.endings]
        self.wire.sent.clear()
        return [(self.names[e.request_id], e.output_tokens, e.is_cut) for e in found]

    def forecast(self, *names: str, points: Any = POINTS) -> Forecasts:
        return forecast(*map(self.number, names), points=points)

    def answer(self, *names: str) -> News:
        return self.poll(self.forecast(*names))


def forecast(*numbers: str, points: Any = POINTS) -> Forecasts:
    data = np.asarray(points).astype("<f4").tobytes()
    return Forecasts(tuple(Forecast(number, data) for number in numbers))


def update(version: int = 3, factors: Any = FACTORS, tilts: Any = None) -> CalibrationUpdate:
    tilts = no_tilts() if tilts is None else tilts
    packed = [np.asarray(array).astype("<f4").tobytes() for array in (factors, tilts)]
    return CalibrationUpdate(version, *packed)


def ids(news: News) -> list[str]:
    return [name for name, _ in news.forecasts]


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Serving:
    Wire.made = []
    monkeypatch.setattr(client_module, "DealerChannel", Wire)
    monkeypatch.setattr(probe_module, "DealerChannel", Wire)
    return Serving()


# Asking -------------------------------------------------------------------------------------------


def test_a_question_goes_out_with_the_next_poll(serving: Serving) -> None:
    serving.ask("r")
    assert serving.asked() == []
    serving.poll()
    assert serving.asked() == ["r"]
    serving.poll()
    assert serving.asked() == []


def test_a_question_is_numbers_and_hashes(serving: Serving) -> None:
    serving.ask("r", tenant="acme", node="planner", words=[5, 7])
    serving.poll()
    (sent,) = [m for m in serving.wire.sent if isinstance(m, Ask)]
    (question,) = sent.questions
    assert features_of(question).tolist() == ROW.tolist()
    assert question.words == (5, 7)
    assert len({question.model, question.tenant, question.node} - {0}) == 3
    assert question.model == name_hash("m")
    assert b"acme" not in serving.wire.codec.encode(sent)
    assert b"planner" not in serving.wire.codec.encode(sent)


def test_without_a_tenant_or_a_node_none_is_named(serving: Serving) -> None:
    serving.ask("r")
    serving.poll()
    (question,) = serving.questions()
    assert (question.tenant, question.node) == (0, 0)


def test_the_same_node_of_two_tenants_is_two_nodes(serving: Serving) -> None:
    for name, tenant in (("r", "a"), ("s", "b")):
        serving.ask(name, tenant=tenant, node="n")
    serving.poll()
    first, second = serving.questions()
    assert first.node != second.node
    assert first.tenant != second.tenant


def test_many_questions_go_out_in_batches(serving: Serving) -> None:
    names = [f"r{n}" for n in range(1000)]
    serving.ask(*names)
    serving.poll()
    sizes = [len(m.questions) for m in serving.wire.sent if isinstance(m, Ask)]
    assert max(sizes) <= MAX_BATCH
    assert serving.asked() == names


def test_a_request_that_has_ended_before_it_was_asked_about_is_not_asked_about(
    serving: Serving,
) -> None:
    serving.ask("r", "s", "t")
    serving.client.ended("r", 5, is_cut=False)
    serving.client.forget("s")
    serving.poll()
    assert serving.asked() == ["t"]


def test_no_id_of_a_sender_goes_over_the_wire(serving: Serving) -> None:
    serving.ask("secret-name-of-theirs", "x" * 10_000, "r")
    serving.poll()
    numbers = [question.request_id for question in serving.questions()]
    assert numbers == ["1", "2", "3"]
    for message in serving.wire.sent:
        assert b"secret" not in serving.wire.codec.encode(message)
        assert b"xxx" not in serving.wire.codec.encode(message)


def test_numbers_are_never_used_twice(serving: Serving) -> None:
    seen: list[str] = []
    for _ in range(50):
        serving.ask("r", "s")
        serving.poll()
        seen += [question.request_id for question in serving.questions()]
        serving.wire.sent.clear()
        serving.client.ended("r", 5, is_cut=False)
    assert len(set(seen)) == len(seen) == 100


STRANGE = ["\ud800", "a\udfffb", "", "\x00", "é" * MAX_ID_CHARS, "x" * (MAX_ID_CHARS + 1), "1", "2"]


@pytest.mark.parametrize("name", STRANGE, ids=ascii)
def test_any_id_is_asked_about_and_learnt_from_and_holds_up_no_other(
    serving: Serving, name: str
) -> None:
    serving.ask("r")
    serving.ask(name, tenant=name, node=name)
    serving.poll()
    assert [len(question.request_id) for question in serving.questions()] == [1, 1]
    assert serving.asked() == ["r", name]
    news = serving.answer("r", name)
    assert ids(news) == ["r", name]
    assert news.forecasts[1][1].tolist() == POINTS.tolist()
    serving.client.ended(name, 5, is_cut=False)
    serving.client.ended("r", 6, is_cut=False)
    serving.poll()
    assert serving.endings() == [(name, 5, False), ("r", 6, False)]
    assert serving.client.counters()["open"] == 0


def test_a_lone_surrogate_in_an_id_never_makes_a_poll_raise(serving: Serving) -> None:
    serving.poll(Ready(1))
    for number in range(100):
        serving.ask(f"\ud800{number}", f"r{number}")
        serving.pass_time(0.2, says=Ready(1 + number // 20))
        serving.client.ended(f"\ud800{number}", 5, is_cut=False)
    serving.pass_time(5, says=Ready(9))
    assert {f"r{number}" for number in range(100)} <= set(serving.asked())
    assert serving.wire.counters["unsent"] == 0


def test_features_of_any_layout_are_sent_as_they_are(serving: Serving) -> None:
    serving.ask("r", features=np.repeat(ROW, 2)[::2])
    serving.ask("s", features=ROW.astype(np.float64))
    serving.poll()
    assert len(serving.questions()) == 2
    for question in serving.questions():
        assert features_of(question).shape == (NUM_FEATURES,)
        assert features_of(question).tolist() == ROW.tolist()


def test_it_says_hello_now_and_then(serving: Serving) -> None:
    serving.pass_time(10)
    hellos = sum(isinstance(message, Hello) for message in serving.wire.sent)
    assert 5 <= hellos <= 15


# Answers ------------------------------------------------------------------------------------------


def test_a_forecast_is_news_once(serving: Serving) -> None:
    serving.ask("r", "s")
    serving.poll()
    news = serving.answer("r", "s")
    assert ids(news) == ["r", "s"]
    assert news.forecasts[0][1].tolist() == POINTS.tolist()
    assert serving.poll() == NO_NEWS


def test_forecasts_of_unknown_requests_are_ignored(serving: Serving) -> None:
    serving.ask("r", "gone", "over")
    serving.poll()
    serving.client.forget("gone")
    serving.client.ended("over", 3, is_cut=False)
    assert ids(serving.answer("never", "gone", "r", "over")) == ["r"]
    assert serving.client.counters()["open"] == 1


@pytest.mark.parametrize(
    "points",
    [
        [],
        [1.0],
        POINTS[:-1],
        np.append(POINTS, 1e6),
        POINTS[::-1],
        np.full(NUM_POINTS, math.nan),
        np.append(POINTS[:-1], math.inf),
        np.append(-1.0, POINTS[1:]),
        np.where(np.arange(NUM_POINTS) == 300, 0, POINTS),
        np.append(POINTS[:-1], 1.1 * MAX_TOKENS),
        np.full(NUM_POINTS, 3e38),
    ],
    ids=[
        "none",
        "one",
        "few",
        "many",
        "falling",
        "nan",
        "infinite",
        "negative",
        "dent",
        "beyond",
        "far-beyond",
    ],
)
def test_points_that_make_no_sense_are_counted_and_not_used(serving: Serving, points: Any) -> None:
    serving.ask("r", "s")
    serving.poll()
    assert serving.poll(serving.forecast("r", points=points)) == NO_NEWS
    assert ids(serving.answer("s")) == ["s"]
    assert serving.client.num_bad == serving.client.counters()["bad"] == 1
    # It counts as unanswered, and a good answer is taken.
    assert serving.client.counters()["unanswered"] == 1
    assert ids(serving.answer("r")) == ["r"]


def test_one_bad_forecast_spoils_no_other_in_its_message(serving: Serving) -> None:
    serving.ask("r", "s", "t")
    serving.poll()
    good, bad = (np.asarray(p).astype("<f4").tobytes() for p in (POINTS, POINTS[::-1]))
    mixed = (Forecast("1", good), Forecast("2", bad), Forecast("3", good))
    assert ids(serving.poll(Forecasts(mixed))) == ["r", "t"]
    assert serving.client.num_bad == 1


def test_the_longest_points_that_there_are_are_taken(serving: Serving) -> None:
    serving.ask("r")
    serving.poll()
    longest = np.append(POINTS[:-1], MAX_TOKENS)
    assert ids(serving.poll(serving.forecast("r", points=longest))) == ["r"]


def test_what_is_beyond_all_measure_never_reaches_the_book(serving: Serving) -> None:
    serving.ask("r")
    serving.poll()
    book = LengthBook()
    for message in (
        serving.forecast("r", points=np.full(NUM_POINTS, 3e38)),
        serving.forecast("r", points=np.linspace(1, 3e38, NUM_POINTS)),
        update(5, FACTORS * 0 + np.float32(1e38)),
        update(6, FACTORS * 0 + np.float32(1e-38)),
        update(7, tilts=no_tilts() + np.float32(1e38)),
    ):
        assert serving.poll(message) == NO_NEWS
    for name, points in serving.answer("r").forecasts:
        book.enter(name, points)
    total = book.refine("r", 100)
    assert total is not None
    assert np.isfinite(total).all()
    assert serving.client.num_bad == 5


def test_a_calibration_is_news_and_its_version_is_told(serving: Serving) -> None:
    news = serving.poll(Ready(1), update(7))
    assert news.factors is not None
    assert news.factors.shape == (NUM_BUCKETS, NUM_LEVELS)
    assert (news.factors == 1.5).all()
    assert serving.poll().factors is None
    serving.ask("r")
    serving.poll()
    (ask,) = [m for m in serving.wire.sent if isinstance(m, Ask)]
    assert ask.calibration_version == 7


def test_of_two_calibrations_the_last_counts(serving: Serving) -> None:
    news = serving.poll(update(1), update(2, FACTORS * 2))
    assert news.factors is not None
    assert (news.factors == 3).all()


@pytest.mark.parametrize(
    "factors",
    [
        [],
        FACTORS[:-1],
        np.zeros_like(FACTORS),
        -FACTORS,
        np.where(FACTORS > 0, math.nan, 1),
        np.where(np.eye(NUM_BUCKETS, NUM_LEVELS) > 0, math.inf, FACTORS),
        np.where(np.eye(NUM_BUCKETS, NUM_LEVELS) > 0, 1.1 * MAX_FACTOR, FACTORS),
        np.where(np.eye(NUM_BUCKETS, NUM_LEVELS) > 0, 0.9 / MAX_FACTOR, FACTORS),
        np.full_like(FACTORS, 1e38),
        np.full_like(FACTORS, 1e-38),
    ],
    ids=[
        "none",
        "few",
        "zero",
        "negative",
        "nan",
        "infinite",
        "one-too-high",
        "one-too-low",
        "huge",
        "tiny",
    ],
)
def test_factors_that_make_no_sense_are_counted_and_not_used(
    serving: Serving, factors: Any
) -> None:
    assert serving.poll(update(5, factors)).factors is None
    assert serving.client.num_bad == 1
    serving.ask("r")
    serving.poll()
    (ask,) = [m for m in serving.wire.sent if isinstance(m, Ask)]
    assert ask.calibration_version != 5


@pytest.mark.parametrize("value", [MAX_FACTOR, 1 / MAX_FACTOR])
def test_the_outermost_factors_are_taken(serving: Serving, value: float) -> None:
    news = serving.poll(update(5, np.full_like(FACTORS, value)))
    assert news.factors is not None
    assert serving.client.num_bad == 0


def test_tilts_come_with_the_factors(serving: Serving) -> None:
    news = serving.poll(update(5, tilts=no_tilts() + 0.25))
    assert news.tilts is not None
    assert news.tilts.shape == no_tilts().shape
    assert (news.tilts == 0.25).all()


@pytest.mark.parametrize("sign", [-1, 1])
def test_the_outermost_tilts_are_taken(serving: Serving, sign: int) -> None:
    assert serving.poll(update(5, tilts=no_tilts() + sign * MAX_WEIGHT)).tilts is not None
    assert serving.client.num_bad == 0


@pytest.mark.parametrize(
    "tilts",
    [
        [],
        no_tilts()[:-1],
        no_tilts() + math.nan,
        no_tilts() + 1.1 * MAX_WEIGHT,
        no_tilts() - 1.1 * MAX_WEIGHT,
        no_tilts() + 1e38,
    ],
    ids=["none", "few", "nan", "high", "low", "huge"],
)
def test_tilts_that_make_no_sense_are_counted_and_not_used(serving: Serving, tilts: Any) -> None:
    news = serving.poll(update(5, tilts=tilts))
    assert news.factors is None
    assert news.tilts is None
    assert serving.client.num_bad == 1


def test_one_poll_takes_in_one_message_with_forecasts_and_the_next_the_next(
    serving: Serving,
) -> None:
    names = [f"r{n}" for n in range(50)]
    serving.ask(*names)
    serving.poll()
    serving.wire.inbox += [serving.forecast(name) for name in names]
    found = []
    for left in reversed(range(50)):
        found.append(ids(serving.client.poll()))
        assert len(serving.wire.inbox) == left
    assert found == [[name] for name in names]
    assert serving.client.poll() == NO_NEWS


def test_what_comes_before_a_message_with_forecasts_is_taken_in_with_it(serving: Serving) -> None:
    serving.ask("r", "s")
    serving.poll()
    news = serving.poll(
        Ready(1), update(1), serving.forecast("r"), update(2, FACTORS * 2), serving.forecast("s")
    )
    assert ids(news) == ["r"]
    assert news.factors is not None
    assert (news.factors == 1.5).all()
    news = serving.poll()
    assert ids(news) == ["s"]
    assert news.factors is not None
    assert (news.factors == 3).all()


def test_only_so_many_messages_are_taken_in_by_one_poll(serving: Serving) -> None:
    serving.wire.inbox += [update(number) for number in range(500)]
    serving.client.poll()
    assert 0 < len(serving.wire.inbox) < 500
    for _ in range(500):
        serving.client.poll()
    assert serving.wire.inbox == []


def test_a_status_that_nobody_asked_for_is_no_trouble(serving: Serving) -> None:
    assert serving.poll(Status(1, {}, ())) == News()


# Lost questions -----------------------------------------------------------------------------------


def test_a_question_that_finds_nobody_is_asked_when_somebody_is_there(serving: Serving) -> None:
    serving.wire.is_there = False
    serving.ask("r", "s")
    serving.pass_time(30)
    serving.wire.is_there = True
    serving.pass_time(2)
    assert set(serving.asked()) == {"r", "s"}


def test_a_question_without_an_answer_is_asked_again(serving: Serving) -> None:
    serving.ask("r")
    serving.poll()
    assert serving.asked() == ["r"]
    serving.pass_time(10, says=Ready(1))
    repeats = serving.asked()
    assert set(repeats) == {"r"}
    assert 1 <= len(repeats) <= 5


def test_what_is_answered_is_not_asked_again(serving: Serving) -> None:
    serving.poll(Ready(1))
    serving.ask("r")
    serving.poll()
    serving.answer("r")
    serving.asked()
    serving.pass_time(60, says=Ready(1))
    assert serving.asked() == []


def test_where_the_queue_is_full_the_rest_is_asked_later(serving: Serving) -> None:
    serving.poll()
    names = [f"r{n}" for n in range(3 * MAX_BATCH)]
    serving.ask(*names)
    serving.wire.room = 1
    serving.poll()
    assert len(serving.asked()) == MAX_BATCH
    serving.wire.room = 100
    serving.poll()
    assert serving.asked() == names[MAX_BATCH:]


def test_a_new_predictor_is_asked_about_all_that_is_open(serving: Serving) -> None:
    serving.ask("answered", "waiting", "over")
    serving.poll(Ready(1))
    serving.answer("answered", "over")
    serving.client.ended("over", 4, is_cut=False)
    serving.poll()
    serving.asked()
    serving.poll(Ready(2))
    serving.poll()
    assert sorted(serving.asked()) == ["answered", "waiting"]
    # Forecasts of the new one are taken, and ends are learnt from them.
    assert sorted(ids(serving.answer("answered", "waiting"))) == ["answered", "waiting"]
    serving.client.ended("answered", 5, is_cut=False)
    serving.poll()
    assert serving.endings() == [("answered", 5, False)]


def test_the_same_predictor_saying_hello_again_is_not_asked_again(serving: Serving) -> None:
    serving.ask("r")
    serving.poll(Ready(1))
    serving.answer("r")
    serving.asked()
    for _ in range(10):
        serving.poll(Ready(1))
    assert serving.asked() == []


def test_a_new_predictor_is_told_that_its_calibration_is_not_known(serving: Serving) -> None:
    serving.ask("r")
    serving.poll(Ready(1), update(9))
    serving.poll(Ready(2))
    serving.wire.sent.clear()
    serving.poll()
    asks = [m for m in serving.wire.sent if isinstance(m, Ask)]
    assert [m.calibration_version for m in asks] == [-1]


def test_a_restart_is_told_in_the_log_once(
    serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        serving.poll(Ready(1))
        assert caplog.records == []
        for _ in range(5):
            serving.poll(Ready(2))
    assert len(caplog.records) == 1


# Endings ------------------------------------------------------------------------------------------


def answered(serving: Serving, *names: str) -> None:
    serving.ask(*names)
    serving.poll()
    for start in range(0, len(names), 100):
        serving.answer(*names[start : start + 100])
    serving.wire.sent.clear()


@pytest.mark.parametrize("is_cut", [False, True])
def test_the_end_of_a_forecast_request_is_told(serving: Serving, is_cut: bool) -> None:
    answered(serving, "r")
    serving.client.ended("r", 42, is_cut=is_cut)
    serving.poll()
    assert serving.endings() == [("r", 42, is_cut)]
    assert serving.client.counters()["open"] == 0


def test_what_an_answer_looked_like_on_its_way_is_told_with_its_end(serving: Serving) -> None:
    answered(serving, "r")
    progress = [np.full(NUM_PROGRESS, value, dtype=np.float32) for value in (0.5, 0.75)]
    serving.client.ended("r", 120, is_cut=False, progress=progress)
    serving.poll()
    (ending,) = [e for m in serving.wire.sent if isinstance(m, Ended) for e in m.endings]
    rows = [floats_of(row, NUM_PROGRESS).tolist() for row in ending.progress]
    assert rows == [row.tolist() for row in progress]


def test_an_end_is_told_once(serving: Serving) -> None:
    answered(serving, "r")
    for _ in range(3):
        serving.client.ended("r", 42, is_cut=False)
        serving.poll()
    assert len(serving.endings()) == 1


def test_the_end_of_what_was_asked_is_told_though_no_answer_has_come(serving: Serving) -> None:
    # The predictor may have it on its list, and its forecast on the way.
    serving.ask("r")
    serving.poll()
    serving.client.ended("r", 42, is_cut=False)
    serving.poll()
    assert serving.endings() == [("r", 42, False)]
    assert serving.answer("r") == NO_NEWS


def test_the_end_of_what_was_never_asked_is_not_told(serving: Serving) -> None:
    serving.wire.is_there = False
    serving.ask("r", "s")
    serving.poll()
    serving.client.ended("r", 42, is_cut=False)
    serving.client.forget("s")
    serving.client.ended("unknown", 42, is_cut=False)
    serving.client.forget("unknown")
    serving.wire.is_there = True
    serving.poll()
    assert serving.endings() == []
    assert serving.client.counters()["open"] == 0


def test_what_is_forgotten_is_told_as_cut_before_its_first_token(serving: Serving) -> None:
    # Of which the predictor learns nothing but that it need not remember it.
    answered(serving, "r")
    serving.client.forget("r")
    serving.poll()
    assert serving.endings() == [("r", 0, True)]
    assert serving.client.counters()["open"] == 0


@pytest.mark.parametrize("is_answered", [False, True])
def test_an_id_that_is_asked_again_while_open_is_a_new_request(
    serving: Serving, is_answered: bool
) -> None:
    serving.ask("r")
    serving.poll()
    if is_answered:
        serving.answer("r")
    serving.wire.sent.clear()
    serving.ask("r")
    serving.poll()
    told = [e for m in serving.wire.sent if isinstance(m, Ended) for e in m.endings]
    assert told == [Ending("1", 0, is_cut=True)]
    assert [question.request_id for question in serving.questions()] == ["2"]
    serving.wire.sent.clear()
    # The forecast of the one before is nobody's, and its length is not taken for the new one's.
    assert serving.poll(forecast("1")) == NO_NEWS
    assert ids(serving.poll(forecast("2"))) == ["r"]
    serving.client.ended("r", 42, is_cut=False)
    serving.poll()
    told = [e for m in serving.wire.sent if isinstance(m, Ended) for e in m.endings]
    assert told == [Ending("2", 42, is_cut=False)]
    assert serving.client.counters()["open"] == 0


def test_an_id_that_is_used_again_after_its_end_is_a_new_request(serving: Serving) -> None:
    answered(serving, "r")
    serving.client.ended("r", 10, is_cut=False)
    serving.ask("r")
    serving.poll()
    assert [question.request_id for question in serving.questions()] == ["2"]
    assert serving.poll(forecast("1")) == NO_NEWS
    assert ids(serving.poll(forecast("2"))) == ["r"]
    serving.client.ended("r", 20, is_cut=False)
    serving.poll()
    told = [e for m in serving.wire.sent if isinstance(m, Ended) for e in m.endings]
    assert told == [Ending("1", 10, is_cut=False), Ending("2", 20, is_cut=False)]


def test_asked_again_before_the_first_was_sent_only_the_new_one_is_asked_about(
    serving: Serving,
) -> None:
    serving.ask("r", "r", "r")
    serving.poll()
    assert [question.request_id for question in serving.questions()] == ["3"]
    assert serving.endings() == []


def test_ends_are_kept_while_nobody_is_there(serving: Serving) -> None:
    answered(serving, "r")
    serving.wire.is_there = False
    serving.client.ended("r", 42, is_cut=False)
    serving.pass_time(3)
    serving.wire.is_there = True
    serving.poll()
    assert serving.endings() == [("r", 42, False)]


def test_only_so_many_ends_are_kept_and_the_newest_of_them(serving: Serving) -> None:
    names = [f"r{n}" for n in range(MAX_ENDINGS + 500)]
    answered(serving, *names)
    serving.wire.is_there = False
    for number, name in enumerate(names):
        serving.client.ended(name, number, is_cut=False)
        serving.poll()
    serving.wire.is_there = True
    serving.poll()
    told = serving.endings()
    assert len(told) == MAX_ENDINGS
    assert [name for name, _, _ in told] == names[-MAX_ENDINGS:]


def test_ends_go_out_in_batches(serving: Serving) -> None:
    names = [f"r{n}" for n in range(600)]
    answered(serving, *names)
    for name in names:
        serving.client.ended(name, 1, is_cut=False)
    serving.poll()
    sizes = [len(m.endings) for m in serving.wire.sent if isinstance(m, Ended)]
    assert max(sizes) <= MAX_BATCH
    assert sum(sizes) == 600


# Silence ------------------------------------------------------------------------------------------


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


def test_while_it_is_silent_everything_goes_on(serving: Serving) -> None:
    serving.poll(Ready(1))
    for number in range(600):
        serving.ask(f"r{number}")
        serving.pass_time(0.1)
        serving.client.ended(f"r{number}", 5, is_cut=False)
    assert serving.client.counters()["open"] == 0


# A clock that jumps -------------------------------------------------------------------------------


def test_after_the_clock_has_jumped_back_hello_is_said_soon(serving: Serving) -> None:
    serving.pass_time(5)
    serving.clock.advance(-900)
    serving.wire.sent.clear()
    serving.pass_time(5)
    assert sum(isinstance(message, Hello) for message in serving.wire.sent) >= 2


def test_after_the_clock_has_jumped_back_lost_questions_are_asked_again_soon(
    serving: Serving,
) -> None:
    serving.ask("r")
    serving.poll(Ready(1))
    serving.asked()
    serving.clock.advance(-900)
    serving.pass_time(20, says=Ready(1))
    assert "r" in serving.asked()


def test_after_the_clock_has_jumped_back_silence_is_noticed_soon(
    serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    serving.poll(Ready(1))
    serving.clock.advance(-900)
    serving.pass_time(20)
    assert not serving.client.is_alive()
    assert len(caplog.records) == 1


def test_after_the_clock_has_jumped_ahead_it_goes_on(serving: Serving) -> None:
    serving.poll(Ready(1))
    serving.clock.advance(1e6)
    serving.ask("r")
    serving.poll()
    assert serving.asked() == ["r"]
    serving.answer("r")
    assert serving.client.is_alive()


# Whatever comes -----------------------------------------------------------------------------------

NAMES = st.sampled_from(["a", "b", "c"])
EVENTS = st.one_of(
    st.tuples(st.just("ask"), NAMES),
    st.tuples(st.just("ended"), NAMES),
    st.tuples(st.just("forget"), NAMES),
    st.tuples(st.just("forecast"), NAMES),
    st.tuples(st.just("stale"), NAMES),
    st.tuples(st.just("nonsense"), NAMES),
    st.tuples(st.just("ready"), st.integers(1, 3)),
    st.tuples(st.just("calibration"), st.integers(0, 3)),
    st.tuples(st.just("there"), st.booleans()),
    st.tuples(st.just("time"), st.floats(-100, 100)),
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=st.lists(EVENTS, max_size=40))
def test_in_any_order_nothing_raises_and_the_account_is_right(
    serving: Serving, events: list[tuple[str, Any]]
) -> None:
    serving = Serving()
    serving.poll(Ready(0))
    is_open: set[str] = set()
    for kind, value in events:
        match kind:
            case "ask":
                serving.ask(value)
                is_open.add(value)
            case "ended":
                serving.client.ended(value, 5, is_cut=False)
                is_open.discard(value)
            case "forget":
                serving.client.forget(value)
                is_open.discard(value)
            case "forecast":
                assert set(ids(serving.answer(value))) <= is_open
            case "stale":
                number = serving.number(value)
                old = [n for n, name in serving.names.items() if name == value and n != number]
                assert serving.poll(forecast(*old)) == NO_NEWS
            case "nonsense":
                nonsense = serving.forecast(value, points=POINTS[::-1])
                assert serving.poll(nonsense).forecasts == ()
            case "ready":
                serving.poll(Ready(value))
            case "calibration":
                serving.poll(update(value))
            case "there":
                serving.wire.is_there = value
            case _:
                serving.clock.advance(value)
        serving.client.poll()
        assert serving.client.counters()["open"] == len(is_open)
        current = {serving.number(name) for name in is_open}
        assert {question.request_id for question in serving.questions()} <= current
        serving.wire.sent.clear()
    # Whatever has happened: a predictor that is there is asked about all that is open.
    serving.wire.is_there = True
    serving.poll(Ready(99))
    serving.pass_time(3)
    assert {question.request_id for question in serving.questions()} == {
        serving.number(name) for name in is_open
    }


# The real socket ----------------------------------------------------------------------------------


@pytest.fixture
def address() -> Iterator[str]:
    # Not tmp_path: that is too long for the path of a socket.
    folder = tempfile.mkdtemp(prefix="pc", dir="/tmp")
    yield f"ipc://{folder}/s"
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("address_of_nobody", ["ipc:///no/such/folder/s", "tcp://127.0.0.1:9"])
def test_with_nobody_there_everything_returns_and_nothing_raises(address_of_nobody: str) -> None:
    clock = ManualClock()
    client = PredictorClient(address_of_nobody, clock, model="m")
    try:
        for number in range(2000):
            client.ask(f"r{number}", ROW)
            assert client.poll() == NO_NEWS
            if number % 2:
                client.ended(f"r{number}", 5, is_cut=False)
            clock.advance(0.05)
        assert not client.is_alive()
        assert client.counters()["open"] == 1000
    finally:
        client.close()


@pytest.mark.parametrize("bad", ["", "nowhere", "ipc://", "tcp://x", "http://x:80"])
def test_an_address_that_is_none_is_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="ipc://PATH"):
        PredictorClient(bad, ManualClock(), model="m")
    with pytest.raises(ValueError, match="ipc://PATH"):
        PredictorProbe(bad)


def test_a_question_and_its_answer_go_over_the_real_socket(address: str) -> None:
    router: RouterChannel[FromPredictor, ToPredictor] = RouterChannel(address, server_codec())
    clock = ManualClock()
    client = PredictorClient(address, clock, model="m")
    try:
        client.ask("r", ROW)
        questions: list[tuple[bytes, Question]] = []
        while not questions:
            client.poll()
            clock.advance(0.5)
            if router.wait(0.02):
                for peer, message in router.receive(100):
                    if isinstance(message, Ask):
                        questions += [(peer, question) for question in message.questions]
        peer, question = questions[0]
        assert question.request_id == "1"
        assert router.send(peer, forecast("1"))
        news = NO_NEWS
        while not news.forecasts:
            news = client.poll()
            router.wait(0.01)
            router.receive(100)
        assert ids(news) == ["r"]
        assert client.is_alive()
    finally:
        client.close()
        router.close()


def test_a_service_that_has_gone_is_no_error(address: str) -> None:
    router: RouterChannel[FromPredictor, ToPredictor] = RouterChannel(address, server_codec())
    clock = ManualClock()
    client = PredictorClient(address, clock, model="m")
    try:
        while not router.wait(0.02):
            client.poll()
            clock.advance(0.5)
    finally:
        router.close()
    try:
        for number in range(2000):
            client.ask(f"r{number}", ROW)
            client.poll()
            clock.advance(0.01)
        assert client.counters()["open"] == 2000
    finally:
        client.close()


# The probe ----------------------------------------------------------------------------------------


def test_a_probe_hears_only_what_has_come_since_it_last_listened(serving: Serving) -> None:
    probe = PredictorProbe("ipc:///nowhere")
    wire = Wire.made[-1]
    assert not probe.heard()
    wire.inbox += [Ready(1), Ready(1)]
    assert probe.heard()
    assert not probe.heard()


def test_a_probe_asks_whenever_it_listens(serving: Serving) -> None:
    probe = PredictorProbe("ipc:///nowhere")
    for _ in range(3):
        probe.heard()
    assert Wire.made[-1].sent == [Hello()] * 3


def test_a_probe_with_nobody_there_hears_nothing_and_raises_nothing() -> None:
    probe = PredictorProbe("ipc:///no/such/folder/s")
    try:
        assert not any(probe.heard() for _ in range(100))
        assert probe.status(0.0) is None
    finally:
        probe.close()


def test_a_probe_reads_the_status_among_other_answers(serving: Serving) -> None:
    probe = PredictorProbe("ipc:///nowhere")
    wire = Wire.made[-1]
    status = Status(5, {"learnt": 7}, (0.9,))
    wire.inbox += [Ready(5), update(), status]
    assert probe.status(1.0) == status
    assert AskStatus() in wire.sent
