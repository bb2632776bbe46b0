"""The fast path reads the forest exactly as the library does."""

from __future__ import annotations

import math
import warnings
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quantile_forest import RandomForestQuantileRegressor

from predictor.distribution import NUM_POINTS, POINT_LEVELS
from predictor.forest import Forest, ForestParameters, fit, leaf_size, warm_up

SMALL = ForestParameters(num_trees=12, min_samples_leaf=5, max_features=0.5, max_depth=8)
LEVELS = [0.0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.999, 1.0]


def made(count: int, seed: int = 0, *, has_ties: bool = False) -> tuple[Any, Any]:
    """Rows of eight columns and targets that depend on them."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(count, 8))
    targets = rows[:, 0] + np.abs(rows[:, 1]) * rng.normal(size=count)
    if has_ties:
        rows, targets = np.round(rows), np.round(targets)
    return rows.astype(np.float32), targets.astype(np.float64)


def library(rows: Any, targets: Any, parameters: ForestParameters, seed: int) -> Any:
    """The library's own forest with all training targets in its leaves."""
    forest = RandomForestQuantileRegressor(
        n_estimators=parameters.num_trees,
        min_samples_leaf=leaf_size(len(rows), parameters),
        max_features=parameters.max_features,
        max_depth=parameters.max_depth,
        max_samples_leaf=None,
        random_state=seed,
        n_jobs=1,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return forest.fit(rows, targets)


def predicted(forest: Any, rows: Any, levels: Any) -> Any:
    """The library's own forecast."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = forest.predict(rows, quantiles=list(levels), weighted_quantile=False)
    return np.asarray(found).reshape(len(rows), -1)


# The same as the library --------------------------------------------------------------------------


@pytest.mark.parametrize("has_ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize(
    "parameters",
    [
        SMALL,
        ForestParameters(num_trees=1, min_samples_leaf=1, max_features=1.0, max_depth=30),
        ForestParameters(num_trees=7, min_samples_leaf=40, max_features=0.33, max_depth=2),
        ForestParameters(num_trees=100),
    ],
    ids=["small", "one-deep-tree", "stumps", "default"],
)
def test_quantiles_equal_the_library_s_bit_by_bit(
    parameters: ForestParameters, has_ties: bool
) -> None:
    rows, targets = made(500, has_ties=has_ties)
    new = np.concatenate([made(150, 1, has_ties=has_ties)[0], rows[:50]])
    ours = fit(rows, targets, parameters, 3).quantiles(new, LEVELS)
    theirs = predicted(library(rows, targets, parameters, 3), new, LEVELS)
    assert ours.tolist() == theirs.tolist()


def test_one_row_reads_as_it_does_among_many() -> None:
    rows, targets = made(300)
    new = made(20, 1)[0]
    ours, theirs = fit(rows, targets, SMALL, 3), library(rows, targets, SMALL, 3)
    together = ours.quantiles(new, LEVELS)
    for index in range(len(new)):
        alone = ours.quantiles(new[index : index + 1], LEVELS)
        assert alone.tolist() == together[index : index + 1].tolist()
        assert alone.tolist() == predicted(theirs, new[index : index + 1], LEVELS).tolist()


def test_all_points_equal_the_library_s_quantiles() -> None:
    rows, targets = made(400, has_ties=True)
    new = made(30, 1)[0]
    points = fit(rows, targets, SMALL, 5).points(new)
    assert points.shape == (30, NUM_POINTS)
    theirs = predicted(library(rows, targets, SMALL, 5), new, POINT_LEVELS)
    assert points.tolist() == theirs.tolist()


@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(20, 80),
    seed=st.integers(0, 10_000),
    min_leaf=st.integers(1, 5),
    levels=st.lists(st.floats(0, 1), min_size=1, max_size=6).map(sorted),
    kind=st.sampled_from(["distinct", "ties", "constant", "two"]),
)
def test_any_data_reads_as_the_library_reads_it(
    count: int, seed: int, min_leaf: int, levels: list[float], kind: str
) -> None:
    rows, targets = made(count, seed, has_ties=kind == "ties")
    if kind == "constant":
        targets = np.full(count, 2.5)
    elif kind == "two":
        targets = np.where(rows[:, 0] > 0, 1.0, 1e9)
    parameters = msgspec.structs.replace(SMALL, num_trees=4, min_samples_leaf=min_leaf)
    new = made(10, seed + 1)[0]
    ours = fit(rows, targets, parameters, seed).quantiles(new, levels)
    theirs = predicted(library(rows, targets, parameters, seed), new, levels)
    assert ours.tolist() == theirs.tolist()


def test_rows_far_outside_of_the_training_data_read_alike() -> None:
    rows, targets = made(300)
    new = np.array([[1e30] * 8, [-1e30] * 8, [0.0] * 8], dtype=np.float32)
    ours = fit(rows, targets, SMALL, 3).quantiles(new, LEVELS)
    assert ours.tolist() == predicted(library(rows, targets, SMALL, 3), new, LEVELS).tolist()


# A distribution -----------------------------------------------------------------------------------


def test_points_ascend_within_the_targets() -> None:
    rows, targets = made(300)
    points = fit(rows, targets, SMALL, 3).points(made(100, 1)[0])
    assert (np.diff(points, axis=1) >= 0).all()
    assert targets.min() <= points.min()
    assert points.max() <= targets.max()


def test_the_forest_learns_what_rows_say() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(2000, 4)).astype(np.float32)
    targets = np.where(rows[:, 2] > 0, 6.0, 3.0) + 0.2 * rng.normal(size=2000)
    forest = fit(rows, targets, ForestParameters(num_trees=20, max_features=1.0), 0)
    low, high = forest.quantiles(np.array([[0, 0, -1, 0], [0, 0, 1, 0]]), [0.1, 0.5, 0.9])
    assert low[1] == pytest.approx(3.0, abs=0.1)
    assert high[1] == pytest.approx(6.0, abs=0.1)
    assert low[2] - low[0] == pytest.approx(2 * 1.2816 * 0.2, rel=0.3)


def test_the_same_seed_grows_the_same_forest_and_another_another() -> None:
    rows, targets = made(200)
    new = made(20, 1)[0]
    first, again, other = (fit(rows, targets, SMALL, seed).points(new) for seed in (1, 1, 2))
    assert first.tolist() == again.tolist()
    assert first.tolist() != other.tolist()


def test_no_rows_have_no_quantiles() -> None:
    rows, targets = made(100)
    assert fit(rows, targets, SMALL, 0).points(np.empty((0, 8))).shape == (0, NUM_POINTS)


@pytest.mark.parametrize("shape", [(8,), (3, 7), (3, 9), (1, 1, 8)])
def test_rows_of_another_width_are_refused(shape: tuple[int, ...]) -> None:
    rows, targets = made(100)
    with pytest.raises(ValueError, match="shape"):
        fit(rows, targets, SMALL, 0).points(np.zeros(shape, dtype=np.float32))


def test_rows_in_any_layout_and_type_read_alike() -> None:
    rows, targets = made(200)
    forest, new = fit(rows, targets, SMALL, 0), made(20, 1)[0]
    expected = forest.points(new).tolist()
    assert forest.points(np.asfortranarray(new)).tolist() == expected
    assert forest.points(np.repeat(new, 2, axis=0)[::2]).tolist() == expected
    assert forest.points(new.astype(np.float64)).tolist() == expected


def test_a_row_with_something_that_is_no_number_still_reads() -> None:
    rows, targets = made(200)
    strange = np.full((1, 8), math.nan, dtype=np.float32)
    strange[0, :2] = math.inf, -math.inf
    points = fit(rows, targets, SMALL, 0).points(strange)
    assert np.isfinite(points).all()


@pytest.mark.parametrize("count", [2, 3, 5, 10])
def test_very_few_rows_make_a_forest(count: int) -> None:
    rows, targets = made(count)
    points = fit(rows, targets, ForestParameters(num_trees=5), 0).points(rows)
    assert np.isfinite(points).all()


@pytest.mark.parametrize("kind", ["none", "one", "nan-row", "infinite-target"])
def test_what_cannot_be_learnt_from_is_refused(kind: str) -> None:
    rows, targets = made(50)
    if kind == "none":
        rows, targets = rows[:0], targets[:0]
    elif kind == "one":
        rows, targets = rows[:1], targets[:1]
    elif kind == "nan-row":
        rows[3, 3] = math.nan
    else:
        targets[3] = math.inf
    with pytest.raises(ValueError, match="two or more rows"):
        fit(rows, targets, SMALL, 0)


def test_every_training_row_that_a_tree_drew_is_in_one_of_its_leaves() -> None:
    rows, targets = made(150)
    forest = fit(rows, targets, SMALL, 0)
    assert len(forest.leaf_ranks) == 150 * SMALL.num_trees
    assert forest.leaf_starts[-1] == len(forest.leaf_ranks)
    assert (np.diff(forest.leaf_starts) > 0).all()


def test_warming_up_is_no_error() -> None:
    warm_up()
    assert issubclass(Forest, msgspec.Struct)
