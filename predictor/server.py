"""The predictor process: one loop that answers, learns, fits in the background and saves.

``python -m predictor --address ipc:///run/jitserve/predictor --state-dir DIR``. Whatever
comes over the socket is decoded into known messages or dropped with a count.
"""

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import assert_never

import numpy as np

from core.background import Job
from core.checkpoint import CheckpointStore
from core.clock import Clock
from core.keeper import Keeper
from predictor import state
from predictor.distribution import Points
from predictor.features import WORD_BUCKETS
from predictor.forest import Forest
from predictor.model import Asked, LengthModel, Request, TrainingData
from predictor.progress import MAX_PROGRESS, NUM_PROGRESS
from predictor.protocol import (
    MAX_ANSWERS,
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
)
from predictor.tilt import TILTED_BUCKETS

logger = logging.getLogger(__name__)

MAX_PENDING = 20_000
"""Requests that were forecast and have not ended; the oldest are forgotten first."""
MAX_PEERS = 1024
MAX_WORDS = 64
ENDINGS_PER_PASS = 8
"""Learning waits behind answering: a question must not queue behind many of these."""
MAX_BACKLOG = 50_000
FAILED_FIT_PAUSE_S = 60.0
FIT_SHARE = 10.0
"""After a fit at least so many times its duration passes before the next one."""
MAX_OUTPUT_TOKENS = 1 << 30

Send = Callable[[bytes, FromPredictor], bool]


class PredictorServer:
    """Everything but the socket: messages in, messages out through ``send``.

    Args:
        session: differs from that of every other start, so that clients notice.
        store: where checkpoints go; None keeps nothing.
        time_of_day_s: the wall clock, a feature of requests.
    """

    def __init__(
        self,
        model: LengthModel,
        send: Send,
        clock: Clock,
        *,
        session: int,
        store: CheckpointStore | None = None,
        checkpoint_every_s: float = 60.0,
        time_of_day_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._model = model
        self._send = send
        self._clock = clock
        self._session = session
        self._time_of_day_s = time_of_day_s
        self._pending: OrderedDict[tuple[bytes, str], Asked] = OrderedDict()
        self._calibration_of: OrderedDict[bytes, int] = OrderedDict()
        """The calibration version that each peer has been told; a peer in here was greeted."""
        self._backlog: deque[tuple[bytes, Ending]] = deque(maxlen=MAX_BACKLOG)
        self.counters: Counter[str] = Counter()
        self._fitting: tuple[Job[Forest], TrainingData, float] | None = None
        self._next_fit_s = -float("inf")
        self._keeper = Keeper(
            store,
            lambda: state.encode(model),
            lambda: model.reservoir.num_added,
            clock,
            checkpoint_every_s,
            self.counters,
        )

    # Messages.

    def handle(self, messages: list[tuple[bytes, ToPredictor]]) -> None:
        """Answer and learn; questions of one pass are forecast together."""
        questions: list[tuple[bytes, Question]] = []
        for peer, message in messages:
            if peer not in self._calibration_of:
                self._greet(peer)
            match message:
                case Hello():
                    self._send(peer, Ready(self._session))
                case Ask():
                    self._calibration_of[peer] = message.calibration_version
                    questions += [(peer, question) for question in message.questions]
                case Ended():
                    self._backlog.extend((peer, ending) for ending in message.endings)
                case AskStatus():
                    self._send(peer, self.status())
                case _:
                    assert_never(message)
        for start in range(0, len(questions), MAX_BATCH):
            self._answer(questions[start : start + MAX_BATCH])

    def status(self) -> Status:
        """Liveness and counts."""
        model = self._model
        counts = {
            **self.counters,
            "pending": len(self._pending),
            "backlog": len(self._backlog),
            "learnt": model.reservoir.num_added,
            "rows": len(model.reservoir),
            "prior_rows": model.reservoir.num_prior,
            "fitted_at": model.fitted_at,
            "calibration": model.calibrator.version,
        }
        return Status(self._session, counts, model.calibrator.coverage())

    def _greet(self, peer: bytes) -> None:
        self._calibration_of[peer] = -1
        while len(self._calibration_of) > MAX_PEERS:
            self._calibration_of.popitem(last=False)
        self._send(peer, Ready(self._session))

    def _answer(self, questions: list[tuple[bytes, Question]]) -> None:
        good: list[tuple[bytes, Question, Request]] = []
        for peer, question in questions:
            try:
                good.append((peer, question, _request_of(question)))
            except ValueError:
                self.counters["bad_questions"] += 1
        asked = self._model.forecast([item[2] for item in good], self._time_of_day_s())
        answers: dict[bytes, list[Forecast]] = {}
        for (peer, question, _), one in zip(good, asked, strict=True):
            key = (peer, question.request_id)
            self._pending[key] = one
            self._pending.move_to_end(key)
            forecast = Forecast(question.request_id, one.points.astype("<f4").tobytes())
            answers.setdefault(peer, []).append(forecast)
        while len(self._pending) > MAX_PENDING:
            self._pending.popitem(last=False)
            self.counters["forgotten"] += 1
        self.counters["forecasts"] += len(good)
        for peer, forecasts in answers.items():
            self._send_calibration(peer)
            for start in range(0, len(forecasts), MAX_ANSWERS):
                self._send(peer, Forecasts(tuple(forecasts[start : start + MAX_ANSWERS])))

    def _send_calibration(self, peer: bytes) -> None:
        calibrator = self._model.calibrator
        if self._calibration_of.get(peer) != calibrator.version:
            factors = calibrator.factors.astype("<f4").tobytes()
            tilts = self._model.tilt.tilts.astype("<f4").tobytes()
            if self._send(peer, CalibrationUpdate(calibrator.version, factors, tilts)):
                self._calibration_of[peer] = calibrator.version

    def _learn(self, peer: bytes, ending: Ending) -> None:
        asked = self._pending.pop((peer, ending.request_id), None)
        if asked is None:
            self.counters["unknown_endings"] += 1
        elif not 0 <= ending.output_tokens <= MAX_OUTPUT_TOKENS:
            self.counters["bad_endings"] += 1
        else:
            try:
                progress = _progress_of(ending)
            except ValueError:
                self.counters["bad_endings"] += 1
                return
            try:
                self._model.learn(
                    asked, ending.output_tokens, is_cut=ending.is_cut, progress=progress
                )
            except (ValueError, ArithmeticError) as error:
                # One answer that cannot be learnt from must not end the process.
                self.counters["failed_learning"] += 1
                logger.warning("learning_failed error=%r", error)
                return
            self.counters["cut_endings" if ending.is_cut else "endings"] += 1

    # Work beside the messages.

    @property
    def is_behind(self) -> bool:
        """Whether there are endings to learn from."""
        return bool(self._backlog)

    def tend(self) -> None:
        """Learn a little, fit and save where it is time to; call it in every pass."""
        for _ in range(min(ENDINGS_PER_PASS, len(self._backlog))):
            self._learn(*self._backlog.popleft())
        self._tend_forest(self._clock.now_s())
        self._keeper.tend()

    def fit_now(self) -> None:
        """Fit before serving: the first forest. Without it the history forecasts alone."""
        if not self._model.is_fit_due():
            return
        try:
            self._model.refit()
        except (ValueError, ArithmeticError) as error:
            self.counters["failed_fits"] += 1
            logger.error("forest_fit_failed error=%r: the history forecasts alone", error)

    def close(self) -> None:
        """Save what has been learnt, here and now: a fit that runs is given up."""
        while self._backlog:
            self._learn(*self._backlog.popleft())
        self._keeper.close()

    def _tend_forest(self, now_s: float) -> None:
        if self._fitting is not None:
            job, data, started_s = self._fitting
            if not job.is_done():
                return
            self._fitting = None
            self._next_fit_s = now_s + FIT_SHARE * max(now_s - started_s, 0.0)
            try:
                self._model.adopt(job.result(), data)
            except Exception as error:
                # Whatever is wrong with the data, the forest before still answers.
                self._next_fit_s = max(self._next_fit_s, now_s + FAILED_FIT_PAUSE_S)
                self.counters["failed_fits"] += 1
                logger.error("forest_fit_failed error=%r: the forest before stays", error)
                return
            self.counters["fits"] += 1
        elif now_s >= self._next_fit_s and self._model.is_fit_due():
            data = self._model.training_data()
            model = self._model
            self._fitting = (Job(lambda: model.fit_forest(data)), data, now_s)


def _request_of(question: Question) -> Request:
    """Raises ValueError for what no client of ours sends."""
    is_sane = (
        0 < len(question.request_id) <= MAX_ID_CHARS
        and all(0 <= name < 1 << 63 for name in (question.model, question.tenant, question.node))
        and len(question.words) <= MAX_WORDS
        and (not question.words or 0 <= min(question.words) <= max(question.words) < WORD_BUCKETS)
    )
    if not is_sane:
        raise ValueError("not a question")
    return Request(
        features_of(question), question.model, question.tenant, question.node, question.words
    )


def _progress_of(ending: Ending) -> Points:
    """(n, NUM_PROGRESS). Raises ValueError for what no client of ours sends."""
    if len(ending.progress) > TILTED_BUCKETS:
        raise ValueError("too much progress")
    rows = [floats_of(row, NUM_PROGRESS) for row in ending.progress]
    progress = np.array(rows, dtype=np.float32).reshape(-1, NUM_PROGRESS)
    if (np.abs(progress) > MAX_PROGRESS).any():
        raise ValueError("progress is out of range")
    return progress


def restored_model(
    make: Callable[[], LengthModel], store: CheckpointStore | None
) -> tuple[LengthModel, str]:
    """A model that knows what is known: the newest good checkpoint, else the shipped prior.

    Returns:
        The model, and where it is from: ``checkpoint``, ``prior`` or ``nothing``.
    """

    def restored(data: bytes) -> LengthModel:
        # A model of its own for each try: a bad state may have been half read.
        model = make()
        state.decode_into(data, model)
        return model

    model = None if store is None else store.newest(restored)
    if model is not None:
        return model, "checkpoint"
    model = make()
    try:
        state.start_from_prior(model, state.decode_prior(state.PRIOR_PATH.read_bytes()))
    except (OSError, ValueError) as error:
        logger.warning("prior_unusable path=%s error=%s", state.PRIOR_PATH, error)
        return make(), "nothing"
    return model, "prior"
