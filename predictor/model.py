"""The length model: history, words and forest make a forecast; finished answers teach them.

The forest's target is the deviation of an answer's log length from what the history of its
model, tenant and node says. A model whose answers become longer as a whole is followed by
the history at once, and what the trees know of prompts holds for models they have not seen.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist

import msgspec
import numpy as np
import numpy.typing as npt

from predictor.calibration import Calibrator
from predictor.distribution import (
    MAX_TOKENS,
    NUM_POINTS,
    POINT_LEVELS,
    Floats,
    Points,
)
from predictor.features import FEATURES, NUM_FEATURES, Row
from predictor.forest import Forest, ForestParameters, Rows, fit
from predictor.history import HISTORY_FEATURES, History
from predictor.reservoir import CAPACITY, Reservoir
from predictor.tilt import TiltLearner
from predictor.words import WordScores

COLUMNS: tuple[str, ...] = (
    *FEATURES,
    *HISTORY_FEATURES,
    "word_score",
    "day_sine",
    "day_cosine",
)
NUM_COLUMNS = len(COLUMNS)
_LIMIT_COLUMN = COLUMNS.index("log_max_tokens")
DAY_S = 86_400.0
MAX_LOG_TOKENS = math.log(MAX_TOKENS)
MIN_SHARE_SEEN = 0.1
"""A cut answer is learnt from if at least so many like it were expected to be shorter."""
MIN_FIT_ROWS = 40
MIN_NEW_ROWS = 64
NEW_ROWS_SHARE = 8
"""A new forest is due once an eighth of its training data is new."""


class Request(msgspec.Struct, frozen=True):
    """What is asked about: a feature row and whose request it is (hashes, 0 for none)."""

    features: Row
    model: int = 0
    tenant: int = 0
    node: int = 0
    words: tuple[int, ...] = ()


class Asked(msgspec.Struct, frozen=True):
    """A request as it was when it was forecast: what learning from its end needs.

    Attributes:
        row: (NUM_COLUMNS,) what the forest saw.
        expected: the log length that the history expected.
        points: (NUM_POINTS,) the forecast, before calibration.
    """

    request: Request
    row: Rows
    expected: float
    points: Points


class TrainingData(msgspec.Struct, frozen=True):
    """A copy of the reservoir, to fit a forest on in another thread."""

    rows: Rows
    targets: Floats
    num_added: int


class LengthModel:
    """One learner; not thread-safe but for ``fit_forest`` on its own ``TrainingData``."""

    def __init__(
        self,
        *,
        seed: int = 0,
        quantile: float = 0.9,
        parameters: ForestParameters | None = None,
        capacity: int = CAPACITY,
    ) -> None:
        self._rng = np.random.default_rng(seed)
        self._seed = seed
        self.quantile = quantile
        """Of the bound whose coverage is watched."""
        self._parameters = parameters or ForestParameters()
        self.history = History()
        self.words = WordScores()
        self.reservoir = Reservoir(NUM_COLUMNS, self._rng, capacity)
        self.calibrator = Calibrator()
        self.tilt = TiltLearner()
        self.forest: Forest | None = None
        self._fitted_at = 0

    def forecast(self, requests: Sequence[Request], time_of_day_s: float) -> list[Asked]:
        """The distribution of each request's output tokens."""
        if not requests:
            return []
        angle = 2 * math.pi * (time_of_day_s % DAY_S) / DAY_S
        day = (math.sin(angle), math.cos(angle))
        rows = np.empty((len(requests), NUM_COLUMNS), dtype=np.float32)
        expected = np.empty(len(requests))
        for index, request in enumerate(requests):
            outlook = self.history.outlook(request.model, request.tenant, request.node)
            expected[index] = outlook.expected
            rows[index, :NUM_FEATURES] = request.features
            score = self.words.score(request.words)
            rows[index, NUM_FEATURES:] = (*outlook.features, score, *day)
        deviations = self._deviations(rows)
        logs: Floats = np.clip(expected[:, None] + deviations, 0.0, MAX_LOG_TOKENS)
        points = np.expm1(logs).astype(np.float32)
        return [
            # Copies: a view would keep the arrays of the whole batch.
            Asked(request, rows[index].copy(), float(expected[index]), points[index].copy())
            for index, request in enumerate(requests)
        ]

    def _deviations(self, rows: Rows) -> Floats:
        if self.forest is not None:
            return self.forest.points(rows)
        # Nothing has been fitted: a bell around what the history says.
        return np.broadcast_to(_BELL, (len(rows), NUM_POINTS))

    def learn(
        self, asked: Asked, output_tokens: int, *, is_cut: bool, progress: Points | None = None
    ) -> None:
        """An answer has ended.

        Args:
            is_cut: it would have gone on.
            progress: (n, NUM_PROGRESS) what it looked like at the first n of ``TILT_MARKS``.

        A cut answer's length is not known, only that it is longer. It is learnt with what is to
        come drawn from an exponential of the model's mean residual length, which rests on
        tokens that were seen and never on an earlier draw.
        """
        if output_tokens < 0 or (is_cut and output_tokens == 0):
            return
        request = asked.request
        length = float(output_tokens)
        if is_cut and int((asked.points <= length).sum()) < MIN_SHARE_SEEN * NUM_POINTS:
            # Cut where hardly any answer like it has ended: it says nothing but that.
            self.history.saw(request.model, output_tokens, is_cut=True)
            return
        length = self.whole_length(asked, output_tokens, is_cut=is_cut)
        self.history.saw(request.model, output_tokens, is_cut=is_cut)
        log_length = math.log1p(min(length, MAX_TOKENS))
        deviation = log_length - asked.expected
        tilts = None
        if progress is not None and len(progress):
            limit = math.expm1(min(float(request.features[_LIMIT_COLUMN]), MAX_LOG_TOKENS))
            tilts = self.tilt.learn(asked.points, length, limit, progress)
        version = self.calibrator.version
        self.calibrator.learn(asked.points, length, self.quantile, tilts)
        if self.calibrator.version != version:
            # Published together, under one version.
            self.tilt.refresh()
        self.words.learn(request.words, deviation)
        self.history.learn(request.model, request.tenant, request.node, log_length)
        self.reservoir.add(asked.row, deviation)

    def whole_length(self, asked: Asked, output_tokens: int, *, is_cut: bool) -> float:
        """How long an answer became, or a draw of what a cut one would have become."""
        if not is_cut:
            return float(output_tokens)
        mean = self.history.residual_tokens(asked.request.model, output_tokens)
        return output_tokens + max(float(self._rng.exponential(mean)), 1.0)

    # Fitting.

    def is_fit_due(self) -> bool:
        """Whether enough is new since the last forest."""
        new = self.reservoir.num_added - self._fitted_at
        size = len(self.reservoir)
        if self.forest is None:
            return size >= MIN_FIT_ROWS
        return new >= max(MIN_NEW_ROWS, size // NEW_ROWS_SHARE)

    def training_data(self) -> TrainingData:
        rows, targets = self.reservoir.data()
        return TrainingData(rows, targets, self.reservoir.num_added)

    def fit_forest(self, data: TrainingData) -> Forest:
        """A forest for ``adopt``; touches nothing of this object that changes."""
        return fit(
            data.rows, data.targets, self._parameters, (self._seed + data.num_added) % (1 << 32)
        )

    def adopt(self, forest: Forest, data: TrainingData) -> None:
        """Forecast with this forest from now on."""
        self.forest = forest
        self._fitted_at = data.num_added

    def refit(self) -> None:
        """Fit and adopt, here and now."""
        data = self.training_data()
        self.adopt(self.fit_forest(data), data)

    @property
    def fitted_at(self) -> int:
        """Real answers that had been learnt when the forest in use was fitted."""
        return self._fitted_at

    # State.

    def state(self) -> dict[str, npt.NDArray[np.generic]]:
        """Everything learnt, as named arrays."""
        parts = {
            "history": self.history.state(),
            "words": self.words.state(),
            "reservoir": self.reservoir.state(),
            "calibration": self.calibrator.state(),
            "tilt": self.tilt.state(),
        }
        arrays = {f"{part}.{name}": a for part, named in parts.items() for name, a in named.items()}
        arrays["prior_mean"] = np.array([self.history.prior_mean])
        return arrays

    def restore(self, arrays: dict[str, npt.NDArray[np.generic]]) -> None:
        """Go on from ``state``; the forest is fitted anew or adopted by the caller.

        Raises:
            ValueError: the arrays are not those of a length model; nothing may be relied on then.
        """
        try:
            for part, target in (
                ("history", self.history),
                ("words", self.words),
                ("reservoir", self.reservoir),
                ("calibration", self.calibrator),
                ("tilt", self.tilt),
            ):
                prefix = part + "."
                named = {k[len(prefix) :]: a for k, a in arrays.items() if k.startswith(prefix)}
                target.restore(named)
            prior_mean = float(arrays["prior_mean"].astype(np.float64)[0])
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"not the state of a length model: {error!r}") from error
        if not math.isfinite(prior_mean):
            raise ValueError("the prior mean is not a number")
        self.history.prior_mean = prior_mean


def _bell() -> Floats:
    """Deviations of a log-normal length with a spread of one, at ``POINT_LEVELS``."""
    normal = NormalDist()
    return np.array([normal.inv_cdf(level) for level in POINT_LEVELS.tolist()])


_BELL = _bell()
