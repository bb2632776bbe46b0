"""A fitted quantile regression forest as flat arrays, read in one pass per request.

``quantile-forest`` fits the trees. Its own ``predict`` costs a Python call per tree; here the
trees are laid out in arrays and one compiled loop finds a row's leaves, pools the training
targets in them and reads the whole conditional distribution (Meinshausen, "Quantile
Regression Forests", JMLR 2006; pooled with equal counts, as the library does with
``weighted_quantile=False`` and ``max_samples_leaf=None``).
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numba
import numpy as np
import numpy.typing as npt
from quantile_forest import RandomForestQuantileRegressor

from predictor.distribution import NUM_POINTS, POINT_LEVELS, Floats

Rows = npt.NDArray[np.float32]
Ints32 = npt.NDArray[np.int32]

LEAF = -1


class ForestParameters(msgspec.Struct, frozen=True, kw_only=True):
    """How a forest is grown; docs/experiments.md has what other choices gave."""

    num_trees: int = 100
    min_samples_leaf: int = 20
    """With many rows; a hundredth of them where they are fewer."""
    least_samples_leaf: int = 10
    max_features: float = 0.33
    max_depth: int = 14


class Forest(msgspec.Struct, frozen=True):
    """A fitted forest. Nodes of all trees stand one after the other.

    Attributes:
        feature: (nodes,) column that is compared, ``LEAF`` in a leaf.
        threshold: (nodes,) go left where the value is at most this.
        left: (nodes,) the left child, or in a leaf the leaf's number.
        right: (nodes,) the right child.
        roots: (trees,) the first node of each tree.
        leaf_starts: (leaves + 1,) where each leaf's targets begin in ``leaf_ranks``.
        leaf_ranks: ranks, in ``targets``, of the training rows in each leaf.
        targets: (rows,) the training targets, ascending.
        num_features: columns of a row.
    """

    feature: Ints32
    threshold: Floats
    left: Ints32
    right: Ints32
    roots: Ints32
    leaf_starts: Ints32
    leaf_ranks: Ints32
    targets: Floats
    num_features: int

    def points(self, rows: Rows) -> Floats:
        """The conditional distribution of each row's target, shape (n, NUM_POINTS), ascending.

        Raises:
            ValueError: the rows do not have the columns that the forest was fitted on.
        """
        return self.quantiles(rows, POINT_LEVELS)

    def quantiles(self, rows: Rows, levels: Floats | Sequence[float]) -> Floats:
        """Quantiles of each row's target at ascending ``levels``, shape (n, levels).

        Raises:
            ValueError: levels that do not ascend from 0 to 1, or rows of other columns.
        """
        rows = np.ascontiguousarray(rows, dtype=np.float32)
        if rows.ndim != 2 or rows.shape[1] != self.num_features:
            raise ValueError(f"rows have shape {rows.shape}, the forest {self.num_features}")
        levels = np.ascontiguousarray(levels, dtype=np.float64)
        if not ((levels >= 0) & (levels <= 1) & (np.diff(levels, prepend=0.0) >= 0)).all():
            raise ValueError("levels ascend between 0 and 1")
        result = np.empty((len(rows), len(levels)))
        _read(
            rows,
            self.feature,
            self.threshold,
            self.left,
            self.right,
            self.roots,
            self.leaf_starts,
            self.leaf_ranks,
            self.targets,
            levels,
            result,
        )
        return result


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _read(
    rows: Any,
    feature: Any,
    threshold: Any,
    left: Any,
    right: Any,
    roots: Any,
    leaf_starts: Any,
    leaf_ranks: Any,
    targets: Any,
    levels: Any,
    result: Any,
) -> None:
    """Fill ``result``: linear interpolation between order statistics, as ``numpy.quantile``."""
    counts = np.zeros(len(targets), dtype=np.int32)
    num_levels = len(levels)
    for row in range(len(rows)):
        counts[:] = 0
        total = 0
        for tree in range(len(roots)):
            node = roots[tree]
            while feature[node] >= 0:
                is_left = rows[row, feature[node]] <= threshold[node]
                node = left[node] if is_left else right[node]
            start, end = leaf_starts[left[node]], leaf_starts[left[node] + 1]
            total += end - start
            for place in range(start, end):
                counts[leaf_ranks[place]] += 1
        rank = 0
        below = counts[0]
        for level in range(num_levels):
            # One more and one less, as the library does it: the same rounding.
            position = levels[level] * (total - 1) + 1.0 - 1.0
            first = int(position)
            while below <= first:
                rank += 1
                below += counts[rank]
            value = targets[rank]
            fraction = position - first
            if fraction > 0.0 and below <= first + 1:
                above = rank + 1
                while counts[above] == 0:
                    above += 1
                value += (targets[above] - value) * fraction
            result[row, level] = value


def fit(rows: Rows, targets: Floats, parameters: ForestParameters, seed: int) -> Forest:
    """Grow a forest on (n, features) rows and (n,) targets. The same seed, the same forest.

    Raises:
        ValueError: fewer than two rows, or a value is not finite.
    """
    return flatten(grow(rows, targets, parameters, seed), rows, targets)


def grow(
    rows: Rows, targets: Floats, parameters: ForestParameters, seed: int
) -> RandomForestQuantileRegressor:
    """The library's forest. Leaves keep one target there: ``flatten`` finds the others."""
    if len(rows) < 2 or not (np.isfinite(rows).all() and np.isfinite(targets).all()):
        raise ValueError("a forest takes two or more rows of finite numbers")
    forest = RandomForestQuantileRegressor(
        n_estimators=parameters.num_trees,
        min_samples_leaf=leaf_size(len(rows), parameters),
        max_features=parameters.max_features,
        max_depth=parameters.max_depth,
        max_samples_leaf=1,
        random_state=seed,
        n_jobs=1,
    )
    forest.fit(rows, targets)
    return forest


def leaf_size(num_rows: int, parameters: ForestParameters) -> int:
    """The least rows in a leaf: few rows cannot fill large leaves and tell anything apart."""
    least = min(parameters.least_samples_leaf, parameters.min_samples_leaf)
    return max(min(parameters.min_samples_leaf, num_rows // 100), min(least, num_rows // 4), 1)


def flatten(forest: Any, rows: Rows, targets: Floats) -> Forest:
    """The arrays of a fitted ``RandomForestQuantileRegressor`` and of its training data."""
    values: Floats = np.asarray(targets, dtype=np.float64)
    order = np.argsort(values, kind="stable")
    rank_of = np.empty(len(targets), dtype=np.int32)
    rank_of[order] = np.arange(len(targets), dtype=np.int32)
    leaves_of_rows = forest.apply(rows)
    parts: dict[str, list[Any]] = {name: [] for name in ("feature", "threshold", "left", "right")}
    roots, sizes, ranks = [], [], []
    num_nodes = num_leaves = 0
    for index, (tree, sample) in enumerate(
        zip(forest.estimators_, forest.estimators_samples_, strict=True)
    ):
        nodes = tree.tree_
        is_leaf = nodes.children_left == LEAF
        number_of = np.cumsum(is_leaf) - 1
        roots.append(num_nodes)
        parts["feature"].append(np.where(is_leaf, LEAF, nodes.feature))
        parts["threshold"].append(nodes.threshold)
        parts["left"].append(
            np.where(is_leaf, number_of + num_leaves, nodes.children_left + num_nodes)
        )
        parts["right"].append(nodes.children_right + num_nodes)
        leaf_numbers = number_of[leaves_of_rows[sample, index]]
        by_leaf = np.argsort(leaf_numbers, kind="stable")
        ranks.append(rank_of[sample[by_leaf]])
        sizes.append(np.bincount(leaf_numbers, minlength=int(is_leaf.sum())))
        num_nodes += len(is_leaf)
        num_leaves += int(is_leaf.sum())
    starts = np.concatenate([[0], np.cumsum(np.concatenate(sizes))])
    return Forest(
        feature=np.concatenate(parts["feature"]).astype(np.int32),
        threshold=np.concatenate(parts["threshold"]).astype(np.float64),
        left=np.concatenate(parts["left"]).astype(np.int32),
        right=np.concatenate(parts["right"]).astype(np.int32),
        roots=np.array(roots, dtype=np.int32),
        leaf_starts=starts.astype(np.int32),
        leaf_ranks=np.concatenate(ranks).astype(np.int32),
        targets=values[order],
        num_features=rows.shape[1],
    )


def warm_up() -> None:
    """Compile the reading loop, which takes a second or two."""
    tree = Forest(
        feature=np.array([LEAF], dtype=np.int32),
        threshold=np.zeros(1),
        left=np.zeros(1, dtype=np.int32),
        right=np.zeros(1, dtype=np.int32),
        roots=np.zeros(1, dtype=np.int32),
        leaf_starts=np.array([0, 2], dtype=np.int32),
        leaf_ranks=np.arange(2, dtype=np.int32),
        targets=np.array([0.0, 1.0]),
        num_features=1,
    )
    assert tree.points(np.zeros((1, 1), dtype=np.float32)).shape == (1, NUM_POINTS)
