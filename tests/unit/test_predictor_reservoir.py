"""The training data: bounded, the recent count more, the prior goes first."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.reservoir import PRIOR_ROWS_PER_REAL, Reservoir

COLUMNS = 3


def empty(capacity: int = 100, seed: int = 0) -> Reservoir:
    return Reservoir(COLUMNS, np.random.default_rng(seed), capacity)


def row(value: float) -> np.ndarray:
    return np.full(COLUMNS, value, dtype=np.float32)


def prior(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows whose numbers are below zero."""
    targets = -1.0 - np.arange(count, dtype=np.float64)
    return np.repeat(targets.astype(np.float32)[:, None], COLUMNS, axis=1), targets


def targets_of(reservoir: Reservoir) -> list[float]:
    rows, targets = reservoir.data()
    # A row and its target never part.
    assert (rows == targets[:, None].astype(np.float32)).all()
    return targets.tolist()


def test_an_empty_one_has_no_rows() -> None:
    rows, targets = empty().data()
    assert rows.shape == (0, COLUMNS)
    assert targets.shape == (0,)
    assert len(empty()) == 0


def test_what_was_added_is_there() -> None:
    reservoir = empty()
    for value in range(20):
        reservoir.add(row(value), value)
    assert targets_of(reservoir) == list(range(20))
    assert reservoir.num_added == 20


def test_there_are_never_more_rows_than_its_capacity() -> None:
    reservoir = empty(50)
    for value in range(1000):
        reservoir.add(row(value), value)
        assert len(reservoir) <= 50
    assert len(set(targets_of(reservoir))) == 50
    assert reservoir.num_added == 1000


def test_the_newest_row_is_always_there() -> None:
    reservoir = empty(20)
    for value in range(300):
        reservoir.add(row(value), value)
        assert value in targets_of(reservoir)


def test_the_recent_count_more() -> None:
    capacity = 400
    ages = []
    for seed in range(10):
        reservoir = empty(capacity, seed)
        for value in range(10 * capacity):
            reservoir.add(row(value), value)
        ages += [10 * capacity - target for target in targets_of(reservoir)]
    # Ages fall off exponentially: their mean is the capacity and about 63 in 100 are younger.
    assert np.mean(ages) == pytest.approx(capacity, rel=0.1)
    assert np.mean(np.array(ages) < capacity) == pytest.approx(1 - math.exp(-1), abs=0.05)
    # Something old is kept, too.
    assert max(ages) > 2 * capacity


def test_a_prior_is_where_it_begins() -> None:
    reservoir = empty()
    reservoir.fill(*prior(30))
    assert sorted(targets_of(reservoir)) == sorted(prior(30)[1].tolist())
    assert reservoir.num_prior == len(reservoir) == 30
    assert reservoir.num_added == 0


def test_of_too_large_a_prior_a_part_is_taken_from_everywhere() -> None:
    reservoir = empty(100)
    reservoir.fill(*prior(1000))
    found = targets_of(reservoir)
    assert len(set(found)) == reservoir.num_prior == 100
    assert min(found) < -700
    assert max(found) > -300


def test_rows_of_the_prior_go_first() -> None:
    reservoir = empty(100)
    reservoir.fill(*prior(100))
    for value in range(100):
        reservoir.add(row(value), value)
        # No real row has had to go.
        assert set(range(value + 1)) <= set(targets_of(reservoir))
    assert reservoir.num_prior == 0


def test_several_rows_of_the_prior_go_for_each_real_one() -> None:
    each = PRIOR_ROWS_PER_REAL
    reservoir = empty(100)
    reservoir.fill(*prior(100))
    for value in range(100 // each + 5):
        assert reservoir.num_prior == max(100 - each * value, 0)
        reservoir.add(row(value), value)
    assert reservoir.num_prior == 0


def test_what_is_handed_out_is_a_copy() -> None:
    reservoir = empty()
    reservoir.add(row(1), 1)
    rows, targets = reservoir.data()
    rows[:] = 99
    targets[:] = 99
    reservoir.add(row(2), 2)
    assert targets_of(reservoir) == [1, 2]
    assert targets.tolist() == [99]


def test_equal_seeds_keep_equal_rows() -> None:
    first, second = empty(20, 7), empty(20, 7)
    for value in range(200):
        first.add(row(value), value)
        second.add(row(value), value)
    assert targets_of(first) == targets_of(second)


@given(
    capacity=st.integers(1, 12),
    num_prior=st.integers(0, 20),
    num_real=st.integers(0, 40),
    seed=st.integers(0, 5),
)
def test_the_account_of_the_prior_is_right(
    capacity: int, num_prior: int, num_real: int, seed: int
) -> None:
    reservoir = empty(capacity, seed)
    reservoir.fill(*prior(num_prior))
    for value in range(num_real):
        reservoir.add(row(value), value)
        found = targets_of(reservoir)
        assert len(found) == len(set(found)) == len(reservoir) <= capacity
        assert reservoir.num_prior == sum(target < 0 for target in found)
    assert reservoir.num_added == num_real


# State --------------------------------------------------------------------------------------------


def test_state_restores_rows_targets_and_the_account() -> None:
    reservoir = empty()
    reservoir.fill(*prior(40))
    reservoir.add(row(3), 3)
    left = 40 - PRIOR_ROWS_PER_REAL
    other = empty(seed=1)
    other.restore({name: array.copy() for name, array in reservoir.state().items()})
    assert targets_of(other) == targets_of(reservoir)
    assert (other.num_prior, other.num_added, len(other)) == (left, 1, left + 1)
    other.add(row(9), 9)
    assert other.num_prior == max(left - PRIOR_ROWS_PER_REAL, 0)


def test_restoring_takes_the_place_of_what_was_there() -> None:
    other = empty()
    other.fill(*prior(90))
    small = empty()
    small.add(row(3), 3)
    other.restore(small.state())
    assert targets_of(other) == [3]
    assert other.num_prior == 0


def state_of(**changes: np.ndarray) -> dict[str, np.ndarray]:
    reservoir = empty()
    for value in range(4):
        reservoir.add(row(value), value)
    return {**reservoir.state(), **changes}


@pytest.mark.parametrize(
    "state",
    [
        state_of(rows=np.zeros((4, COLUMNS + 1))),
        state_of(rows=np.zeros(4)),
        state_of(rows=np.zeros((200, COLUMNS)), targets=np.zeros(200), is_prior=np.zeros(200)),
        state_of(targets=np.zeros(3)),
        state_of(is_prior=np.zeros(5)),
        state_of(num_added=np.zeros(2)),
        state_of(rows=np.full((4, COLUMNS), math.nan)),
        state_of(targets=np.full(4, math.inf)),
    ],
)
def test_a_state_that_cannot_be_is_refused(state: dict[str, np.ndarray]) -> None:
    with pytest.raises(ValueError, match="training rows"):
        empty().restore(state)
