"""Forecasts on the serving side, refined there."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.book import LengthBook
from predictor.calibration import MARKS, NUM_BUCKETS
from predictor.distribution import LEVELS, NUM_LEVELS, points_of_sample

POINTS = points_of_sample(np.exp(np.random.default_rng(3).normal(5.5, 0.8, 5000)))


def book_with(lengths: object = None) -> LengthBook:
    book = LengthBook()
    book.enter("r", POINTS if lengths is None else points_of_sample(lengths))  # type: ignore[arg-type]
    return book


def factors(value: float) -> np.ndarray:
    return np.full((NUM_BUCKETS, NUM_LEVELS), value, dtype=np.float32)


def test_nobody_knows_anything_of_a_request_without_a_forecast() -> None:
    book = LengthBook()
    assert "r" not in book
    assert book.remaining("r", 5) is None
    assert book.refine("r", 5) is None
    assert book.bound_tokens("r", 5, 0.9) is None
    book.forget("r")


def test_a_forecast_is_there_until_it_is_forgotten() -> None:
    book = book_with()
    assert "r" in book
    assert len(book) == 1
    book.forget("r")
    assert "r" not in book
    assert book.refine("r", 0) is None


def test_a_second_forecast_takes_the_place_of_the_first() -> None:
    book = book_with()
    book.enter("r", points_of_sample([7]))
    assert len(book) == 1
    assert book.bound_tokens("r", 0, 0.9) == pytest.approx(7)


def test_the_bound_is_the_quantile_of_the_forecast() -> None:
    for quantile in (0.5, 0.9, 0.95):
        bound = book_with().bound_tokens("r", 0, quantile)
        assert bound == pytest.approx(np.quantile(POINTS, quantile), rel=0.03)


@pytest.mark.parametrize("generated", [50, 200, 400, 800])
def test_the_bound_is_refined_by_what_has_been_generated(generated: int) -> None:
    beyond = POINTS[generated < POINTS]
    bound = book_with().bound_tokens("r", generated, 0.9)
    assert bound == pytest.approx(np.quantile(beyond, 0.9), rel=0.05)


@given(
    generated=st.integers(0, 1 << 20),
    factor=st.floats(0.02, 50),
    lengths=st.lists(st.integers(0, 5000), min_size=1, max_size=20),
)
def test_totals_ascend_above_what_is_there(
    generated: int, factor: float, lengths: list[int]
) -> None:
    book = book_with(lengths)
    book.calibrate(factors(factor))
    total = book.refine("r", generated)
    assert total is not None
    assert total.shape == (NUM_LEVELS,)
    assert (total >= generated).all()
    assert (np.diff(total) >= 0).all()
    assert np.isfinite(total).all()


def test_factors_scale_what_is_still_to_come() -> None:
    book = book_with()
    plain = book.remaining("r", 100)
    book.calibrate(factors(2.0))
    doubled = book.remaining("r", 100)
    assert plain is not None
    assert doubled is not None
    assert doubled == pytest.approx(2 * plain)


def test_factors_count_from_their_mark_on() -> None:
    book = book_with([1000])
    only = factors(1.0)
    only[2] = 3.0
    book.calibrate(only)
    begins, ends = int(MARKS[2]), int(MARKS[3])
    for generated, factor in ((begins - 1, 1), (begins, 3), (ends - 1, 3), (ends, 1)):
        remaining = book.remaining("r", generated)
        assert remaining == pytest.approx(np.full(NUM_LEVELS, factor * (1000 - generated)))


def test_factors_that_cross_leave_the_levels_ascending() -> None:
    book = book_with()
    book.calibrate(np.tile(np.linspace(5, 0.1, NUM_LEVELS, dtype=np.float32), (NUM_BUCKETS, 1)))
    for generated in (0, 60, 500, 10_000):
        total = book.refine("r", generated)
        assert total is not None
        assert (np.diff(total) >= 0).all()


@given(generated=st.integers(0, 5000), levels=st.lists(st.floats(0, 1), min_size=2, max_size=2))
def test_a_higher_quantile_never_gives_a_lower_bound(generated: int, levels: list[float]) -> None:
    book = book_with()
    low, high = (book.bound_tokens("r", generated, level) for level in sorted(levels))
    assert low is not None
    assert high is not None
    assert generated < low <= high + 1e-3


def test_requests_are_refined_apart() -> None:
    book = book_with([10])
    book.enter("s", points_of_sample([500]))
    assert book.bound_tokens("r", 0, 0.9) == pytest.approx(10)
    assert book.bound_tokens("s", 0, 0.9) == pytest.approx(500)


def test_refinements_are_counted() -> None:
    book = book_with()
    for generated in range(5):
        book.refine("r", generated)
    assert book.num_refinements == 5


def test_the_levels_are_read_where_they_say() -> None:
    total = book_with().refine("r", 0)
    assert total is not None
    for level, tokens in zip(LEVELS, total, strict=True):
        assert (tokens >= POINTS).mean() == pytest.approx(level, abs=0.01)
