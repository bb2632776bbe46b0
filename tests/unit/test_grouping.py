"""The group of requests of like length, against trying every window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows import Ask, estimates_of

from scheduler.policies.grouping import CANDIDATES_PER_SLOT, best_batch_size, best_window
from scheduler.step_time import StepTimeModel


def group(
    scores: Sequence[float],
    lengths: Sequence[float],
    size: int,
    *,
    cutoff: float = 0.5,
    step_time: StepTimeModel | None = None,
) -> list[int]:
    """The best window of requests that arrived in this order."""
    serial = np.arange(len(scores))
    found = best_window(
        np.lexsort((serial, -np.array(scores, dtype=np.float64))),
        np.array(scores, dtype=np.float64),
        lengths=np.array(lengths, dtype=np.float64),
        serial=serial,
        size=size,
        cutoff=cutoff,
        step_time=step_time,
    )
    return found.tolist()


def candidates(scores: Sequence[float], size: int, cutoff: float) -> list[int]:
    """Who reaches the cutoff, of the best ranked ones."""
    ranked = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    floor = scores[ranked[size - 1]]
    floor = floor * cutoff if floor >= 0 else floor / cutoff
    return [index for index in ranked[: size * CANDIDATES_PER_SLOT] if scores[index] >= floor]


def windows(
    scores: Sequence[float], lengths: Sequence[float], size: int, cutoff: float
) -> list[list[int]]:
    """All groups of neighbours by length, shortest first."""
    order = sorted(candidates(scores, size, cutoff), key=lambda index: (lengths[index], index))
    return [order[start : start + size] for start in range(len(order) - size + 1)]


def test_a_group_of_like_length_replaces_near_equals_of_unlike_length() -> None:
    # The two best are 0 and 3; 3 and 4 are worth more than any other neighbours.
    assert group([10, 7, 7, 9.5, 9], [10, 20, 30, 900, 910], 2) == [3, 4]


def test_below_the_cutoff_nobody_is_a_candidate() -> None:
    assert group([10, 7, 7, 9.5, 9], [10, 20, 30, 900, 910], 2, cutoff=0.99) == [0, 3]


def test_of_equal_groups_the_one_of_shorter_requests_wins() -> None:
    assert group([5, 5, 5, 5], [40, 10, 30, 20], 2) == [1, 3]


def test_of_equal_scores_and_lengths_the_ones_that_came_first_win() -> None:
    assert group([5] * 5, [10] * 5, 2) == [0, 1]


def test_the_best_of_a_group_comes_first() -> None:
    assert group([5, 9, 7], [10, 20, 30], 3) == [1, 2, 0]


@pytest.mark.parametrize(("size", "found"), [(0, []), (-1, []), (3, [1, 2, 0]), (9, [1, 2, 0])])
def test_where_all_fit_or_none_there_is_nothing_to_group(size: int, found: list[int]) -> None:
    assert group([5, 9, 7], [10, 20, 30], size) == found


def test_nobody_makes_no_group() -> None:
    assert group([], [], 4) == []


def test_only_the_best_ranked_are_looked_at() -> None:
    # Behind the eight that are looked at comes a pair that is worth no less.
    scores = [10.0] * 3 * CANDIDATES_PER_SLOT
    lengths = [float(1000 - place) for place in range(len(scores))]
    assert group(scores, lengths, 1) == [CANDIDATES_PER_SLOT - 1]


def test_of_groups_worth_less_than_nothing_the_least_bad_wins() -> None:
    assert group([-4, -1, -2, -3], [10, 20, 30, 40], 2, cutoff=0.1) == [1, 2]


sizes = st.integers(1, 5)
requests = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 30)), min_size=1, max_size=45)
cutoffs = st.sampled_from([0.25, 0.5, 0.75, 1.0])


@given(requests=requests, size=sizes, cutoff=cutoffs)
def test_no_window_has_a_larger_sum_and_none_of_shorter_requests_the_same(
    requests: list[tuple[int, int]], size: int, cutoff: float
) -> None:
    scores, lengths = zip(*requests, strict=True)
    found = group(scores, lengths, size, cutoff=cutoff)
    if len(scores) <= size:
        assert sorted(found) == list(range(len(scores)))
        return
    worth = [
        sum(scores[index] for index in window) for window in windows(scores, lengths, size, cutoff)
    ]
    best = windows(scores, lengths, size, cutoff)[worth.index(max(worth))]
    assert found == sorted(best, key=lambda index: (-scores[index], index))


@given(requests=requests, size=sizes, cutoff=cutoffs)
def test_everybody_in_a_group_reaches_the_cutoff(
    requests: list[tuple[int, int]], size: int, cutoff: float
) -> None:
    scores, lengths = zip(*requests, strict=True)
    found = group(scores, lengths, size, cutoff=cutoff)
    assert len(set(found)) == len(found) == min(size, len(scores))
    if len(scores) > size:
        assert set(found) <= set(candidates(scores, size, cutoff))


@given(
    requests=st.lists(
        st.tuples(
            st.floats(allow_nan=False, allow_infinity=False).map(
                lambda score: min(max(score, -1e300), 1e300)
            ),
            st.floats(0, 1e13),
        ),
        min_size=1,
        max_size=30,
    ),
    size=sizes,
    engine=st.sampled_from([None, StepTimeModel.known(0.01, padding_s=1e-6)]),
)
def test_absurd_scores_still_make_a_full_group(
    requests: list[tuple[float, float]], size: int, engine: Any
) -> None:
    scores, lengths = zip(*requests, strict=True)
    found = group(scores, lengths, size, step_time=engine)
    assert len(set(found)) == len(found) == min(size, len(scores))


# By the model of the engine -----------------------------------------------------------------------


def rate(
    window: Sequence[int], scores: Sequence[float], lengths: Sequence[float], engine: StepTimeModel
) -> float:
    """What a group earns per second: its scores over a step with its contexts and padding."""
    contexts = [lengths[index] for index in window]
    padding = len(contexts) * max(contexts) - sum(contexts)
    seconds = engine.step_s(len(contexts), sum(contexts), 0, padding)
    return sum(scores[index] for index in window) / seconds


def test_where_padding_costs_nothing_the_top_of_the_ranking_runs() -> None:
    engine = StepTimeModel.known(0.01, 0.001)
    assert group([10, 8, 9], [10, 20, 900], 2, step_time=engine) == [0, 2]


def test_where_padding_is_dear_requests_of_like_length_run() -> None:
    engine = StepTimeModel.known(0.01, padding_s=1e-4)
    assert group([10, 8, 9], [10, 20, 900], 2, step_time=engine) == [0, 1]


def test_a_long_context_is_no_reason_to_run_another_it_costs_its_time_later() -> None:
    engine = StepTimeModel.known(0.001, context_s=1e-4)
    assert group([10, 10, 9, 9], [900, 910, 10, 20], 2, step_time=engine) == [0, 1]


@given(requests=requests, size=sizes, cutoff=cutoffs, padding_s=st.sampled_from([0.0, 1e-4, 1e-2]))
def test_no_group_of_neighbours_nor_the_top_earns_more_per_second(
    requests: list[tuple[int, int]], size: int, cutoff: float, padding_s: float
) -> None:
    scores, lengths = zip(*requests, strict=True)
    if len(scores) <= size:
        return
    engine = StepTimeModel.known(0.01, padding_s=padding_s)
    found = group(scores, lengths, size, cutoff=cutoff, step_time=engine)
    top = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[:size]
    groups = [top, *windows(scores, lengths, size, cutoff)]
    best = max(rate(window, scores, lengths, engine) for window in groups)
    assert rate(found, scores, lengths, engine) == pytest.approx(best, rel=1e-9)


# How many run -------------------------------------------------------------------------------------


def size_of(
    earned: Callable[[int, float], float], *asks: Ask, slots: int = 8, current: int = 0
) -> int:
    """The batch size chosen of these requests on an engine of 10 ms and 10 ms per request."""
    near = estimates_of(*asks, step_time=StepTimeModel.known(0.01, 0.01))
    return best_batch_size(earned, near, slots=slots, current=current)


def test_all_run_where_running_more_costs_nobody_anything() -> None:
    assert size_of(lambda size, step_s: size, *[Ask()] * 8) == 8


def test_fewer_run_where_more_would_be_too_slow_for_all() -> None:
    # At more than 50 ms a step nobody is in time any more.
    def in_time(size: int, step_s: float) -> float:
        return size * (step_s <= 0.05)

    assert size_of(in_time, *[Ask()] * 8) == 4


def test_time_has_a_price_only_while_others_wait_for_a_place() -> None:
    # The last ones bring next to nothing and make a step twice as long.
    def earned(size: int, step_s: float) -> float:
        return min(size, 2) + 0.01 * size

    assert size_of(earned, *[Ask()] * 6, slots=8) == 6
    assert size_of(earned, *[Ask()] * 8, slots=8) == 2


def test_a_slightly_better_size_does_not_replace_the_current_one() -> None:
    def earned(size: int, step_s: float) -> float:
        return 1.01 if size == 5 else 1.0 if size == 3 else 0.5

    assert size_of(earned, *[Ask()] * 6, current=3) == 3
    assert size_of(earned, *[Ask()] * 6, current=0) == 5


def test_no_more_run_than_there_are_requests_or_places() -> None:
    def earned(size: int, step_s: float) -> float:
        return size

    assert size_of(earned, *[Ask()] * 3, slots=8) == 3
    assert size_of(earned, *[Ask()] * 300, slots=64) == 64
    assert size_of(earned, Ask(), slots=8) == 1
