"""Other ways to forecast lengths, behind one interface, to compare the forest with.

Each is trained on samples and gives ``NUM_POINTS`` points for a request, so that all are
judged by the same measures. Those that give one number or an order get their spread from
the training answers that were given like numbers.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from scipy import sparse

from bench.lengths import Sample, lengths_of
from predictor.distribution import NUM_POINTS, POINT_LEVELS, Points, points_of_sample
from predictor.features import NUM_FEATURES, WORD_BUCKETS

Matrix = npt.NDArray[np.float64]
NUM_NEIGHBOURS = 60
NUM_RANGES = 8
TAUS = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)


class Rival(Protocol):
    """A length forecaster."""

    def fit(self, samples: Sequence[Sample], seed: int) -> None: ...

    def points(self, samples: Sequence[Sample]) -> Points:
        """Total output tokens, shape (n, NUM_POINTS), ascending."""
        ...


def dense(samples: Sequence[Sample]) -> Matrix:
    """Feature rows, shape (n, NUM_FEATURES)."""
    if not samples:
        return np.zeros((0, NUM_FEATURES))
    return np.array([sample.features() for sample in samples], dtype=np.float64)


def with_words(samples: Sequence[Sample]) -> Any:
    """Feature rows beside the hashed words, sparse, scaled to like sizes."""
    matrix = sparse.lil_matrix((len(samples), WORD_BUCKETS))
    for row, sample in enumerate(samples):
        for word in sample.cues.words:
            matrix[row, word] = 1.0 / len(sample.cues.words) ** 0.5
    return sparse.hstack([sparse.csr_matrix(dense(samples) / 4.0), matrix.tocsr()]).tocsr()


def logs(samples: Sequence[Sample]) -> Matrix:
    """Log lengths; a cut answer counts as long as it got, since these know no better."""
    return np.log1p(np.array(lengths_of(samples), dtype=np.float64))


class ClassQuantile:
    """The lengths of the group of the request: what the scheduler falls back on."""

    def fit(self, samples: Sequence[Sample], seed: int) -> None:
        groups: dict[str, list[int]] = {}
        for sample in samples:
            groups.setdefault(sample.group, []).append(sample.output_tokens)
        self._all = points_of_sample(lengths_of(samples))
        self._points = {
            group: points_of_sample(found) for group, found in groups.items() if len(found) >= 20
        }

    def points(self, samples: Sequence[Sample]) -> Points:
        return np.stack([self._points.get(sample.group, self._all) for sample in samples])


class Ridge:
    """Ridge regression of the log length on features and words, with its own residuals."""

    def fit(self, samples: Sequence[Sample], seed: int) -> None:
        from sklearn.linear_model import Ridge as Regression
        from sklearn.model_selection import cross_val_predict

        matrix, target = with_words(samples), logs(samples)
        self._model = Regression(alpha=3.0)
        held_out = cross_val_predict(self._model, matrix, target, cv=5)
        self._residuals = np.quantile(target - held_out, POINT_LEVELS)
        self._model.fit(matrix, target)

    def points(self, samples: Sequence[Sample]) -> Points:
        centre = self._model.predict(with_words(samples))
        return tokens_of(centre[:, None] + self._residuals[None, :])


class BoostedQuantiles:
    """LightGBM, one model for each of ``TAUS``, interpolated between them."""

    def fit(self, samples: Sequence[Sample], seed: int) -> None:
        import lightgbm

        matrix, target = dense(samples), logs(samples)
        self._models = []
        for tau in TAUS:
            model = lightgbm.LGBMRegressor(
                objective="quantile",
                alpha=tau,
                n_estimators=120,
                num_leaves=15,
                learning_rate=0.05,
                min_child_samples=20,
                random_state=seed,
                n_jobs=1,
                verbose=-1,
            )
            self._models.append(model.fit(matrix, target))

    def points(self, samples: Sequence[Sample]) -> Points:
        matrix = dense(samples)
        found = np.stack([model.predict(matrix) for model in self._models], axis=1)
        found = np.maximum.accumulate(found, axis=1)
        return tokens_of(
            np.stack([np.interp(POINT_LEVELS, TAUS, row) for row in found])
            if len(found)
            else np.zeros((0, NUM_POINTS))
        )


class RangeClassifier:
    """Probabilities of ``NUM_RANGES`` ranges of length, as µ-Serve has from a BERT.

    Here a logistic regression on our features and words stands in for the language model
    (Qiu et al., "Power-aware Deep Learning Model Serving with µ-Serve", ATC 2024).
    """

    def fit(self, samples: Sequence[Sample], seed: int) -> None:
        from sklearn.linear_model import LogisticRegression

        target = logs(samples)
        edges = np.unique(np.quantile(target, np.linspace(0, 1, NUM_RANGES + 1)[1:-1]))
        labels = np.searchsorted(edges, target, side="right")
        self._model = LogisticRegression(C=1.0, max_iter=400)
        self._model.fit(with_words(samples), labels)
        self._inside = [np.sort(target[labels == label]) for label in self._model.classes_]

    def points(self, samples: Sequence[Sample]) -> Points:
        shares = self._model.predict_proba(with_words(samples))
        values = np.concatenate(self._inside)
        order = np.argsort(values, kind="stable")
        rows = []
        sizes = [len(inside) for inside in self._inside]
        for row in shares:
            weights = np.repeat(row / sizes, sizes)[order]
            levels = np.cumsum(weights) - weights / 2
            rows.append(np.interp(POINT_LEVELS, levels, values[order]))
        return tokens_of(np.array(rows).reshape(-1, NUM_POINTS))


class PairwiseRanker:
    """Learns which of two answers is longer (Fu et al., "Learning to Rank", NeurIPS 2024).

    Its score only orders; the lengths are those of the training answers with the nearest
    scores.
    """

    def fit(self, samples: Sequence[Sample], seed: int) -> None:
        from sklearn.linear_model import LogisticRegression

        rng = np.random.default_rng(seed)
        matrix, target = with_words(samples), logs(samples)
        first = rng.integers(len(samples), size=8 * len(samples))
        second = rng.integers(len(samples), size=8 * len(samples))
        is_clear = np.abs(target[first] - target[second]) > 0.2
        first, second = first[is_clear], second[is_clear]
        model = LogisticRegression(C=0.3, fit_intercept=False, max_iter=300)
        model.fit(matrix[first] - matrix[second], target[first] > target[second])
        self._weights = model.coef_[0]
        scores = np.asarray(matrix @ self._weights)
        order = np.argsort(scores, kind="stable")
        self._scores, self._lengths = scores[order], target[order]

    def points(self, samples: Sequence[Sample]) -> Points:
        scores = np.asarray(with_words(samples) @ self._weights)
        places = np.searchsorted(self._scores, scores)
        starts = np.clip(
            places - NUM_NEIGHBOURS // 2, 0, max(len(self._lengths) - NUM_NEIGHBOURS, 0)
        )
        return tokens_of(
            np.array(
                [
                    np.quantile(self._lengths[start : start + NUM_NEIGHBOURS], POINT_LEVELS)
                    for start in starts
                ]
            ).reshape(-1, NUM_POINTS)
        )


class Oracle:
    """Knows every length."""

    def fit(self, samples: Sequence[Sample], seed: int) -> None:
        """There is nothing to learn."""

    def points(self, samples: Sequence[Sample]) -> Points:
        known = np.array(lengths_of(samples), dtype=np.float32)
        return np.repeat(known[:, None], NUM_POINTS, axis=1)


def tokens_of(log_lengths: Matrix) -> Points:
    """Points in tokens from points in log lengths."""
    return np.expm1(np.clip(log_lengths, 0.0, 20.0)).astype(np.float32)


RIVALS: dict[str, type[Rival]] = {
    "class-quantile": ClassQuantile,
    "ridge": Ridge,
    "lightgbm": BoostedQuantiles,
    "range-classifier": RangeClassifier,
    "pairwise-ranker": PairwiseRanker,
    "oracle": Oracle,
}
