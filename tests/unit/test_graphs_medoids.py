"""k-medoids: against all choices there are, with weights, duplicates and few items."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from program_shapes import Part, chain, packed, shape_of

from graphs.medoids import distance_matrix, distances_to, k_medoids
from graphs.shape import ProgramShape

Matrix = np.ndarray


def points(seed: int, count: int, columns: int = 2) -> Matrix:
    """Distances of random points in a plane, at most 1."""
    places = np.random.default_rng(seed).random((count, columns))
    found = np.linalg.norm(places[:, None] - places[None, :], axis=2) / math.sqrt(columns)
    return found.astype(np.float32)


def ones(count: int) -> Matrix:
    return np.ones(count, dtype=np.float32)


def cost(distances: Matrix, weight: Matrix, medoids: Matrix) -> float:
    return float((distances[:, medoids].min(axis=1) * weight).sum())


def optimum(distances: Matrix, weight: Matrix, k: int) -> float:
    choices = itertools.combinations(range(len(weight)), k)
    return min(cost(distances, weight, np.array(choice)) for choice in choices)


def checked(distances: Matrix, weight: Matrix, k: int, seed: int = 0) -> Matrix:
    """The medoids, after what must hold of any choice."""
    medoids, of = k_medoids(distances, weight, k, seed)
    count = len(weight)
    assert medoids.shape == (min(k, count),)
    assert of.shape == (count,)
    assert (np.diff(medoids) > 0).all()
    assert 0 <= medoids.min() <= medoids.max() < count
    assert 0 <= of.min() <= of.max() < len(medoids)
    nearest = distances[:, medoids].min(axis=1)
    assert (distances[np.arange(count), medoids[of]] == nearest).all()
    # A medoid is in its own cluster.
    assert of[medoids].tolist() == list(range(len(medoids)))
    return medoids


# Against all choices ------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_on_small_sets_it_is_near_the_best_choice_there_is(k: int) -> None:
    ratios = []
    for seed in range(25):
        distances, rng = points(seed, 9), np.random.default_rng(seed)
        weight = rng.uniform(0.1, 5, 9).astype(np.float32)
        best = optimum(distances, weight, k)
        ratios.append(cost(distances, weight, checked(distances, weight, k)) / best)
    assert min(ratios) >= 1 - 1e-5
    assert max(ratios) < 1.25
    assert np.mean(ratios) < 1.02


@given(st.integers(0, 10_000), st.integers(2, 14), st.integers(1, 6))
@settings(max_examples=60)
def test_no_swap_makes_it_better(seed: int, count: int, k: int) -> None:
    distances = points(seed, count)
    weight = np.random.default_rng(seed).uniform(0.1, 5, count).astype(np.float32)
    medoids = checked(distances, weight, k)
    reached = cost(distances, weight, medoids)
    others = [item for item in range(count) if item not in medoids]
    for place, other in itertools.product(range(len(medoids)), others):
        swapped = medoids.copy()
        swapped[place] = other
        assert cost(distances, weight, swapped) >= reached - 1e-4 * weight.sum()


@pytest.mark.parametrize("seed", range(5))
def test_clear_clusters_are_found(seed: int) -> None:
    rng = np.random.default_rng(seed)
    centres = np.array([[0, 0], [10, 0], [0, 10], [10, 10], [5, 20]])
    places = np.repeat(centres, 12, axis=0) + rng.normal(size=(60, 2)) * 0.3
    cluster = np.repeat(np.arange(5), 12)
    order = rng.permutation(60)
    places, cluster = places[order], cluster[order]
    distances = np.linalg.norm(places[:, None] - places[None, :], axis=2).astype(np.float32)
    distances /= distances.max()
    medoids, of = k_medoids(distances, ones(60), 5, seed)
    assert sorted(cluster[medoids].tolist()) == [0, 1, 2, 3, 4]
    assert (cluster[medoids[of]] == cluster).all()


def test_one_medoid_is_the_weighted_middle() -> None:
    for seed in range(20):
        distances = points(seed, 30)
        weight = np.random.default_rng(seed).uniform(0.01, 100, 30).astype(np.float32)
        (medoid,) = checked(distances, weight, 1)
        found = cost(distances, weight, np.array([medoid]))
        assert found == pytest.approx(optimum(distances, weight, 1), rel=1e-5)


def test_weight_draws_medoids() -> None:
    line = np.arange(5, dtype=np.float32)
    distances = np.abs(line[:, None] - line[None, :]) / 4
    weight = ones(5)
    assert checked(distances, weight, 1).tolist() == [2]
    weight[4] = 100
    assert checked(distances, weight, 1).tolist() == [4]
    weight[0] = 1000
    assert checked(distances, weight, 2).tolist() == [0, 4]


# Edges --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [6, 7, 1000])
def test_with_as_many_medoids_as_items_each_is_its_own(k: int) -> None:
    assert checked(points(1, 6), ones(6), k).tolist() == list(range(6))


def test_one_item_is_its_own_medoid() -> None:
    zero = np.zeros((1, 1), dtype=np.float32)
    assert checked(zero, ones(1), 1).tolist() == [0]


@pytest.mark.parametrize("k", [1, 3, 7])
def test_items_that_are_all_the_same_are_no_trouble(k: int) -> None:
    distances = np.zeros((7, 7), dtype=np.float32)
    medoids, of = k_medoids(distances, ones(7), k, 0)
    assert len(set(medoids.tolist())) == len(medoids) == k
    assert ((of >= 0) & (of < k)).all()


def test_duplicates_share_a_medoid_while_others_have_none() -> None:
    # Three places, many times each: three medoids leave nothing to be desired.
    places = np.array([0, 0, 0, 1, 1, 3, 3, 3, 3], dtype=np.float32)
    distances = np.abs(places[:, None] - places[None, :]) / 3
    medoids, of = k_medoids(distances, ones(9), 3, 0)
    assert cost(distances, ones(9), medoids) == 0
    assert (places[medoids[of]] == places).all()


def test_items_equally_far_from_each_other_are_no_trouble() -> None:
    distances = (1 - np.eye(8)).astype(np.float32)
    assert len(checked(distances, ones(8), 3)) == 3


def test_equal_seeds_choose_alike() -> None:
    distances = points(3, 60)
    first, second = (k_medoids(distances, ones(60), 10, 5) for _ in range(2))
    assert first[0].tolist() == second[0].tolist()
    assert first[1].tolist() == second[1].tolist()


def test_what_it_is_given_is_left_as_it_was() -> None:
    distances, weight = points(3, 30), ones(30)
    before = distances.copy()
    k_medoids(distances, weight, 4, 0)
    assert (distances == before).all()
    assert (weight == 1).all()


def test_any_weights_above_zero_will_do() -> None:
    rng = np.random.default_rng(0)
    weight = np.exp(rng.uniform(-10, 13, 40)).astype(np.float32)
    medoids = checked(points(4, 40), weight, 5)
    assert int(weight.argmax()) in medoids


# Distances between programs -----------------------------------------------------------------------

PARTS = st.tuples(
    st.integers(1, 3), st.integers(1, 2000), st.integers(1, 3000), st.floats(0, 50)
).map(lambda drawn: Part((drawn[1],) * drawn[0], drawn[2], tool_s=drawn[3], model=drawn[0]))
SHAPES = st.builds(
    lambda parts, application: shape_of(*parts, application=application),
    st.lists(PARTS, min_size=1, max_size=5),
    st.integers(0, 2),
)


def distance(first: ProgramShape, second: ProgramShape) -> float:
    pack = packed(first, second)
    return float(distance_matrix(pack)[0, 1])


@settings(max_examples=50, deadline=None)
@given(st.lists(SHAPES, min_size=1, max_size=10))
def test_distances_are_symmetric_and_between_zero_and_one(shapes: list[ProgramShape]) -> None:
    pack = packed(*shapes)
    matrix = distance_matrix(pack)
    assert matrix.shape == (len(shapes), len(shapes))
    assert np.isfinite(matrix).all()
    assert matrix.min() >= 0
    assert matrix.max() <= 1 + 1e-6
    assert matrix == pytest.approx(matrix.T, abs=1e-6)
    assert np.diag(matrix) == pytest.approx(np.zeros(len(shapes)), abs=1e-6)
    for index, shape in enumerate(shapes):
        row = distances_to(pack, pack.encode(shape))
        assert row == pytest.approx(matrix[index], abs=1e-6)
        assert distances_to(pack, pack.at(index)) == pytest.approx(row, abs=1e-6)


def test_the_same_program_is_no_distance_away() -> None:
    assert distance(chain(100, 200), chain(100, 200)) == pytest.approx(0, abs=1e-6)


def test_a_stage_that_one_of_two_has_not_is_not_alike() -> None:
    assert distance(chain(100, 200, 300), chain(100, 200)) == pytest.approx(1 / 3, abs=1e-5)
    assert distance(chain(100), chain(100, 200, 300, 400)) == pytest.approx(3 / 4, abs=1e-5)


def test_other_tools_are_farther_and_not_as_far_as_another_model() -> None:
    first = shape_of(Part(), Part(model=8, tools=(3,)))
    assert distance(first, shape_of(Part(), Part(model=8, tools=(3, 3)))) == pytest.approx(0)
    for tools in ((), (4,), (3, 4)):
        other = shape_of(Part(), Part(model=8, tools=tools))
        assert 0.01 < distance(first, other) < 0.45


def test_a_stage_of_another_model_is_not_alike() -> None:
    first = shape_of(Part(), Part(model=8))
    assert distance(first, shape_of(Part(), Part(model=9))) == pytest.approx(1 / 2, abs=1e-5)


def test_nearer_numbers_are_nearer() -> None:
    base = chain(100, 200, 300)
    found = [distance(base, chain(100, 200, tokens)) for tokens in (300, 400, 800, 3000)]
    assert found == sorted(found)
    assert len(set(found)) == 4
    assert found[-1] <= 1 / 3 + 1e-5


def test_programs_of_two_applications_are_never_alike() -> None:
    one, two, none = (chain(100, 200, application=name) for name in (5, 6, 0))
    assert distance(one, two) == pytest.approx(1)
    assert distance(one, one) == pytest.approx(0, abs=1e-6)
    assert distance(none, none) == pytest.approx(0, abs=1e-6)


def test_clustering_two_applications_keeps_both() -> None:
    shapes = [chain(100, 200 + n, application=5) for n in range(10)]
    shapes += [chain(100, 200 + n, application=6) for n in range(10)]
    pack = packed(*shapes)
    medoids, of = k_medoids(distance_matrix(pack), pack.weight.copy(), 2, 0)
    assert [shapes[index].application for index in medoids] == [5, 6]
    assert of.tolist() == [0] * 10 + [1] * 10
