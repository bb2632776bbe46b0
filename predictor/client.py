"""The serving side of the predictor: asks, listens, and never waits.

Every call returns at once. A question that finds no predictor stays on a list and is asked
again; until an answer comes the scheduler works from its fallback.
"""

import logging
from collections.abc import Sequence
from itertools import islice
from typing import assert_never

import msgspec
import numpy as np

from core.channel import DealerChannel
from core.clock import Clock
from core.names import name_hash
from core.presence import Presence
from core.probe import ChannelProbe
from predictor.calibration import MAX_FACTOR, NUM_BUCKETS, Factors
from predictor.distribution import NUM_LEVELS, Points
from predictor.features import Row
from predictor.progress import NUM_PROGRESS
from predictor.protocol import (
    MAX_BATCH,
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
    client_codec,
    floats_of,
    points_of,
)
from predictor.tilt import MAX_WEIGHT, TILTED_BUCKETS, Tilts

logger = logging.getLogger(__name__)

ASK_AGAIN_AFTER_S = 3.0
MESSAGES_PER_POLL = 64
"""Most messages taken in by one call, and one with forecasts: the next call takes the next."""
MAX_ENDINGS = 4096
"""Endings kept while nobody takes them; the oldest are lost first."""


class News(msgspec.Struct, frozen=True):
    """What has come in since the last call.

    Attributes:
        forecasts: request ids with their points, shape (NUM_POINTS,).
        factors: the newest calibration, or None where it has not changed.
        tilts: what came with it.
    """

    forecasts: tuple[tuple[str, Points], ...] = ()
    factors: Factors | None = None
    tilts: Tilts | None = None


NO_NEWS = News()


class _Open:
    """A live request and when it was asked about."""

    __slots__ = ("asked_s", "is_answered", "question")

    def __init__(self, question: Question) -> None:
        self.question = question
        self.asked_s: float | None = None
        self.is_answered = False


class PredictorClient:
    """One scheduler process's connection to the predictor.

    Args:
        address: ``ipc://PATH`` or ``tcp://HOST:PORT``; ValueError where it is neither.
        model: the name under which answers of this model are learnt together.
    """

    def __init__(self, address: str, clock: Clock, *, model: str) -> None:
        self._channel: DealerChannel[ToPredictor, FromPredictor] = DealerChannel(
            address, client_codec()
        )
        self._clock = clock
        self._model_name = model
        self._model = name_hash(model)
        self._open: dict[str, _Open] = {}
        self._id_of: dict[str, str] = {}
        """Ids of open requests by the number under which they are asked about."""
        self._serial = 0
        self._to_ask: dict[str, None] = {}
        self._endings: list[Ending] = []
        self._session: int | None = None
        self._calibration_version = -1
        self._presence = Presence(
            clock,
            logger,
            "predictor_silent seconds=%.0f: forecasts that are here stay in use, "
            "new requests go by the lengths of their class",
        )
        self.num_bad = 0
        """Answers that were messages of the protocol but made no sense."""

    def ask(
        self,
        request_id: str,
        features: Row,
        *,
        tenant: str = "",
        node: str = "",
        words: Sequence[int] = (),
    ) -> None:
        """Note a new request; ``poll`` sends it, under a number of our own."""
        self._serial += 1
        question = Question(
            str(self._serial),
            self._model,
            name_hash(self._model_name, tenant),
            name_hash(self._model_name, tenant, node),
            features.astype("<f4").tobytes(),
            tuple(words),
        )
        self.forget(request_id)
        self._open[request_id] = _Open(question)
        self._id_of[question.request_id] = request_id
        self._to_ask[request_id] = None

    def ended(
        self, request_id: str, output_tokens: int, *, is_cut: bool, progress: Sequence[Row] = ()
    ) -> None:
        """A request is over.

        Args:
            is_cut: its answer would have gone on.
            progress: what it looked like at the first of ``TILT_MARKS``.
        """
        opened = self._open.pop(request_id, None)
        self._to_ask.pop(request_id, None)
        if opened is None:
            return
        self._id_of.pop(opened.question.request_id, None)
        if opened.asked_s is None:
            # What was not asked cannot be learnt from: nobody knows what it looked like.
            return
        rows = tuple(row.astype("<f4").tobytes() for row in progress)
        self._endings.append(Ending(opened.question.request_id, output_tokens, is_cut, rows))
        del self._endings[:-MAX_ENDINGS]

    def forget(self, request_id: str) -> None:
        """A request is over and nothing is to be learnt from it."""
        self.ended(request_id, 0, is_cut=True)

    def poll(self) -> News:
        """Send what is to be sent and take in what has come. Call it in every pass."""
        now_s = self._clock.now_s()
        if self._presence.is_hello_due(now_s):
            self._channel.send(Hello())
            self._ask_again(now_s)
        if self._to_ask:
            self._send_questions(now_s)
        if self._endings:
            self._send_endings()
        messages = self._received()
        if not messages:
            self._presence.not_heard(now_s)
            return NO_NEWS
        self._presence.heard(now_s)
        return self._take(messages)

    def is_alive(self) -> bool:
        """Whether the predictor was heard in the last seconds."""
        return self._presence.is_alive()

    def counters(self) -> dict[str, int]:
        """Counts since the start, for whoever watches."""
        return {
            **self._channel.counters,
            "bad": self.num_bad,
            "open": len(self._open),
            "unanswered": sum(not item.is_answered for item in self._open.values()),
        }

    def wait(self, timeout_s: float) -> bool:
        """Whether a message is here within ``timeout_s``; for tests and tools, never in a frame."""
        return self._channel.wait(timeout_s)

    def close(self) -> None:
        self._channel.close()

    def _send_questions(self, now_s: float) -> None:
        while self._to_ask:
            batch = list(islice(self._to_ask, MAX_BATCH))
            questions = tuple(self._open[request_id].question for request_id in batch)
            if not self._channel.send(Ask(questions, self._calibration_version)):
                return
            for request_id in batch:
                self._open[request_id].asked_s = now_s
                del self._to_ask[request_id]

    def _send_endings(self) -> None:
        while self._endings:
            batch = tuple(self._endings[:MAX_BATCH])
            if not self._channel.send(Ended(batch)):
                return
            del self._endings[: len(batch)]

    def _ask_again(self, now_s: float) -> None:
        """Questions whose answer has been lost on the way."""
        for request_id, item in self._open.items():
            if len(self._to_ask) >= MAX_BATCH:
                break
            # Either way: a clock may have jumped back.
            is_late = item.asked_s is None or abs(now_s - item.asked_s) > ASK_AGAIN_AFTER_S
            if not item.is_answered and is_late:
                self._to_ask[request_id] = None

    def _received(self) -> list[FromPredictor]:
        """What is here, but no more forecasts than a pass may take in."""
        messages: list[FromPredictor] = []
        for _ in range(MESSAGES_PER_POLL):
            found = self._channel.receive(1)
            messages += found
            if not found or isinstance(found[0], Forecasts):
                break
        return messages

    def _take(self, messages: list[FromPredictor]) -> News:
        forecasts: list[tuple[str, Points]] = []
        factors: Factors | None = None
        tilts: Tilts | None = None
        for message in messages:
            match message:
                case Ready(session=session):
                    self._greet(session)
                case Forecasts(forecasts=items):
                    forecasts += self._believable(items)
                case CalibrationUpdate():
                    newer = self._factors(message)
                    if newer is not None:
                        factors, tilts = newer
                case Status():
                    pass
                case _:
                    assert_never(message)
        return News(tuple(forecasts), factors, tilts)

    def _greet(self, session: int) -> None:
        before, self._session = self._session, session
        if before is None or before == session:
            return
        logger.info("predictor_restarted open_requests=%d", len(self._open))
        self._calibration_version = -1
        for request_id, item in self._open.items():
            # It has forgotten them: without being asked again it could not learn from their end.
            item.is_answered = False
            self._to_ask[request_id] = None

    def _believable(self, items: Sequence[Forecast]) -> list[tuple[str, Points]]:
        found = []
        for item in items:
            request_id = self._id_of.get(item.request_id)
            opened = None if request_id is None else self._open.get(request_id)
            if request_id is None or opened is None:
                continue
            try:
                points = points_of(item)
            except ValueError:
                self.num_bad += 1
                continue
            opened.is_answered = True
            found.append((request_id, points))
        return found

    def _factors(self, message: CalibrationUpdate) -> tuple[Factors, Tilts] | None:
        try:
            factors = floats_of(message.factors, NUM_BUCKETS * NUM_LEVELS)
            tilts = floats_of(message.tilts, TILTED_BUCKETS * (NUM_PROGRESS + 1))
        except ValueError:
            self.num_bad += 1
            return None
        # A little room for rounding; what is far outside no predictor of ours has sent.
        most = 1.01 * MAX_FACTOR
        is_sane = (factors >= 1 / most).all() and (factors <= most).all()
        if not (is_sane and (np.abs(tilts) <= MAX_WEIGHT).all()):
            self.num_bad += 1
            return None
        self._calibration_version = message.version
        return (
            np.reshape(factors, (NUM_BUCKETS, NUM_LEVELS)),
            np.reshape(tilts, (TILTED_BUCKETS, NUM_PROGRESS + 1)),
        )


class PredictorProbe(ChannelProbe[ToPredictor, FromPredictor, Status]):
    """What the launcher listens through: whether the predictor answers at all."""

    def __init__(self, address: str) -> None:
        super().__init__(address, client_codec(), Hello(), AskStatus(), Status)
