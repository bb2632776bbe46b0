"""The predictor without its socket: answers, learns, fits and saves, whatever it is sent."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inline_jobs import Desk

from core import keeper
from core.checkpoint import CheckpointStore
from core.clock import ManualClock
from core.hosting import Loop
from predictor import server as server_module
from predictor.calibration import NUM_BUCKETS
from predictor.distribution import NUM_LEVELS
from predictor.features import (
    FEATURES,
    MAX_VALUE,
    NO_CUES,
    NUM_FEATURES,
    WORD_BUCKETS,
    EngineFacts,
    feature_row,
)
from predictor.forest import ForestParameters
from predictor.model import LengthModel
from predictor.progress import NUM_PROGRESS
from predictor.protocol import (
    MAX_ANSWERS,
    MAX_BATCH,
    MAX_ID_CHARS,
    Ask,
    AskStatus,
    CalibrationUpdate,
    Ended,
    Ending,
    Forecasts,
    FromPredictor,
    Hello,
    Question,
    Ready,
    Status,
    floats_of,
    points_of,
    server_codec,
)
from predictor.server import ENDINGS_PER_PASS, PredictorServer, restored_model
from predictor.state import FORMAT_VERSION
from predictor.tilt import TILTED_BUCKETS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PARAMETERS = ForestParameters(num_trees=4, min_samples_leaf=5)
ROW = feature_row(NO_CUES, EngineFacts(50, 500))
ROW_BYTES = ROW.astype("<f4").tobytes()
A, B = b"peer-a", b"peer-b"
SESSION = 77


class Served:
    """A server, its clock, its disk and what it has sent."""

    def __init__(self, folder: Path | None = None, **options: Any) -> None:
        self.clock = ManualClock(100.0)
        self.sent: list[tuple[bytes, FromPredictor]] = []
        self.deaf: set[bytes] = set()
        self.model = options.pop("model", None) or LengthModel(parameters=PARAMETERS, capacity=500)
        self.store = folder and CheckpointStore(folder, "predictor", version=FORMAT_VERSION)
        self.server = PredictorServer(
            self.model,
            self.send,
            self.clock,
            session=SESSION,
            store=self.store,
            checkpoint_every_s=60.0,
            **options,
        )

    def send(self, peer: bytes, message: FromPredictor) -> bool:
        if peer in self.deaf:
            return False
        server_codec().encode(message)
        self.sent.append((peer, message))
        return True

    def say(self, *messages: Any, peer: bytes = A) -> list[FromPredictor]:
        """What comes back to this peer; afterwards nothing is left to be learnt from."""
        self.sent.clear()
        self.server.handle([(peer, message) for message in messages])
        while self.server.is_behind:
            self.server.tend()
        return [message for to, message in self.sent if to == peer]

    def forecasts(self, *questions: Question, peer: bytes = A) -> list[str]:
        """Ids that are forecast, in order."""
        return ids(self.say(Ask(questions, -1), peer=peer))

    def teach(self, count: int, tokens: int = 50) -> None:
        names = [f"t{index}" for index in range(count)]
        for start in range(0, count, 100):
            part = names[start : start + 100]
            self.say(Ask(tuple(question(name) for name in part), -1))
            self.say(Ended(tuple(Ending(name, tokens, is_cut=False) for name in part)))

    def counters(self) -> dict[str, int]:
        return self.server.status().counters


def question(request_id: str = "r", **changes: Any) -> Question:
    made = Question(request_id, 1, 2, 3, ROW_BYTES, (1, 2))
    return msgspec.structs.replace(made, **changes)


def with_feature(column: int, value: float) -> bytes:
    """A feature row with one number changed."""
    row = ROW.astype("<f4")
    row[column] = value
    return row.tobytes()


def ids(messages: list[FromPredictor]) -> list[str]:
    return [
        forecast.request_id
        for message in messages
        if isinstance(message, Forecasts)
        for forecast in message.forecasts
    ]


@pytest.fixture(autouse=True)
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    made = Desk()
    monkeypatch.setattr(server_module, "Job", made)
    monkeypatch.setattr(keeper, "Job", made)
    return made


@pytest.fixture
def served() -> Served:
    return Served()


@pytest.fixture
def saving(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path)
    yield made
    assert made.store is not None
    made.store.close()


# Answering ----------------------------------------------------------------------------------------


def test_a_hello_is_answered_with_the_session(served: Served) -> None:
    assert Ready(SESSION) in served.say(Hello())


def test_a_new_peer_is_greeted_before_anything_else_is_said(served: Served) -> None:
    assert served.say(Ask((question(),), -1))[0] == Ready(SESSION)


def test_a_known_peer_is_not_greeted_with_every_question(served: Served) -> None:
    served.say(Hello())
    assert not any(isinstance(m, Ready) for m in served.say(Ask((question(),), -1)))


def test_every_question_is_answered_with_points(served: Served) -> None:
    messages = served.say(Ask(tuple(question(f"r{n}") for n in range(5)), -1))
    assert ids(messages) == [f"r{n}" for n in range(5)]
    for message in messages:
        if isinstance(message, Forecasts):
            for forecast in message.forecasts:
                assert points_of(forecast)[-1] > 0


def test_a_question_comes_with_the_calibration_if_it_is_another(served: Served) -> None:
    version = served.model.calibrator.version
    (update,) = [m for m in served.say(Ask((question(),), -1)) if isinstance(m, CalibrationUpdate)]
    assert update.version == version
    assert (floats_of(update.factors, NUM_BUCKETS * NUM_LEVELS) > 0).all()
    again = served.say(Ask((question(),), version))
    assert not any(isinstance(m, CalibrationUpdate) for m in again)


def test_a_new_calibration_is_sent_with_the_next_forecast(served: Served) -> None:
    served.say(Ask((question(),), -1))
    served.teach(50)
    (update,) = [
        m for m in served.say(Ask((question("x"),), -1)) if isinstance(m, CalibrationUpdate)
    ]
    assert update.version == served.model.calibrator.version


def test_a_calibration_that_was_lost_on_the_way_is_sent_again(served: Served) -> None:
    served.deaf.add(A)
    served.say(Ask((question("x"),), -1))
    served.deaf.clear()
    found = served.say(Ask((question("y"),), -1))
    assert any(isinstance(m, CalibrationUpdate) for m in found)


def test_peers_get_their_own_answers(served: Served) -> None:
    served.server.handle(
        [
            (A, Ask((question("a1"), question("same")), -1)),
            (B, Ask((question("b1"), question("same")), -1)),
        ]
    )
    assert ids([m for peer, m in served.sent if peer == A]) == ["a1", "same"]
    assert ids([m for peer, m in served.sent if peer == B]) == ["b1", "same"]


def test_more_questions_than_fit_one_batch_are_all_answered(served: Served) -> None:
    names = [f"r{n}" for n in range(2 * MAX_BATCH + 3)]
    assert served.forecasts(*map(question, names)) == names


def test_no_message_has_more_forecasts_than_a_scheduler_takes_in_at_once(served: Served) -> None:
    names = [f"r{n}" for n in range(MAX_BATCH)]
    messages = served.say(Ask(tuple(map(question, names)), -1))
    sizes = [len(m.forecasts) for m in messages if isinstance(m, Forecasts)]
    assert max(sizes) <= MAX_ANSWERS < MAX_BATCH
    assert ids(messages) == names


def test_no_questions_are_no_trouble(served: Served) -> None:
    assert served.forecasts() == []
    served.server.handle([])


BAD_QUESTIONS = {
    "no-features": question(features=b""),
    "few-features": question(features=ROW_BYTES[:-4]),
    "half-a-number": question(features=ROW_BYTES[:-1]),
    "many-features": question(features=ROW_BYTES * 100),
    "nan": question(features=np.full(NUM_FEATURES, math.nan, "<f4").tobytes()),
    "infinite": question(features=np.full(NUM_FEATURES, math.inf, "<f4").tobytes()),
    "too-large": question(features=with_feature(0, 1.1 * MAX_VALUE)),
    "too-small": question(features=with_feature(-1, -1.1 * MAX_VALUE)),
    "huge": question(features=with_feature(3, 3e38)),
    "no-id": question(""),
    "long-id": question("x" * (MAX_ID_CHARS + 1)),
    "negative-model": question(model=-1),
    "huge-tenant": question(tenant=1 << 63),
    "negative-node": question(node=-5),
    "negative-word": question(words=(-1,)),
    "huge-word": question(words=(WORD_BUCKETS,)),
    "many-words": question(words=(1,) * 100_000),
}


@pytest.mark.parametrize("bad", BAD_QUESTIONS.values(), ids=BAD_QUESTIONS)
def test_a_question_that_makes_no_sense_is_counted_and_the_others_are_answered(
    served: Served, bad: Question
) -> None:
    assert served.forecasts(question("before"), bad, question("after")) == ["before", "after"]
    assert served.counters()["bad_questions"] == 1
    assert served.counters()["pending"] == 2


@pytest.mark.parametrize("value", [-MAX_VALUE, MAX_VALUE])
def test_the_outermost_features_are_answered(served: Served, value: float) -> None:
    for column in range(0, NUM_FEATURES, 5):
        asked = question(f"r{column}", features=with_feature(column, value))
        assert served.forecasts(asked) == [f"r{column}"]


def test_a_peer_that_does_not_read_holds_nobody_up(served: Served) -> None:
    served.deaf.add(A)
    served.server.handle([(A, Ask((question(),), -1)), (B, Ask((question(),), -1)), (A, Hello())])
    assert ids([m for peer, m in served.sent if peer == B]) == ["r"]


def test_only_so_many_peers_are_remembered_and_all_are_served(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MAX_PEERS", 5)
    for number in range(50):
        peer = b"p%d" % number
        assert served.forecasts(question(), peer=peer) == ["r"]
    assert served.forecasts(question(), peer=b"p0") == ["r"]
    assert len(served.server._calibration_of) <= 6


def test_the_status_tells_session_counts_and_coverage(served: Served) -> None:
    served.teach(120)
    (status,) = [m for m in served.say(AskStatus()) if isinstance(m, Status)]
    assert status.session == SESSION
    assert status.counters["learnt"] == 120
    assert status.counters["forecasts"] == 120
    assert status.counters["endings"] == 120
    assert status.counters["pending"] == 0
    assert len(status.coverage) == NUM_BUCKETS
    assert 0 <= status.coverage[0] <= 1


# Learning -----------------------------------------------------------------------------------------


def test_an_ending_is_learnt(served: Served) -> None:
    served.say(Ask((question(),), -1))
    served.say(Ended((Ending("r", 40, is_cut=False),)))
    assert served.counters()["learnt"] == served.counters()["endings"] == 1
    assert served.counters()["pending"] == 0


def test_a_cut_ending_is_counted_apart(served: Served) -> None:
    served.say(Ask((question(),), -1))
    served.say(Ended((Ending("r", 40, is_cut=True),)))
    assert served.counters()["cut_endings"] == 1


def test_an_ending_is_learnt_once(served: Served) -> None:
    served.say(Ask((question(),), -1))
    served.say(Ended((Ending("r", 40, is_cut=False),) * 3))
    assert served.counters()["learnt"] == 1
    assert served.counters()["unknown_endings"] == 2


def test_nobody_ends_the_request_of_another(served: Served) -> None:
    served.say(Ask((question(),), -1), peer=A)
    served.say(Ended((Ending("r", 40, is_cut=False),)), peer=B)
    assert served.counters().get("learnt") == 0
    assert served.counters()["unknown_endings"] == 1


@pytest.mark.parametrize("tokens", [-1, -(1 << 63), 1 << 31, (1 << 64) - 1])
def test_an_ending_that_cannot_be_is_counted_and_teaches_nothing(
    served: Served, tokens: int
) -> None:
    served.say(Ask((question(),), -1))
    served.say(Ended((Ending("r", tokens, is_cut=False),)))
    assert served.counters()["bad_endings"] == 1
    assert served.counters()["learnt"] == 0


def test_much_to_learn_does_not_hold_up_answers(served: Served) -> None:
    names = [f"r{n}" for n in range(400)]
    served.forecasts(*map(question, names))
    served.server.handle([(A, Ended(tuple(Ending(name, 5, is_cut=False) for name in names)))])
    for done in range(1, 4):
        served.server.tend()
        assert served.counters()["learnt"] == done * ENDINGS_PER_PASS
    assert served.server.is_behind
    assert served.counters()["backlog"] == 400 - 3 * ENDINGS_PER_PASS
    served.sent.clear()
    served.server.handle([(A, Ask((question("q"),), -1))])
    assert ids([message for _, message in served.sent]) == ["q"]
    for _ in range(400):
        served.server.tend()
    assert served.counters()["learnt"] == 400
    assert not served.server.is_behind


def test_only_so_much_waits_to_be_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_BACKLOG", 500)
    served = Served()
    unknown = tuple(Ending(f"r{n}", 5, is_cut=False) for n in range(200))
    for _ in range(10):
        served.server.handle([(A, Ended(unknown))])
    assert served.counters()["backlog"] == 500


PROGRESS = b"\x00" * 4 * NUM_PROGRESS


@pytest.mark.parametrize("count", [0, 1, TILTED_BUCKETS])
def test_an_ending_may_tell_what_the_answer_looked_like(served: Served, count: int) -> None:
    served.say(Ask((question(),), -1))
    served.say(Ended((Ending("r", 4000, is_cut=False, progress=(PROGRESS,) * count),)))
    assert served.counters()["learnt"] == 1


@pytest.mark.parametrize(
    "progress",
    [
        (b"",),
        (PROGRESS[:-1],),
        (PROGRESS, PROGRESS + b"\x00" * 4),
        (b"\xff" * 4 * NUM_PROGRESS,),
        (PROGRESS,) * (TILTED_BUCKETS + 1),
    ],
)
def test_an_ending_whose_looks_make_no_sense_is_counted_and_teaches_nothing(
    served: Served, progress: tuple[bytes, ...]
) -> None:
    served.say(Ask((question(),), -1))
    served.say(Ended((Ending("r", 4000, is_cut=False, progress=progress),)))
    assert served.counters()["bad_endings"] == 1
    assert served.counters()["learnt"] == 0


def test_a_cut_before_the_first_token_teaches_nothing_and_is_forgotten(served: Served) -> None:
    served.say(Ask((question(),), -1))
    served.say(Ended((Ending("r", 0, is_cut=True),)))
    assert served.counters()["learnt"] == served.counters()["pending"] == 0


@pytest.mark.parametrize("value", [800.0, -800.0, MAX_VALUE, -MAX_VALUE])
def test_a_limit_of_tokens_beyond_all_measure_ends_no_server(served: Served, value: float) -> None:
    features = with_feature(FEATURES.index("log_max_tokens"), value)
    assert served.forecasts(question(features=features)) == ["r"]
    served.say(Ended((Ending("r", 4000, is_cut=False, progress=(PROGRESS,) * TILTED_BUCKETS),)))
    assert served.counters()["learnt"] == 1
    assert served.forecasts(question("after")) == ["after"]


@pytest.mark.parametrize("value", [3e38, -3e38, 1e20])
def test_looks_beyond_all_measure_end_no_server_and_leave_the_tilts_sane(
    served: Served, value: float
) -> None:
    looks = np.full(NUM_PROGRESS, value, dtype="<f4").tobytes()
    for number in range(100):
        served.forecasts(question(f"r{number}"))
        served.say(Ended((Ending(f"r{number}", 4000, is_cut=False, progress=(looks,)),)))
    served.model.tilt.refresh()
    assert np.isfinite(served.model.tilt.tilts).all()
    # And what others teach afterwards is learnt.
    before = served.counters()["learnt"]
    served.teach(100, tokens=4000)
    assert served.counters()["learnt"] == before + 100


def test_an_error_while_learning_is_counted_and_the_rest_is_learnt(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"r{n}" for n in range(3)]
    served.forecasts(*map(question, names))
    learn = served.model.learn

    def fails_once(asked: Any, tokens: int, **more: Any) -> None:
        if tokens == 1:
            raise np.linalg.LinAlgError("singular")
        learn(asked, tokens, **more)

    monkeypatch.setattr(served.model, "learn", fails_once)
    endings = tuple(Ending(name, index, is_cut=False) for index, name in enumerate(names))
    served.say(Ended(endings))
    assert served.counters()["failed_learning"] == 1
    assert served.counters()["learnt"] == served.counters()["endings"] == 2
    assert served.counters()["pending"] == 0


def test_asking_again_about_a_request_still_learns_it_once(served: Served) -> None:
    for _ in range(3):
        served.say(Ask((question(),), -1))
    assert served.counters()["pending"] == 1
    served.say(Ended((Ending("r", 40, is_cut=False),)))
    assert served.counters()["learnt"] == 1


def test_requests_that_never_end_are_forgotten_from_the_oldest(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MAX_PENDING", 10)
    served.forecasts(*(question(f"r{n}") for n in range(25)))
    assert served.counters()["pending"] == 10
    assert served.counters()["forgotten"] == 15
    served.say(Ended((Ending("r0", 5, is_cut=False), Ending("r24", 5, is_cut=False))))
    assert served.counters()["learnt"] == 1


def test_what_was_learnt_shows_in_the_next_forecast(served: Served) -> None:
    def median() -> float:
        (message,) = [m for m in served.say(Ask((question("q"),), -1)) if isinstance(m, Forecasts)]
        return float(np.median(points_of(message.forecasts[0])))

    before = median()
    served.teach(300, tokens=2000)
    served.server.tend()
    served.server.tend()
    assert before < 1000 < median() < 3000


# Fitting ------------------------------------------------------------------------------------------


def test_a_forest_is_fitted_in_the_background_and_then_used(served: Served, desk: Desk) -> None:
    desk.holds = True
    served.teach(100)
    served.server.tend()
    served.server.tend()
    assert len(desk.held) == 1
    assert served.model.forest is None
    # Meanwhile it answers and learns.
    assert served.forecasts(question("q")) == ["q"]
    served.teach(10)
    desk.work()
    served.server.tend()
    assert served.model.forest is not None
    assert served.counters()["fits"] == 1
    assert 0 < served.counters()["fitted_at"] <= 100


def test_nothing_is_fitted_while_nothing_is_new(served: Served) -> None:
    for _ in range(5):
        served.server.tend()
        served.clock.advance(1000)
    assert served.model.forest is None
    served.teach(100)
    for _ in range(10):
        served.server.tend()
        served.clock.advance(1000)
    fits = served.counters()["fits"]
    assert 1 <= fits <= 2
    for _ in range(10):
        served.server.tend()
        served.clock.advance(1000)
    assert served.counters()["fits"] == fits


def test_a_fit_that_fails_leaves_the_forest_before_in_use(
    served: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.teach(100)
    for _ in range(3):
        served.clock.advance(1000)
        served.server.tend()
    forest = served.model.forest
    assert forest is not None

    def fail(_data: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(served.model, "fit_forest", fail)
    served.teach(200)
    served.clock.advance(1000)
    served.server.tend()
    served.server.tend()
    assert served.model.forest is forest
    assert served.counters()["failed_fits"] >= 1
    assert "no room" in caplog.text
    assert served.forecasts(question("q")) == ["q"]


def test_a_fit_that_fails_again_and_again_is_not_tried_in_every_pass(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_data: Any) -> None:
        raise ValueError("never")

    monkeypatch.setattr(served.model, "fit_forest", fail)
    served.teach(100)
    for _ in range(200):
        served.server.tend()
        served.clock.advance(0.01)
    assert served.counters()["failed_fits"] <= 10


def test_before_serving_the_first_forest_is_fitted_at_once(served: Served) -> None:
    served.teach(30)
    served.server.fit_now()
    assert served.model.forest is None
    served.teach(30)
    served.server.fit_now()
    assert served.model.forest is not None


@pytest.mark.parametrize("error", [ValueError("bad"), ZeroDivisionError(), np.linalg.LinAlgError()])
def test_a_first_fit_that_fails_leaves_the_history_to_forecast(
    served: Served,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    def fail(_data: Any) -> None:
        raise error

    served.teach(100)
    monkeypatch.setattr(served.model, "fit_forest", fail)
    served.model.forest = None
    served.server.fit_now()
    assert served.counters()["failed_fits"] == 1
    assert len(caplog.records) == 1
    assert served.forecasts(question("q")) == ["q"]


def test_fits_leave_most_of_the_time_to_others(served: Served, desk: Desk) -> None:
    desk.holds = True
    served.teach(100)
    served.server.tend()
    served.clock.advance(2.0)
    desk.work()
    served.server.tend()
    served.teach(300)
    served.clock.advance(10.0)
    served.server.tend()
    assert desk.held == []
    served.clock.advance(11.0)
    served.server.tend()
    assert len(desk.held) == 1


# Saving -------------------------------------------------------------------------------------------


def learnt_on_disk(folder: Path) -> int:
    """What a predictor that starts now would know."""
    store = CheckpointStore(folder, "predictor", version=FORMAT_VERSION)
    try:
        model, source = restored_model(
            lambda: LengthModel(parameters=PARAMETERS, capacity=500), store
        )
    finally:
        store.close()
    return model.reservoir.num_added if source == "checkpoint" else -1


def full_disk(_payload: bytes) -> None:
    raise OSError(28, "No space left on device")


def test_what_was_learnt_is_saved_when_it_is_time(saving: Served, tmp_path: Path) -> None:
    saving.teach(70)
    saving.server.tend()
    assert list(tmp_path.glob("*.checkpoint")) == []
    saving.clock.advance(61)
    saving.server.tend()
    assert len(list(tmp_path.glob("*.checkpoint"))) == 1
    assert learnt_on_disk(tmp_path) == 70
    saving.server.tend()
    assert saving.counters()["checkpoints"] == 1


def test_nothing_is_saved_while_nothing_was_learnt(saving: Served, tmp_path: Path) -> None:
    for _ in range(10):
        saving.clock.advance(100)
        saving.server.tend()
    saving.server.close()
    assert list(tmp_path.glob("*.checkpoint")) == []


def test_what_was_learnt_is_saved_at_the_end(saving: Served, tmp_path: Path) -> None:
    saving.teach(30)
    saving.server.close()
    assert learnt_on_disk(tmp_path) == 30


def test_what_is_still_to_be_learnt_is_learnt_and_saved_at_the_end(
    saving: Served, tmp_path: Path
) -> None:
    names = [f"r{n}" for n in range(300)]
    saving.forecasts(*map(question, names))
    saving.server.handle([(A, Ended(tuple(Ending(name, 5, is_cut=False) for name in names)))])
    saving.server.close()
    assert learnt_on_disk(tmp_path) == 300


def test_what_was_learnt_after_the_last_save_is_saved_at_the_end(
    saving: Served, tmp_path: Path
) -> None:
    saving.teach(30)
    saving.clock.advance(61)
    saving.server.tend()
    saving.teach(12)
    saving.server.close()
    assert learnt_on_disk(tmp_path) == 42


def test_a_start_from_a_checkpoint_forecasts_as_before(saving: Served, tmp_path: Path) -> None:
    saving.teach(300, tokens=1234)
    saving.server.tend()
    saving.server.tend()
    saving.server.close()
    before = saving.say(Ask((question("q"),), -1))
    assert saving.store is not None
    saving.store.close()
    store = CheckpointStore(tmp_path, "predictor", version=FORMAT_VERSION)
    model, source = restored_model(lambda: LengthModel(parameters=PARAMETERS, capacity=500), store)
    store.close()
    assert source == "checkpoint"
    after = Served(model=model).say(Ask((question("q"),), -1))
    assert [m for m in after if isinstance(m, Forecasts)] == [
        m for m in before if isinstance(m, Forecasts)
    ]


def test_a_full_disk_is_told_once_and_learning_goes_on(
    saving: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert saving.store is not None
    with monkeypatch.context() as broken:
        broken.setattr(saving.store, "save", full_disk)
        for _ in range(5):
            saving.teach(10)
            saving.clock.advance(61)
            saving.server.tend()
            saving.server.tend()
    assert saving.counters()["failed_checkpoints"] == 5
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "space" in caplog.text
    saving.teach(10)
    saving.clock.advance(61)
    saving.server.tend()
    saving.server.tend()
    assert saving.counters()["checkpoints"] == 1
    assert saving.counters()["learnt"] == 60


def test_what_a_full_disk_did_not_take_is_saved_when_there_is_room(
    saving: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert saving.store is not None
    saving.teach(10)
    saving.clock.advance(61)
    with monkeypatch.context() as broken:
        broken.setattr(saving.store, "save", full_disk)
        saving.server.tend()
        saving.server.tend()
    # Nothing new has been learnt since: what was learnt is still not on the disk.
    saving.clock.advance(61)
    saving.server.tend()
    saving.server.close()
    assert learnt_on_disk(tmp_path) == 10


def test_a_slow_disk_is_not_asked_twice_at_once(saving: Served, desk: Desk, tmp_path: Path) -> None:
    desk.holds = True
    for _ in range(5):
        saving.teach(5)
        saving.clock.advance(61)
        saving.server.tend()
    assert len(desk.held) == 1
    desk.work()
    saving.server.tend()
    assert saving.counters()["checkpoints"] == 1
    # What has been learnt meanwhile is in the next one.
    saving.clock.advance(61)
    saving.server.tend()
    desk.work()
    assert learnt_on_disk(tmp_path) == 25


def test_at_the_end_it_is_saved_here_and_now_though_a_fit_runs(
    saving: Served, desk: Desk, tmp_path: Path
) -> None:
    desk.holds = True
    saving.teach(100)
    saving.server.tend()
    assert len(desk.held) == 1
    saving.server.close()
    assert len(desk.held) == 1
    assert learnt_on_disk(tmp_path) == 100


def test_at_the_end_it_is_saved_here_and_now_though_a_save_hangs(
    saving: Served, desk: Desk, tmp_path: Path
) -> None:
    desk.holds = True
    saving.teach(20)
    saving.clock.advance(61)
    saving.server.tend()
    assert len(desk.held) == 1
    saving.server.close()
    assert learnt_on_disk(tmp_path) == 20


def test_what_the_last_save_could_not_write_is_saved_at_the_end(
    saving: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert saving.store is not None
    saving.teach(20)
    saving.clock.advance(61)
    with monkeypatch.context() as broken:
        broken.setattr(saving.store, "save", full_disk)
        saving.server.tend()
    # Nobody has looked at what became of it.
    saving.server.close()
    assert learnt_on_disk(tmp_path) == 20


def test_what_is_on_the_disk_already_is_not_saved_again_at_the_end(
    saving: Served, tmp_path: Path
) -> None:
    saving.teach(20)
    saving.clock.advance(61)
    saving.server.tend()
    saving.server.tend()
    saving.server.close()
    assert len(list(tmp_path.glob("*.checkpoint"))) == 1


def test_a_full_disk_at_the_end_is_told_and_no_crash(
    saving: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert saving.store is not None
    saving.teach(20)
    monkeypatch.setattr(saving.store, "save", full_disk)
    saving.server.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "space" in caplog.text


def test_without_a_folder_nothing_is_kept_and_nothing_fails(served: Served) -> None:
    served.teach(10)
    served.clock.advance(1000)
    served.server.tend()
    served.server.close()
    assert served.counters().get("failed_checkpoints", 0) == 0


# Whatever comes -----------------------------------------------------------------------------------

NUMBERS = st.integers(-(1 << 63), (1 << 64) - 1) | st.integers(0, 100)
QUESTIONS = st.builds(
    Question,
    st.sampled_from(["a", "b", ""]) | st.text(max_size=5),
    NUMBERS,
    NUMBERS,
    NUMBERS,
    st.just(ROW_BYTES)
    | st.binary(max_size=20)
    | st.builds(with_feature, st.integers(0, NUM_FEATURES - 1), st.floats(width=32)),
    st.lists(NUMBERS, max_size=5).map(tuple),
)
LOOKS = st.lists(st.just(b"\x00" * 4 * NUM_PROGRESS) | st.binary(max_size=50), max_size=7)
ENDINGS = st.builds(
    Ending, st.sampled_from(["a", "b", "c"]), NUMBERS, st.booleans(), LOOKS.map(tuple)
)
MESSAGES = (
    st.just(Hello())
    | st.just(AskStatus())
    | st.builds(Ask, st.lists(QUESTIONS, max_size=4).map(tuple), NUMBERS)
    | st.builds(Ended, st.lists(ENDINGS, max_size=4).map(tuple))
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.sampled_from([A, B, b""]), MESSAGES, st.floats(-1e6, 1e6)), max_size=20)
)
def test_no_messages_in_any_order_bring_it_down(
    events: list[tuple[bytes, Any, float]],
) -> None:
    served = Served()
    for peer, message, seconds in events:
        served.server.handle([(peer, message)])
        served.clock.advance(seconds)
        served.server.tend()
    status = served.server.status()
    server_codec().encode(status)
    assert all(isinstance(count, int) for count in status.counters.values())
    assert served.forecasts(question("last")) == ["last"]


# The loop -----------------------------------------------------------------------------------------


class Channel:
    """Stands in for the socket."""

    def __init__(self, *batches: list[tuple[bytes, Any]]) -> None:
        self.batches = list(batches)
        self.counters = {"garbage": 3, "version": 2, "size": 1, "unsent": 0}
        self.waits: list[float] = []

    def wait(self, timeout_s: float) -> bool:
        self.waits.append(timeout_s)
        return bool(self.batches)

    def receive(self, _limit: int) -> list[tuple[bytes, Any]]:
        return self.batches.pop(0)


def test_the_loop_runs_until_it_is_told_to_end_and_saves_then(
    saving: Served, tmp_path: Path
) -> None:
    channel = Channel(
        [(A, Hello())],
        [(A, Ask((question(),), -1))],
        [(A, Ended((Ending("r", 9, is_cut=False),)))],
    )
    Loop(channel, saving.server, lambda: len(channel.waits) >= 6).run()  # type: ignore[arg-type]
    assert ids([m for _, m in saving.sent]) == ["r"]
    assert max(channel.waits) <= 0.25
    assert learnt_on_disk(tmp_path) == 1


def test_what_the_socket_dropped_is_in_the_status(served: Served) -> None:
    channel = Channel([(A, Hello())])
    Loop(channel, served.server, lambda: bool(channel.waits)).run()  # type: ignore[arg-type]
    counters = served.counters()
    assert (counters["wire_garbage"], counters["wire_version"], counters["wire_size"]) == (3, 2, 1)
