"""How long answers will be: equal-mass points of each request's length distribution.

A forecast is ``NUM_POINTS`` ascending points of equal mass. Given g tokens generated so far
it is truncated to L > g, which is all that refinement needs to be (paper, section Request
Analyzer; ``docs/metrics.md`` has the formulas). Until a forecaster says otherwise the points
are those of the last finished answers of the request's class.
"""

import enum
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from scheduler.request import Request
from scheduler.table import NUM_POINTS, Bools, Floats, Ints, Points, RequestTable, Rows, clip

PRIOR_TOKENS = 512.0
"""Before any answer has finished, lengths are taken to be uniform up to this."""
_MAX_POINT = 1e9
_MIDDLES = (np.arange(NUM_POINTS) + 0.5) / NUM_POINTS
_ONES = np.ones(NUM_POINTS, dtype=np.float32)


class Information(enum.StrEnum):
    """What a policy may know of lengths."""

    FORECAST = "forecast"
    KNOWN = "known"
    """The true length where it is certain (oracles), else the forecast."""
    AVERAGE = "average"
    """The same average for everybody: the paper's ablation without the Request Analyzer."""


class LengthEstimates(Protocol):
    """Where the points of a request without a forecast of its own come from."""

    @property
    def version(self) -> int:
        """Rises whenever ``points`` may answer differently."""
        ...

    @property
    def average_tokens(self) -> float:
        """Mean output tokens of the answers that finished lately."""
        ...

    def points(self, slo_type: str) -> Points:
        """Ascending equal-mass points of the output tokens of that class."""
        ...

    def learn(self, request: Request, *, is_censored: bool) -> None:
        """A request ended after ``generated_tokens``; censored if it would have gone on."""
        ...


class OnlineClassLengths:
    """The empirical distribution of the last finished answers of each SLO class.

    New answers count once they are an eighth of what is known: the points of ten thousand
    waiting requests are not worth rewriting for every one of them.
    """

    def __init__(self, window: int = 512) -> None:
        self._window = window
        self._recent: dict[str, deque[int]] = {}
        self._points: dict[str, Points] = {}
        self._num_new: dict[str, int] = {}
        self._prior: Points = (1.0 + (PRIOR_TOKENS - 1.0) * _MIDDLES).astype(np.float32)
        self._all: deque[int] = deque(maxlen=window)
        self._sum = 0
        self._version = 0

    @property
    def version(self) -> int:
        return self._version

    @property
    def average_tokens(self) -> float:
        return self._sum / len(self._all) if self._all else PRIOR_TOKENS / 2

    def points(self, slo_type: str) -> Points:
        return self._points.get(slo_type, self._prior)

    def learn(self, request: Request, *, is_censored: bool) -> None:
        tokens = request.generated_tokens
        if is_censored and tokens < request.max_output_tokens:
            return
        if len(self._all) == self._window:
            self._sum -= self._all[0]
        self._all.append(tokens)
        self._sum += tokens
        key = request.slo_type
        recent = self._recent.setdefault(key, deque(maxlen=self._window))
        recent.append(tokens)
        self._num_new[key] = self._num_new.get(key, 0) + 1
        if self._num_new[key] * 8 >= len(recent):
            self._num_new[key] = 0
            self._points[key] = equal_mass_points(recent)
            self._version += 1


_: type[LengthEstimates] = OnlineClassLengths


class AverageRequest:
    """Input and output tokens that count of a request lately: a stream, an answer or a program.

    Of a stream the output alone. Half of what is known is forgotten every ``MEMORY`` requests.
    """

    MEMORY = 1024

    def __init__(self) -> None:
        self._num = 8.0
        self._input = 0.0
        self._output = self._num * PRIOR_TOKENS / 2

    def begun(self) -> None:
        """Another request that has an objective."""
        self._num += 1
        if self._num > self.MEMORY:
            self._num, self._input, self._output = self._num / 2, self._input / 2, self._output / 2

    def add(self, input_tokens: float, output_tokens: float) -> None:
        """One of them, or a call of one, was answered."""
        self._input += input_tokens
        self._output += output_tokens

    @property
    def input_tokens(self) -> float:
        return self._input / self._num

    @property
    def output_tokens(self) -> float:
        return max(self._output / self._num, 1.0)


def equal_mass_points(lengths: Sequence[float] | deque[int] | Points | Floats) -> Points:
    """``NUM_POINTS`` ascending points of a sample or of a forecast's own points.

    Raises:
        ValueError: nothing is there, or a length is not a number of 0 or more.
    """
    sample = np.sort(np.asarray(lengths, dtype=np.float64))
    if sample.ndim != 1 or sample.size == 0 or not (np.isfinite(sample).all() and sample[0] >= 0):
        raise ValueError("a length forecast takes one or more finite lengths of 0 or more tokens")
    if sample.size == 1:
        return np.full(NUM_POINTS, min(sample[0], _MAX_POINT), dtype=np.float32)
    # Each length stands for the middle of its share of the mass, as each point does.
    places = (np.arange(sample.size) + 0.5) / sample.size
    return np.minimum(np.interp(_MIDDLES, places, sample), _MAX_POINT).astype(np.float32)


def refresh(table: RequestTable, index: Ints, quantile: float) -> None:
    """Bring the length columns of these rows up to their ``generated_tokens``."""
    if not index.size:
        return
    generated = table.generated_tokens[index]
    limit = table.max_output_tokens[index]
    room = np.maximum(limit - generated, 1.0)
    points = np.minimum(table.points.take(index, axis=0), limit[:, None])
    is_ahead = points > generated[:, None]
    ahead = _count(is_ahead)
    outlived = ahead == 0
    count = np.maximum(ahead, 1)
    still = np.where(is_ahead, points, 0.0)
    mean_total = still.sum(axis=1) / count
    spread = np.sqrt(np.maximum((still**2).sum(axis=1) / count - mean_total**2, 0.0))
    mean = mean_total - generated
    # The i-th of n points ahead stands for the level (i + 0.5) / n of what is still possible.
    place = NUM_POINTS - count + clip(quantile * count - 0.5, 0.0, count - 1.0)
    low = place.astype(np.int64)
    high = np.minimum(low + 1, NUM_POINTS - 1)
    rows = np.arange(len(index))
    lower = points[rows, low]
    bound = lower + (points[rows, high] - lower) * (place - low) - generated
    # Longer than every answer seen: as the Lindy rule has it, half as long again.
    mean = np.where(outlived, np.maximum(generated * 0.5, 16.0), mean)
    bound = np.where(outlived, room, bound)
    spread = np.where(outlived, mean, spread)
    table.mean_tokens[index] = clip(mean, 1.0, room)
    table.bound_tokens[index] = clip(bound, 1.0, room)
    table.spread_tokens[index] = spread
    table.num_ahead[index] = ahead
    table.is_stale[index] = False


def _count(points: Bools) -> Ints:
    """How many of each row's points, of shape (n, NUM_POINTS), are marked."""
    # A sum along the short axis takes four times as long.
    num: Ints = (points.astype(np.float32) @ _ONES).astype(np.int64)
    return num


class Remaining:
    """Remaining lengths of some rows under one kind of ``Information``. Shapes (n,)."""

    def __init__(self, rows: Rows, information: Information, average_tokens: float) -> None:
        self._rows = rows
        self.mean_tokens: Floats = rows.mean_tokens
        self.bound_tokens: Floats = rows.bound_tokens
        self.spread_tokens: Floats = rows.spread_tokens
        self._is_fixed: Bools | None = None
        if information is Information.KNOWN:
            self._fix(rows.known_tokens, ~np.isnan(rows.known_tokens))
        elif information is Information.AVERAGE:
            self._fix(np.full(rows.size, average_tokens), np.ones(rows.size, dtype=np.bool_))

    def _fix(self, total: Floats, where: Bools) -> None:
        rows = self._rows
        fixed = clip(np.where(where, total, 1.0) - rows.generated_tokens, 1.0, rows.room_tokens)
        self.mean_tokens = np.where(where, fixed, self.mean_tokens)
        self.bound_tokens = np.where(where, fixed, self.bound_tokens)
        self.spread_tokens = np.where(where, 0.0, self.spread_tokens)
        self._is_fixed = where

    def fits_fraction(self, tokens: Floats, index: Ints) -> Floats:
        """Probability that at most ``tokens`` are still to come, for the rows at ``index``."""
        rows = self._rows
        ahead, least = rows.num_ahead[index], np.maximum(tokens, 0.0)
        # A point beyond max_tokens stands for an answer that ends there: see the room below.
        reached = (rows.generated_tokens[index] + least).astype(np.float32)
        beyond = _count(rows.points.take(index, axis=0) > reached[:, None])
        mean = self.mean_tokens[index]
        with np.errstate(under="ignore"):
            outlived = -np.expm1(-least / mean)
        fits = np.where(ahead > 0, 1.0 - beyond / np.maximum(ahead, 1), outlived)
        if self._is_fixed is not None:
            fits = np.where(self._is_fixed[index], (tokens >= mean).astype(np.float64), fits)
        fits = np.where(tokens >= rows.room_tokens[index], 1.0, fits)
        return np.where(tokens < 1.0, 0.0, fits)
