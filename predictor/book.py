"""The forecasts that have come in, on the serving side: refined there, without asking again.

Holds each live request's whole distribution and the latest calibration. Everything here is
arithmetic on what is there already; nothing waits.
"""

import numpy as np

from predictor.calibration import Factors, bucket_of, calibrated, no_factors
from predictor.distribution import (
    Points,
    at_level,
    remaining_at_levels,
)
from predictor.features import Row
from predictor.tilt import Tilts, no_tilts, tilt_of


class LengthBook:
    """Length distributions of live requests."""

    def __init__(self) -> None:
        self._points: dict[str, Points] = {}
        self._tilt: dict[str, tuple[int, np.float32]] = {}
        """The bucket in which an answer is tilted, and the factor."""
        self._factors = no_factors()
        self._tilts = no_tilts()
        self.num_refinements = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._points

    def __len__(self) -> int:
        return len(self._points)

    def enter(self, request_id: str, points: Points) -> None:
        """A forecast came: shape (NUM_POINTS,), ascending total tokens."""
        self._points[request_id] = points

    def calibrate(self, factors: Factors, tilts: Tilts | None = None) -> None:
        """New factors, (NUM_BUCKETS, NUM_LEVELS), and tilts, (TILTED_BUCKETS, …)."""
        self._factors = factors
        if tilts is not None:
            self._tilts = tilts

    def saw(self, request_id: str, mark_tokens: int, progress: Row) -> None:
        """What an answer looked like at one of ``TILT_MARKS``: its bucket is tilted by it."""
        if request_id in self._points:
            bucket = bucket_of(mark_tokens)
            factor = tilt_of(self._tilts, bucket, progress)
            self._tilt[request_id] = (bucket, np.float32(factor))

    def remaining(self, request_id: str, generated_tokens: int) -> Points | None:
        """Tokens still to come at each of ``LEVELS``; None where no forecast has come."""
        points = self._points.get(request_id)
        if points is None:
            return None
        remaining = remaining_at_levels(points, generated_tokens)
        bucket = bucket_of(generated_tokens)
        tilt = self._tilt.get(request_id)
        if tilt is not None and tilt[0] == bucket:
            remaining *= tilt[1]
        return calibrated(remaining, self._factors[bucket])

    def refine(self, request_id: str, generated_tokens: int) -> Points | None:
        """Equal-mass points of the total output tokens of an answer that got so far.

        Returns:
            Shape (NUM_LEVELS,), ascending, none below ``generated_tokens``; None where no
            forecast has come.
        """
        total = self.remaining(request_id, generated_tokens)
        if total is None:
            return None
        self.num_refinements += 1
        total += generated_tokens
        return total

    def bound_tokens(self, request_id: str, generated_tokens: int, quantile: float) -> float | None:
        """The upper bound of the total output tokens at a quantile; None without a forecast."""
        total = self.refine(request_id, generated_tokens)
        return None if total is None else float(at_level(total, quantile))

    def forget(self, request_id: str) -> None:
        """The request has ended; unknown ids are ignored."""
        self._points.pop(request_id, None)
        self._tilt.pop(request_id, None)
