"""Client and server of the predictor with nothing but the codecs between them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from core.clock import ManualClock
from predictor import client as client_module
from predictor.book import LengthBook
from predictor.client import PredictorClient
from predictor.features import FEATURES, NO_CUES, EngineFacts, feature_row
from predictor.forest import ForestParameters
from predictor.model import Asked, LengthModel
from predictor.progress import NUM_PROGRESS
from predictor.protocol import client_codec, server_codec
from predictor.server import PredictorServer
from predictor.tilt import TILTED_BUCKETS

ROW = feature_row(NO_CUES, EngineFacts(50, 500))
LIMIT_COLUMN = FEATURES.index("log_max_tokens")


class Line:
    """Stands in for both channels: what is sent is at the other end at once."""

    made: list[Line]

    def __init__(self, _address: str, _codec: Any) -> None:
        self.model = LengthModel(parameters=ForestParameters(num_trees=4), capacity=500)
        self.taught: list[tuple[Asked, int, bool]] = []
        self.server = PredictorServer(self.model, self.answer, ManualClock(), session=1)
        self.frames: list[bytes] = []
        self.counters: Counter[str] = Counter()
        Line.made.append(self)
        learn = self.model.learn

        def note(asked: Asked, tokens: int, *, is_cut: bool, **more: Any) -> None:
            self.taught.append((asked, tokens, is_cut))
            learn(asked, tokens, is_cut=is_cut, **more)

        self.model.learn = note  # type: ignore[method-assign]

    def answer(self, _peer: bytes, message: Any) -> bool:
        self.frames.append(server_codec().encode(message))
        return True

    def send(self, message: Any) -> bool:
        self.server.handle([(b"c", server_codec().decode(client_codec().encode(message)))])
        return True

    def receive(self, limit: int) -> list[Any]:
        found, self.frames = self.frames[:limit], self.frames[limit:]
        return [client_codec().decode(frame) for frame in found]

    def close(self) -> None:
        pass


class Pair:
    """A client, the server that it talks to, and the forecasts that have come."""

    def __init__(self) -> None:
        self.client = PredictorClient("ipc:///nowhere", ManualClock(), model="m")
        self.line = Line.made[-1]
        self.book = LengthBook()

    def poll(self) -> None:
        """Until there is nothing more to say on either side."""
        while True:
            news = self.client.poll()
            if news.factors is not None:
                self.book.calibrate(news.factors, news.tilts)
            for request_id, points in news.forecasts:
                self.book.enter(request_id, points)
            self.line.server.tend()
            if not self.line.frames and not self.line.server.is_behind:
                return

    def counters(self) -> dict[str, int]:
        return self.line.server.status().counters


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Pair:
    Line.made = []
    monkeypatch.setattr(client_module, "DealerChannel", Line)
    return Pair()


@pytest.mark.parametrize(
    "name", ["r", "", "\x00", "\ud800", "x" * 10_000, "é" * 64], ids=lambda name: ascii(name)[:12]
)
def test_a_request_of_any_id_is_forecast_and_learnt(pair: Pair, name: str) -> None:
    pair.client.ask(name, ROW, tenant=name, node=name)
    pair.poll()
    assert name in pair.book
    pair.client.ended(name, 70, is_cut=False)
    pair.poll()
    assert [(tokens, is_cut) for _, tokens, is_cut in pair.line.taught] == [(70, False)]
    assert pair.counters()["learnt"] == 1
    assert pair.counters()["pending"] == 0


def test_a_reused_id_never_teaches_the_wrong_length(pair: Pair) -> None:
    rng = np.random.default_rng(0)
    expected: list[tuple[float, int]] = []
    for number in range(300):
        # What is asked about is known again by its features.
        row = ROW.copy()
        row[0] = number
        pair.client.ask("same", row)
        if rng.random() < 0.7:
            pair.poll()
        # Some are over, some are forgotten, some are still open when their id is used again.
        match int(rng.integers(3)):
            case 0:
                pair.client.ended("same", 1000 + number, is_cut=False)
                expected.append((number, 1000 + number))
            case 1:
                pair.client.forget("same")
            case _:
                pass
        if rng.random() < 0.7:
            pair.poll()
    pair.client.forget("same")
    pair.poll()
    taught = [
        (float(asked.request.features[0]), n) for asked, n, cut in pair.line.taught if not cut
    ]
    assert len(taught) > 30
    assert set(taught) <= set(expected)
    assert all(tokens == 0 for _, tokens, is_cut in pair.line.taught if is_cut)
    assert pair.counters()["pending"] == 0
    assert pair.counters()["learnt"] == len(taught)


def test_a_limit_of_tokens_beyond_all_measure_harms_neither_side(pair: Pair) -> None:
    looks = [np.ones(NUM_PROGRESS, dtype=np.float32)] * TILTED_BUCKETS
    for number, value in enumerate((800.0, 1e6, -1e6, 3e38, float("inf"), float("nan"))):
        row = ROW.copy()
        row[LIMIT_COLUMN] = value
        pair.client.ask(f"r{number}", row)
        pair.client.ask(f"good{number}", ROW)
        pair.poll()
        assert f"good{number}" in pair.book
        pair.client.ended(f"r{number}", 5000, is_cut=False, progress=looks)
        pair.client.ended(f"good{number}", 5000, is_cut=False, progress=looks)
        pair.poll()
    assert pair.counters()["endings"] == 9
    assert pair.counters()["bad_questions"] >= 3
    assert np.isfinite(pair.line.model.calibrator.factors).all()


def test_answers_cut_after_one_token_change_no_forecast(pair: Pair) -> None:
    pair.client.ask("before", ROW)
    pair.poll()
    for number in range(500):
        pair.client.ask(f"r{number}", ROW)
        pair.poll()
        pair.client.ended(f"r{number}", 1, is_cut=True)
    pair.client.ask("after", ROW)
    pair.poll()
    before, after = pair.book.refine("before", 0), pair.book.refine("after", 0)
    assert before is not None
    assert after is not None
    assert after.tolist() == before.tolist()
    assert pair.counters()["cut_endings"] == 500
    assert pair.counters()["learnt"] == 0


def test_a_thousand_questions_at_once_are_answered_a_message_at_a_time(pair: Pair) -> None:
    for number in range(1000):
        pair.client.ask(f"r{number}", ROW)
    pair.poll()
    assert len(pair.book) == 1000
    assert pair.client.counters()["unanswered"] == 0
