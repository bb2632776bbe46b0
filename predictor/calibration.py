"""Keeps the bounds honest while the world drifts: conformal factors by progress and level.

After an answer has ended we know, for every progress mark it passed, how many tokens were
still to come and what the forecast said at each level. The ratio of the two is a score; the
l-quantile of the last scores of a mark is the factor by which the forecast at level l has to
be multiplied for a share l of answers to stay within it (split conformal prediction with
multiplicative scores, over a rolling window: Lei et al., "Distribution-Free Predictive
Inference for Regression", JASA 2018; the study's "per-g").
"""

import bisect

import numpy as np
import numpy.typing as npt

from predictor.distribution import (
    LEVELS,
    NUM_LEVELS,
    Floats,
    Ints,
    Points,
    at_level,
    remaining_of_many,
)

MARKS: Ints = np.array([0, 50, 100, 150, 200, 300, 400, 600, 800, 1200, 1600, 2400, 3200, 6400])
"""Generated tokens at which a progress bucket begins."""
_MARKS: list[int] = MARKS.tolist()
NUM_BUCKETS = len(MARKS)
Factors = npt.NDArray[np.float32]
"""Shape (NUM_BUCKETS, NUM_LEVELS)."""
WINDOW = 600
"""Answers that a factor rests on: enough for one point of coverage, few enough to follow."""
WEIGHT_OF_NEIGHBOUR = 100.0
"""As many answers is the factor of the bucket before worth, where a bucket has few."""
MAX_FACTOR = 50.0
TRACKING_RATE = 0.03
"""By how much one answer outside the bound widens its bucket, in the log, about."""
MAX_SHIFT = 2.0
MAX_SEEN = 1 << 53
REFRESH_EVERY = 32
"""Answers after which the factors are worked out again."""
MIN_REMAINING_TOKENS = 0.5
MIN_COVERAGE_CASES = 50


_ascending = np.maximum.accumulate


def no_factors() -> Factors:
    """What changes nothing."""
    return np.ones((NUM_BUCKETS, NUM_LEVELS), dtype=np.float32)


def bucket_of(generated_tokens: int) -> int:
    """The progress bucket of a request that has so many tokens."""
    return bisect.bisect_right(_MARKS, generated_tokens) - 1


def calibrated(remaining: Points, factors: Points) -> Points:
    """Remaining tokens at ``LEVELS`` times their factors, kept ascending. (…, NUM_LEVELS)."""
    result: Points = remaining * factors
    _ascending(result, -1, None, result)
    return result


class Calibrator:
    """The scores of the last answers and the factors that follow from them."""

    def __init__(self, window: int = WINDOW) -> None:
        self._window = window
        self._scores = np.ones((NUM_BUCKETS, window, NUM_LEVELS), dtype=np.float32)
        self._num_seen = np.zeros(NUM_BUCKETS, dtype=np.int64)
        self._since_refresh = 0
        self._shift = np.zeros(NUM_BUCKETS)
        self._covered = np.zeros((NUM_BUCKETS, window), dtype=np.bool_)
        self.factors = no_factors()
        self.version = 0
        """Rises whenever ``factors`` change."""

    def learn(
        self,
        points: Points,
        output_tokens: float,
        quantile: float,
        tilts: Floats | None = None,
    ) -> None:
        """An answer whose forecast was ``points`` (NUM_POINTS,) became ``output_tokens`` long.

        ``tilts``: what the remaining tokens were multiplied by from the second bucket on.
        """
        passed = int((output_tokens > MARKS).sum())
        if not passed:
            return
        marks = MARKS[:passed]
        remaining = remaining_of_many(np.broadcast_to(points, (passed, len(points))), marks)
        if tilts is not None:
            tilted = remaining[1 : 1 + len(tilts)]
            tilted *= tilts[: len(tilted), None].astype(np.float32)
        remaining = np.maximum(remaining, np.float32(MIN_REMAINING_TOKENS))
        buckets = np.arange(passed)
        places = self._num_seen[:passed] % self._window
        truth = output_tokens - marks
        self._scores[buckets, places] = truth[:, None] / remaining
        bound = at_level(calibrated(remaining, self.factors[:passed]), quantile)
        covered = truth <= np.ceil(bound)
        self._covered[buckets, places] = covered
        shift = self._shift[:passed] + TRACKING_RATE * (quantile - covered)
        self._shift[:passed] = np.clip(shift, -MAX_SHIFT, MAX_SHIFT)
        self._num_seen[:passed] += 1
        self._since_refresh += 1
        if self._since_refresh >= min(REFRESH_EVERY, int(self._num_seen[0]) // 8 + 1):
            self.refresh()

    def refresh(self) -> None:
        """Work the factors out anew."""
        self._since_refresh = 0
        logs = np.zeros((NUM_BUCKETS, NUM_LEVELS))
        before = np.zeros(NUM_LEVELS)
        for bucket in range(NUM_BUCKETS):
            count = int(min(self._num_seen[bucket], self._window))
            own = before
            if count:
                own = np.log(_conformal_quantiles(self._scores[bucket, :count]))
            weight = count / (count + WEIGHT_OF_NEIGHBOUR)
            before = logs[bucket] = weight * own + (1.0 - weight) * before
        factors = np.clip(np.exp(logs + self._shift[:, None]), 1.0 / MAX_FACTOR, MAX_FACTOR)
        self.factors = factors.astype(np.float32)
        self.version += 1

    def coverage(self) -> tuple[float, ...]:
        """Share of the last answers within the bound, by bucket; -1 where too few were seen."""
        counts = np.minimum(self._num_seen, self._window)
        return tuple(
            float(self._covered[bucket, :count].mean()) if count >= MIN_COVERAGE_CASES else -1.0
            for bucket, count in enumerate(counts.tolist())
        )

    def state(self) -> dict[str, npt.NDArray[np.generic]]:
        """All that is needed to go on from here."""
        return {
            "scores": self._scores,
            "num_seen": self._num_seen,
            "covered": self._covered,
            "shift": self._shift,
        }

    def restore(self, state: dict[str, npt.NDArray[np.generic]]) -> None:
        """Go on from ``state``. Raises ValueError where it is not one of this class."""
        scores = state["scores"].astype(np.float32)
        seen, covered = state["num_seen"].astype(np.int64), state["covered"].astype(np.bool_)
        shift = state["shift"].astype(np.float64)
        expected = (NUM_BUCKETS, self._window, NUM_LEVELS)
        if scores.shape != expected or seen.shape != (NUM_BUCKETS,):
            raise ValueError(f"calibration scores have shape {scores.shape}, not {expected}")
        if covered.shape != expected[:2] or not np.isfinite(scores).all():
            raise ValueError("calibration scores are not numbers")
        if (scores <= 0).any() or (seen < 0).any() or (seen > MAX_SEEN).any():
            raise ValueError("calibration scores are not positive")
        if shift.shape != seen.shape or not (np.abs(shift) <= MAX_SHIFT).all():
            raise ValueError("calibration shifts are out of range")
        self._scores, self._num_seen, self._covered, self._shift = scores, seen, covered, shift
        self.refresh()


def _conformal_quantiles(scores: Points) -> Floats:
    """The ceil((n + 1) l)-th smallest score for each level l, columnwise. (NUM_LEVELS,)."""
    count = len(scores)
    places = np.minimum(np.ceil((count + 1) * LEVELS).astype(np.int64), count) - 1
    ordered = np.sort(scores, axis=0)
    result: Floats = ordered[places, np.arange(NUM_LEVELS)].astype(np.float64)
    return result
