"""A length distribution and what is left of it after g tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.distribution import (
    LEVELS,
    MAX_TOKENS,
    MIN_AHEAD,
    NUM_LEVELS,
    NUM_POINTS,
    POINT_LEVELS,
    at_level,
    points_of_sample,
    remaining_at_levels,
    remaining_of_many,
)

LENGTHS = st.lists(st.floats(0, 1e5) | st.integers(0, 3000), min_size=1, max_size=60)
RNG = np.random.default_rng(5)
LOGNORMAL = points_of_sample(np.exp(RNG.normal(5.5, 0.8, 20_000)))


# Points -------------------------------------------------------------------------------------------


def test_levels_are_the_middles_of_equal_masses() -> None:
    assert pytest.approx(np.diff(LEVELS)) == np.full(NUM_LEVELS - 1, 1 / NUM_LEVELS)
    assert LEVELS.mean() == pytest.approx(0.5)
    assert POINT_LEVELS.mean() == pytest.approx(0.5)


@given(LENGTHS)
def test_points_lie_within_the_sample_and_ascend(lengths: list[float]) -> None:
    points = points_of_sample(lengths)
    assert points.shape == (NUM_POINTS,)
    assert (np.diff(points) >= 0).all()
    assert np.float32(min(lengths)) <= points[0]
    assert points[-1] <= np.float32(max(lengths))


def test_points_have_the_quantiles_of_the_sample() -> None:
    sample = RNG.exponential(400, 50_000)
    points = points_of_sample(sample)
    for level in (0.1, 0.5, 0.9, 0.98):
        assert np.quantile(points, level) == pytest.approx(np.quantile(sample, level), rel=0.02)


@pytest.mark.parametrize("lengths", [[], [-1], [5, float("nan")], [float("inf")]])
def test_a_sample_that_is_none_is_refused(lengths: list[float]) -> None:
    with pytest.raises(ValueError, match="lengths"):
        points_of_sample(lengths)


def test_lengths_beyond_all_measure_count_as_the_longest() -> None:
    assert points_of_sample([1e30])[0] == np.float32(MAX_TOKENS)


# Refinement ---------------------------------------------------------------------------------------


def test_before_the_first_token_the_rest_is_the_whole() -> None:
    found = remaining_at_levels(LOGNORMAL, 0)
    for level, tokens in zip(LEVELS, found, strict=True):
        assert (tokens > LOGNORMAL).mean() <= level + 1 / NUM_POINTS
        assert (tokens >= LOGNORMAL).mean() >= level - 1 / NUM_POINTS


@pytest.mark.parametrize("generated", [1, 50, 100, 200, 400, 800, 1200])
def test_the_rest_is_what_is_left_of_the_points_beyond(generated: int) -> None:
    beyond = LOGNORMAL[generated < LOGNORMAL] - generated
    assert len(beyond) > MIN_AHEAD
    found = remaining_at_levels(LOGNORMAL, generated)
    for level, tokens in zip(LEVELS, found, strict=True):
        # The share of what is left that is shorter: exact up to one point.
        assert (beyond < tokens).mean() <= level + 1 / len(beyond)
        assert (beyond <= tokens).mean() >= level - 1 / len(beyond)
    assert found[0] >= beyond.min() - 1e-3
    assert found[-1] <= beyond.max() + 1e-3
    assert np.median(found) == pytest.approx(np.median(beyond), rel=0.05)


@given(lengths=LENGTHS, generated=st.integers(0, 1000))
def test_the_rest_equals_the_empirical_truncation(lengths: list[float], generated: int) -> None:
    points = points_of_sample(lengths)
    beyond = points[points > generated].astype(np.float64) - generated
    if len(beyond) < MIN_AHEAD:
        return
    found = remaining_at_levels(points, generated)
    below = np.quantile(beyond, np.maximum(LEVELS - 1 / len(beyond), 0), method="lower")
    above = np.quantile(beyond, np.minimum(LEVELS + 1 / len(beyond), 1), method="higher")
    slack = 1e-3 + 1e-6 * np.abs(beyond).max()
    assert (found >= below - slack).all()
    assert (found <= above + slack).all()


@given(lengths=LENGTHS, generated=st.integers(0, 1 << 20))
def test_the_rest_ascends_and_is_more_than_nothing(lengths: list[float], generated: int) -> None:
    found = remaining_at_levels(points_of_sample(lengths), generated)
    assert found.shape == (NUM_LEVELS,)
    assert np.isfinite(found).all()
    assert (np.diff(found) >= 0).all()
    assert (found >= 0).all()
    if generated:
        assert (found > 0).all()


def test_the_bound_on_the_whole_never_falls_while_the_answer_goes_on() -> None:
    bounds = [
        generated + float(at_level(remaining_at_levels(LOGNORMAL, generated), 0.9))
        for generated in range(0, 1500, 10)
    ]
    assert (np.diff(bounds) >= -1e-2).all()


def test_an_answer_as_long_as_a_point_is_not_expected_to_end_like_it() -> None:
    points = np.repeat(np.float32([100, 300]), NUM_POINTS // 2)
    assert remaining_at_levels(points, 100).tolist() == [200.0] * NUM_LEVELS
    assert remaining_at_levels(points, 99)[0] == 1


@pytest.mark.parametrize("generated", [10_000, 100_000, 1 << 20])
def test_an_answer_longer_than_all_that_is_known_goes_on_for_a_part_of_its_length(
    generated: int,
) -> None:
    found = remaining_at_levels(LOGNORMAL, generated)
    assert (found > 0).all()
    assert (np.diff(found) > 0).all()
    assert 0.1 * generated < found.mean() < 1.5 * generated
    assert found.max() < 10 * generated


def test_a_forecast_of_nothing_at_all_is_outlived_sanely() -> None:
    nothing = np.zeros(NUM_POINTS, dtype=np.float32)
    for generated in (0, 1, 5):
        found = remaining_at_levels(nothing, generated)
        assert np.isfinite(found).all()
        assert 0 <= found[0] <= found[-1] < 1000


@given(
    samples=st.lists(LENGTHS, min_size=1, max_size=5),
    generated=st.lists(st.integers(0, 4000), min_size=5, max_size=5),
)
def test_many_rows_at_once_equal_one_after_the_other(
    samples: list[list[float]], generated: list[int]
) -> None:
    points = np.stack([points_of_sample(sample) for sample in samples])
    tokens = np.array(generated[: len(samples)])
    together = remaining_of_many(points, tokens)
    assert together.shape == (len(samples), NUM_LEVELS)
    for index in range(len(samples)):
        single = remaining_at_levels(points[index], int(tokens[index]))
        assert together[index].tolist() == single.tolist()


def test_no_rows_are_no_rows() -> None:
    none = np.empty((0, NUM_POINTS), dtype=np.float32)
    assert remaining_of_many(none, np.empty(0, dtype=np.int64)).shape == (0, NUM_LEVELS)


def test_refining_changes_nothing_of_the_forecast() -> None:
    before = LOGNORMAL.copy()
    remaining_at_levels(LOGNORMAL, 300)[:] = -1
    remaining_at_levels(LOGNORMAL, 10**6)[:] = -1
    assert (before == LOGNORMAL).all()
    assert (remaining_at_levels(LOGNORMAL, 10**6) > 0).all()


# Reading ------------------------------------------------------------------------------------------


def test_values_are_read_at_their_own_levels_and_between() -> None:
    values = np.arange(NUM_LEVELS, dtype=np.float64) * 10
    for index, level in enumerate(LEVELS):
        assert at_level(values, level) == pytest.approx(10 * index)
    assert at_level(values, 0.5) == pytest.approx(values.mean())


def test_beyond_the_outermost_levels_the_ends_are_held() -> None:
    values = np.arange(NUM_LEVELS, dtype=np.float64)
    assert at_level(values, 0.0) == at_level(values, -1) == 0
    assert at_level(values, 1.0) == at_level(values, 2) == NUM_LEVELS - 1


def test_many_rows_are_read_at_once() -> None:
    rows = np.stack([np.arange(NUM_LEVELS), np.arange(NUM_LEVELS) * 2.0])
    assert at_level(rows, 0.9).tolist() == [at_level(rows[0], 0.9), at_level(rows[1], 0.9)]


@given(st.lists(st.floats(0, 1), min_size=2, max_size=2))
def test_a_higher_level_never_reads_lower(levels: list[float]) -> None:
    low, high = sorted(levels)
    values = remaining_at_levels(LOGNORMAL, 100)
    assert at_level(values, low) <= at_level(values, high) + 1e-9
