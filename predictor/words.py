"""What the words of a prompt say of its answer's length: a linear model over hashed words.

Trained one answer at a time (AdaGrad: Duchi, Hazan and Singer, JMLR 2011), so a score given
before the answer was known never rests on it. The forest takes the score as one feature.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from predictor.features import WORD_BUCKETS

RATE = 0.15
MAX_ERROR = 3.0
MAX_WEIGHT = 10.0


class WordScores:
    """Weights of ``WORD_BUCKETS`` hashed words."""

    def __init__(self) -> None:
        self._weights = np.zeros(WORD_BUCKETS)
        self._squares = np.full(WORD_BUCKETS, 1e-2)

    def score(self, words: Sequence[int]) -> float:
        """Expected deviation of the log length; 0 for no words."""
        if not words:
            return 0.0
        return float(self._weights[list(words)].sum()) / math.sqrt(len(words))

    def learn(self, words: Sequence[int], deviation: float) -> None:
        """The log length of an answer deviated by so much from what its history says."""
        if not words:
            return
        index = np.unique(np.array(words))
        error = float(np.clip(deviation - self.score(words), -MAX_ERROR, MAX_ERROR))
        gradient = -error / math.sqrt(len(words))
        self._squares[index] += gradient * gradient
        step = RATE * gradient / np.sqrt(self._squares[index])
        self._weights[index] = np.clip(self._weights[index] - step, -MAX_WEIGHT, MAX_WEIGHT)

    def state(self) -> dict[str, npt.NDArray[np.generic]]:
        """All that is needed to go on from here."""
        return {"weights": self._weights, "squares": self._squares}

    def restore(self, state: dict[str, npt.NDArray[np.generic]]) -> None:
        """Go on from ``state``. Raises ValueError where it is not one of this class."""
        weights = state["weights"].astype(np.float64)
        squares = state["squares"].astype(np.float64)
        if weights.shape != (WORD_BUCKETS,) or squares.shape != (WORD_BUCKETS,):
            raise ValueError("the word scores have another shape")
        if not (np.isfinite(weights).all() and np.isfinite(squares).all() and squares.min() > 0):
            raise ValueError("the word scores are not numbers")
        if np.abs(weights).max() > MAX_WEIGHT:
            raise ValueError("the word scores are out of range")
        self._weights, self._squares = weights, squares
