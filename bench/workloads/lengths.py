"""Lengths as a few numbers: mixtures of lognormals, rounded to whole tokens and clipped."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Part(NamedTuple):
    """A lognormal: its weight in the mixture, its median, the spread of its logarithm."""

    weight: float
    median: float
    spread: float


class Lengths(NamedTuple):
    """A mixture of lognormals, clipped to ``low`` and ``high``."""

    parts: tuple[Part, ...]
    high: float
    low: float = 1.0

    def draw(self, rng: np.random.Generator, num: int) -> npt.NDArray[np.float64]:
        """``num`` lengths, independent of each other."""
        which = np.searchsorted(
            np.cumsum([part.weight for part in self.parts[:-1]]), rng.random(num), side="right"
        )
        medians = np.log([part.median for part in self.parts])
        spreads = np.array([part.spread for part in self.parts])
        drawn = np.exp(medians[which] + spreads[which] * rng.standard_normal(num))
        return np.clip(drawn, self.low, self.high)

    def tokens(self, rng: np.random.Generator, num: int) -> list[int]:
        """``num`` lengths in whole tokens, 1 or more."""
        return [max(round(value), 1) for value in self.draw(rng, num).tolist()]


def lognormal(median: float, spread: float, high: float, low: float = 1.0) -> Lengths:
    """The mixture of one."""
    return Lengths((Part(1.0, median, spread),), high, low)


def pick(weights: Sequence[float], at: float) -> int:
    """Index of the weight in which the part ``at`` (0 to 1) of their sum falls."""
    total = sum(weights)
    reached = 0.0
    last = 0
    for index, weight in enumerate(weights):
        if weight > 0:
            last = index
            reached += weight
            if at * total < reached:
                return index
    return last
