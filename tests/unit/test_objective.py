"""What goodput is worth: the objectives that ship, and a user's own kept from doing harm."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from rows import floats

from scheduler.objective import (
    OBJECTIVES,
    GoodputObjective,
    Guarded,
    WeightedTokens,
    WholeRequests,
    built_in_objective,
)
from scheduler.table import Floats

INPUTS, OUTPUTS = floats(100, 0, 7), floats(10, 5, 0)


class Returns:
    """An objective that answers everything with one thing, or raises it."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def answer_value(self, input_tokens: Floats, output_tokens: Floats) -> Any:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    stream_value = answer_value


def built_in(name: str) -> GoodputObjective:
    objective = built_in_objective(name)
    assert objective is not None
    return objective


# Ours ---------------------------------------------------------------------------------------------


def test_by_tokens_an_answer_is_worth_its_input_and_output_and_a_stream_what_is_in_time() -> None:
    objective = built_in("token")
    assert objective.answer_value(INPUTS, OUTPUTS).tolist() == [110, 5, 7]
    assert objective.stream_value(floats(3, 0), floats(9, 9)).tolist() == [3, 0]


def test_by_requests_everything_is_worth_one_or_nothing() -> None:
    objective = built_in("request")
    assert objective.answer_value(INPUTS, OUTPUTS).tolist() == [1, 1, 1]
    assert objective.stream_value(floats(9, 8.9, 0), floats(9, 9, 9)).tolist() == [1, 0, 0]


def test_weights_are_those_of_input_and_output_tokens() -> None:
    objective = built_in("0.5:2")
    assert objective.answer_value(INPUTS, OUTPUTS).tolist() == [70, 10, 3.5]
    assert objective.stream_value(floats(3), floats(9)).tolist() == [6]


@pytest.mark.parametrize("name", ["", "tokens", "module:name", "1:2:3", "1", ":", "1:x"])
def test_other_names_are_not_ours(name: str) -> None:
    assert built_in_objective(name) is None


@pytest.mark.parametrize("name", ["0:0", "-1:2", "1:-0.5", "nan:1", "1:inf", "1:1e400"])
def test_weights_that_make_no_sense_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="weights must be 0 or more and not both 0"):
        built_in_objective(name)


@pytest.mark.filterwarnings("ignore:overflow")
def test_weights_as_large_as_a_float_can_be_keep_values_finite() -> None:
    try:
        objective = built_in("1e308:1")
    except ValueError:
        return
    assert np.isfinite(objective.answer_value(floats(1e4), floats(1e4))).all()


def test_every_objective_has_a_value_for_nobody() -> None:
    for make in OBJECTIVES.values():
        assert make().answer_value(floats(), floats()).shape == (0,)
        assert make().stream_value(floats(), floats()).shape == (0,)


# A user's own -------------------------------------------------------------------------------------


class Squares:
    """One that is all right."""

    def answer_value(self, input_tokens: Floats, output_tokens: Floats) -> Floats:
        return input_tokens**2

    def stream_value(self, tokens_in_time: Floats, all_tokens: Floats) -> Floats:
        return tokens_in_time**2


def test_a_users_own_is_what_counts() -> None:
    guarded = Guarded(Squares())
    assert guarded.answer_value(INPUTS, OUTPUTS).tolist() == [10_000, 0, 49]
    assert guarded.stream_value(floats(3), floats(9)).tolist() == [9]
    assert guarded.num_errors == 0


def test_one_that_raises_counts_tokens_for_that_frame() -> None:
    guarded = Guarded(Returns(RuntimeError("no")))
    assert guarded.answer_value(INPUTS, OUTPUTS).tolist() == [110, 5, 7]
    assert guarded.stream_value(floats(3), floats(9)).tolist() == [3]
    assert guarded.num_errors == 2


def test_one_that_lacks_a_method_counts_tokens() -> None:
    guarded = Guarded(object())  # type: ignore[arg-type]
    assert guarded.answer_value(INPUTS, OUTPUTS).tolist() == [110, 5, 7]
    assert guarded.num_errors == 1


@pytest.mark.parametrize(
    "answer",
    [floats(1, 2), floats(1, 2, 3, 4), np.ones((3, 3)), np.ones((1, 3)), "text", [1, "x", 2]],
)
def test_one_that_returns_another_shape_counts_tokens(answer: Any) -> None:
    guarded = Guarded(Returns(answer))
    assert guarded.answer_value(INPUTS, OUTPUTS).tolist() == [110, 5, 7]
    assert guarded.num_errors == 1


@pytest.mark.parametrize("answer", [None, math.nan, 4.0, floats(4)])
def test_one_that_returns_one_number_for_all_or_nothing_counts_tokens(answer: Any) -> None:
    guarded = Guarded(Returns(answer))
    assert guarded.answer_value(INPUTS, OUTPUTS).tolist() == [110, 5, 7]
    assert guarded.num_errors == 1


def test_values_that_are_no_amounts_are_made_finite_and_0_or_more() -> None:
    guarded = Guarded(Returns(floats(math.nan, -math.inf, -3)))
    assert guarded.answer_value(INPUTS, OUTPUTS).tolist() == [0, 0, 0]
    huge = Guarded(Returns(floats(math.inf, 1e300, 5))).answer_value(INPUTS, OUTPUTS)
    assert np.isfinite(huge).all()
    assert huge[0] >= huge[1] > huge[2] == 5


def test_whole_numbers_are_values_too() -> None:
    assert Guarded(Returns([1, 2, 3])).answer_value(INPUTS, OUTPUTS).tolist() == [1, 2, 3]


def test_one_that_writes_to_what_it_gets_harms_nobody() -> None:
    class Vandal(Squares):
        def answer_value(self, input_tokens: Floats, output_tokens: Floats) -> Floats:
            input_tokens[:] = -1
            output_tokens[:] = -1
            raise ValueError

    inputs, outputs = floats(100), floats(10)
    assert Guarded(Vandal()).answer_value(inputs, outputs).tolist() == [110]
    assert (inputs.tolist(), outputs.tolist()) == ([100], [10])


@given(
    answer=arrays.arrays(np.float64, st.integers(0, 5)),
    size=st.integers(0, 5),
)
def test_whatever_one_returns_the_values_are_finite_and_fit_the_requests(
    answer: Floats, size: int
) -> None:
    tokens = np.arange(size, dtype=np.float64)
    for method in ("answer_value", "stream_value"):
        values = getattr(Guarded(Returns(answer)), method)(tokens, tokens)
        assert values.shape == (size,)
        assert np.isfinite(values).all()
        assert (values >= 0).all()


@given(tokens=st.lists(st.floats(0, 1e13), max_size=6), part=st.floats(0, 1))
def test_more_tokens_in_time_are_never_worth_less(tokens: list[float], part: float) -> None:
    whole = np.array(tokens)
    for objective in (WeightedTokens(), WeightedTokens(3, 0.5), WholeRequests()):
        less, more = (
            objective.stream_value(whole * part, whole),
            objective.stream_value(whole, whole),
        )
        assert (less <= more).all()
