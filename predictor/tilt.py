"""Longer or shorter by what was generated so far: a small linear model for each progress bucket.

At the first tokens of a bucket the remaining length is multiplied by exp(w · x), x what
``predictor.progress`` sees. Ridge regression with a fading memory, on the log of remaining
over forecast median. A bucket's weights are used only while they made the forecasts of the
last answers better: on most texts little is to be seen early, and nothing late.
"""

import numpy as np
import numpy.typing as npt

from predictor.calibration import MARKS
from predictor.distribution import (
    Floats,
    Ints,
    Points,
    at_level,
    pinball_loss,
    remaining_of_many,
)
from predictor.progress import NUM_PROGRESS

TILTED_BUCKETS = 6
"""Buckets from the second on that are tilted: those from 50 to 400 tokens."""
TILT_MARKS: Ints = MARKS[1 : 1 + TILTED_BUCKETS]
Tilts = npt.NDArray[np.float32]
"""Shape (TILTED_BUCKETS, NUM_PROGRESS + 1): weights and, last, the offset."""
MAX_TILT = 1.0
MAX_WEIGHT = 1e4
MEMORY = 1500.0
"""Answers over which the regression fades."""
RIDGE = 50.0
MIN_CASES = 80.0
LOSS_MEMORY = 400.0
MIN_GAIN = 0.01
"""Share of the pinball loss that must be gained for a bucket's weights to be used."""


def no_tilts() -> Tilts:
    """What changes nothing."""
    return np.zeros((TILTED_BUCKETS, NUM_PROGRESS + 1), dtype=np.float32)


def tilt_of(tilts: Tilts, bucket: int, progress: npt.NDArray[np.float32]) -> float:
    """The factor for the remaining tokens of an answer at the begin of ``bucket``."""
    if not 1 <= bucket <= TILTED_BUCKETS:
        return 1.0
    weights = tilts[bucket - 1]
    log_factor = float(weights[:-1] @ progress) + float(weights[-1])
    return float(np.exp(min(max(log_factor, -MAX_TILT), MAX_TILT)))


class TiltLearner:
    """Learns the tilts from finished answers."""

    def __init__(self) -> None:
        size = NUM_PROGRESS + 1
        self._moments = np.zeros((TILTED_BUCKETS, size, size))
        self._products = np.zeros((TILTED_BUCKETS, size))
        self._losses = np.zeros((TILTED_BUCKETS, 3))
        """Count, loss without and loss with the tilt, all fading."""
        self._candidates = no_tilts()
        self.tilts = no_tilts()

    def learn(
        self, points: Points, output_tokens: float, limit: float, progress: Points
    ) -> npt.NDArray[np.float64]:
        """An answer forecast as ``points`` became ``output_tokens`` long, of ``limit`` at most.

        Args:
            progress: (n, NUM_PROGRESS) what it looked like at the first n of ``TILT_MARKS``.

        Returns:
            The factors in use when it passed them, shape (n,).
        """
        passed = min(len(progress), int((output_tokens > TILT_MARKS).sum()))
        factors = np.ones(passed)
        if not passed:
            return factors
        marks = TILT_MARKS[:passed]
        remaining = remaining_of_many(np.broadcast_to(points, (passed, len(points))), marks)
        room = np.maximum(limit - marks, 1.0)
        truth = np.minimum(output_tokens - marks, room)
        median = np.clip(at_level(remaining, 0.5), 1.0, room)
        for index in range(passed):
            row = progress[index]
            factors[index] = tilt_of(self.tilts, index + 1, row)
            candidate = tilt_of(self._candidates, index + 1, row)
            self._note_loss(index, remaining[index], truth[index], room[index], candidate)
            self._regress(index, row, float(np.log(truth[index] / median[index])))
        return factors

    def refresh(self) -> None:
        """Work the weights out anew."""
        for index in range(TILTED_BUCKETS):
            count = self._moments[index, -1, -1]
            if count < MIN_CASES:
                continue
            solved = self._solved(index, count)
            self._candidates[index] = np.clip(solved, -MAX_WEIGHT, MAX_WEIGHT)
            count, plain, tilted = self._losses[index]
            is_better = count >= MIN_CASES and tilted < (1.0 - MIN_GAIN) * plain
            self.tilts[index] = self._candidates[index] if is_better else 0.0

    def _solved(self, index: int, count: float) -> Floats:
        """Ridge on standardised features; the mean stays as it is, calibration has it."""
        moments, products = self._moments[index] / count, self._products[index] / count
        mean = moments[-1, :-1]
        covariance = moments[:-1, :-1] - np.outer(mean, mean)
        deviation = np.sqrt(np.maximum(np.diag(covariance), 1e-6))
        scaled = covariance / np.outer(deviation, deviation)
        target = (products[:-1] - mean * products[-1]) / deviation
        try:
            weights = np.linalg.solve(scaled + np.eye(NUM_PROGRESS) * RIDGE / count, target)
        except np.linalg.LinAlgError:
            return np.zeros(NUM_PROGRESS + 1)
        weights = weights / deviation
        return np.append(weights, -float(weights @ mean))

    def _regress(self, index: int, row: Points, target: float) -> None:
        extended = np.append(row.astype(np.float64), 1.0)
        fade = 1.0 - 1.0 / MEMORY
        self._moments[index] = fade * self._moments[index] + np.outer(extended, extended)
        target = min(max(target, -3.0), 3.0)
        self._products[index] = fade * self._products[index] + extended * target

    def _note_loss(
        self, index: int, remaining: Points, truth: float, room: float, factor: float
    ) -> None:
        if not self._candidates[index].any():
            return
        fade = 1.0 - 1.0 / LOSS_MEMORY
        losses = [pinball_loss(np.minimum(remaining * f, room), truth) for f in (1.0, factor)]
        self._losses[index] = fade * self._losses[index] + np.array([1.0, *losses])

    def state(self) -> dict[str, npt.NDArray[np.generic]]:
        """All that is needed to go on from here."""
        return {"moments": self._moments, "products": self._products, "losses": self._losses}

    def restore(self, state: dict[str, npt.NDArray[np.generic]]) -> None:
        """Go on from ``state``. Raises ValueError where it is not one of this class."""
        size = NUM_PROGRESS + 1
        shapes = {
            "moments": (TILTED_BUCKETS, size, size),
            "products": (TILTED_BUCKETS, size),
            "losses": (TILTED_BUCKETS, 3),
        }
        found = {name: state[name].astype(np.float64) for name in shapes}
        for name, shape in shapes.items():
            if found[name].shape != shape or not np.isfinite(found[name]).all():
                raise ValueError(f"the {name} of the tilts have another shape, or are no numbers")
        self._moments, self._products = found["moments"], found["products"]
        self._losses = found["losses"]
        self.refresh()
