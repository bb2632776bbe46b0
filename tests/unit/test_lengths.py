"""How long an answer will be: equal-mass points, what is learnt, and what is left of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows import ABSURD, Ask, floats, request_of, rows_of, steps, table_of

from core.slo import BestEffortSlo, DeadlineSlo, LatencySlo, Slo
from scheduler.lengths import (
    PRIOR_TOKENS,
    AverageRequest,
    Information,
    OnlineClassLengths,
    Remaining,
    equal_mass_points,
    refresh,
)
from scheduler.request import Request
from scheduler.table import NUM_POINTS, Points

DEADLINE = DeadlineSlo(60.0)
lengths_of_answers = st.lists(st.floats(0, 1e6), min_size=1, max_size=80)


def ended(tokens: int, slo: Slo = DEADLINE, *, max_output_tokens: int = 10_000) -> Request:
    """A request that ended after so many tokens."""
    ask = Ask(slo=slo, generated=tokens, max_output_tokens=max_output_tokens)
    return table_of(ask).requests[0]


def taught(*lengths: int, slo: Slo = DEADLINE, window: int = 512) -> OnlineClassLengths:
    """Estimates after answers of these lengths have finished."""
    estimates = OnlineClassLengths(window=window)
    for length in lengths:
        estimates.learn(ended(length, slo), is_censored=False)
    return estimates


def remaining(*, points: Points | tuple[float, ...], quantile: float = 0.9, **ask: Any) -> Any:
    """Mean and bound of what is left of an answer with these points."""
    table = table_of(Ask(points=tuple(map(float, points)), **ask), quantile=quantile)
    return float(table.mean_tokens[0]), float(table.bound_tokens[0])


# Equal-mass points --------------------------------------------------------------------------------


def test_one_length_is_a_certainty() -> None:
    assert equal_mass_points([7.0]).tolist() == [7.0] * NUM_POINTS


def test_two_lengths_make_points_that_ascend_between_them_around_their_mean() -> None:
    points = equal_mass_points([10.0, 30.0])
    assert points.min() >= 10
    assert points.max() <= 30
    assert points.mean() == pytest.approx(20)


def test_a_forecast_of_exactly_that_many_points_is_taken_as_it_is() -> None:
    forecast = [float(10 * (place + 1)) for place in range(NUM_POINTS - 1)] + [5000.0]
    assert equal_mass_points(forecast) == pytest.approx(forecast)


def test_a_skewed_sample_keeps_its_mean() -> None:
    assert equal_mass_points([10.0, 20.0, 30.0, 100.0]).mean() == pytest.approx(40, rel=0.02)


def test_a_large_sample_keeps_its_quantiles() -> None:
    points = equal_mass_points([float(length) for length in range(3200)])
    # Point i stands for the lengths from 100 i to 100 i + 99.
    expected = [100 * place + 49.5 for place in range(NUM_POINTS)]
    assert points == pytest.approx(expected, abs=1.0)


def test_the_order_of_a_sample_makes_no_difference() -> None:
    assert (
        equal_mass_points([3.0, 1.0, 2.0]).tolist() == equal_mass_points([1.0, 2.0, 3.0]).tolist()
    )


@pytest.mark.parametrize(
    "lengths",
    [[], [math.nan], [1.0, math.nan], [math.inf], [1.0, -math.inf], [-1.0, 5.0], [[1.0, 2.0]]],
)
def test_what_is_no_forecast_is_refused(lengths: Any) -> None:
    with pytest.raises(ValueError, match="finite lengths of 0 or more"):
        equal_mass_points(lengths)


@given(lengths=st.lists(st.floats(0, 1e308), min_size=1, max_size=80))
def test_points_ascend_and_stay_finite_and_within_the_sample(lengths: list[float]) -> None:
    points = equal_mass_points(lengths)
    assert points.shape == (NUM_POINTS,)
    assert np.isfinite(points).all()
    assert (np.diff(points) >= 0).all()
    assert points[0] >= np.float32(min(*lengths, 1e9))
    assert points[-1] <= np.float32(min(max(lengths), 1e9))


# What is learnt -----------------------------------------------------------------------------------


def test_before_any_answer_lengths_are_uniform_up_to_512() -> None:
    points = OnlineClassLengths().points("deadline")
    # Equal masses of a uniform law have their middles at odd 64ths of it.
    expected = [512 * (2 * place + 1) / 64 for place in range(NUM_POINTS)]
    assert points == pytest.approx(expected, abs=1.5)
    assert OnlineClassLengths().average_tokens == pytest.approx(256, abs=1)


def test_finished_answers_replace_what_was_assumed() -> None:
    assert taught(40, 40, 40).points("deadline").tolist() == [40.0] * NUM_POINTS


def test_classes_learn_apart() -> None:
    estimates = taught(10, 10)
    estimates.learn(ended(400, LatencySlo(1, 1)), is_censored=False)
    assert estimates.points("deadline").mean() == 10
    assert estimates.points("latency").mean() == 400
    assert estimates.points("best_effort").max() > 500
    assert estimates.average_tokens == 140


def test_only_the_answers_of_the_window_count() -> None:
    estimates = taught(1000, 1000, 20, 20, window=2)
    assert estimates.points("deadline").mean() == 20
    assert estimates.average_tokens == 20


def test_an_answer_cut_off_early_teaches_nothing() -> None:
    estimates = taught(10)
    version = estimates.version
    estimates.learn(ended(500), is_censored=True)
    assert estimates.points("deadline").mean() == 10
    assert estimates.average_tokens == 10
    assert estimates.version == version


def test_an_answer_cut_off_at_max_tokens_counts_in_full() -> None:
    estimates = OnlineClassLengths()
    estimates.learn(ended(50, max_output_tokens=50), is_censored=True)
    assert estimates.points("deadline").mean() == 50


def test_the_first_answers_count_at_once() -> None:
    estimates = taught(10)
    assert estimates.points("deadline").mean() == 10
    estimates.learn(ended(30), is_censored=False)
    assert estimates.points("deadline").mean() == pytest.approx(20)


def test_later_answers_count_once_they_are_an_eighth_of_what_is_known() -> None:
    estimates = taught(*[10] * 400)
    version = estimates.version
    for _ in range(100):
        estimates.learn(ended(1000), is_censored=False)
    assert 1 <= estimates.version - version <= 4
    assert estimates.points("deadline").max() == 1000


@given(
    answers=st.lists(
        st.tuples(
            st.integers(0, 900), st.sampled_from([DEADLINE, LatencySlo(1, 1)]), st.booleans()
        ),
        max_size=40,
    )
)
def test_the_version_rises_whenever_the_points_change(
    answers: list[tuple[int, Slo, bool]],
) -> None:
    estimates = OnlineClassLengths(window=8)
    for tokens, slo, is_censored in answers:
        before = {name: estimates.points(name).tolist() for name in ("deadline", "latency")}
        version = estimates.version
        estimates.learn(ended(tokens, slo), is_censored=is_censored)
        if any(estimates.points(name).tolist() != points for name, points in before.items()):
            assert estimates.version > version
        assert estimates.version >= version


# Mean and bound of what is left -------------------------------------------------------------------


def test_the_mean_is_that_of_the_points() -> None:
    assert remaining(points=steps(10))[0] == 165


@pytest.mark.parametrize(("quantile", "bound"), [(0.5, 160), (0.9, 290), (0.98, 320)])
def test_the_bound_is_the_point_at_the_quantile(quantile: float, bound: float) -> None:
    found = remaining(points=steps(10), quantile=quantile)[1]
    assert found == pytest.approx(bound, abs=10)


def test_a_higher_quantile_never_gives_a_lower_bound() -> None:
    bounds = [remaining(points=steps(10), quantile=part / 20)[1] for part in range(1, 20)]
    assert bounds == sorted(bounds)


def test_what_has_been_generated_rules_out_shorter_answers() -> None:
    # Half of the points, 170 to 320, are beyond 165: 5 to 155 tokens to come, 80 on average.
    mean, bound = remaining(points=steps(10), generated=165)
    assert mean == 80
    assert 125 <= bound <= 155


def test_an_answer_as_long_as_a_point_is_not_expected_to_end_like_it() -> None:
    points = (10.0,) * 16 + (30.0,) * 16
    assert remaining(points=points, generated=10)[0] == 20


def test_lengths_above_max_tokens_count_as_max_tokens() -> None:
    points = (10.0,) * 16 + (1000.0,) * 16
    assert remaining(points=points, max_output_tokens=50) == (30, 50)


def test_an_answer_that_outlived_its_forecast_goes_on_for_half_its_length() -> None:
    assert remaining(points=(10.0,) * NUM_POINTS, generated=1000, max_output_tokens=9000) == (
        500,
        8000,
    )


def test_an_answer_that_outlived_its_forecast_still_ends_at_max_tokens() -> None:
    assert remaining(points=(10.0,) * NUM_POINTS, generated=1000, max_output_tokens=1100) == (
        100,
        100,
    )


def test_refreshed_rows_are_no_longer_stale_and_others_are_left_alone() -> None:
    table = table_of(Ask(mean=5), Ask(mean=5))
    table.points[:2] = 40.0
    table.is_stale[:2] = True
    refresh(table, np.array([1]), 0.9)
    assert table.is_stale[:2].tolist() == [True, False]
    assert table.mean_tokens[:2].tolist() == [5, 40]


def test_nothing_to_refresh_is_no_work() -> None:
    refresh(table_of(), np.array([], dtype=np.int64), 0.9)


@given(
    points=lengths_of_answers,
    generated=st.integers(0, 1 << 40) | st.integers(0, 1000),
    max_output_tokens=ABSURD.tokens,
    quantile=st.floats(0.001, 0.999),
)
def test_mean_and_bound_stay_between_one_token_and_what_max_tokens_leaves(
    points: list[float], generated: int, max_output_tokens: int, quantile: float
) -> None:
    limit = min(max(max_output_tokens, 0), 1 << 40)
    most = max(limit - generated, 1)
    for found in remaining(
        points=equal_mass_points(points),
        generated=generated,
        max_output_tokens=max_output_tokens,
        quantile=quantile,
    ):
        assert 1 <= found <= most


# What fits ----------------------------------------------------------------------------------------


def fits(ask: Ask, *tokens: float, information: Information = Information.FORECAST) -> Any:
    """The chance that it fits, for each number of tokens."""
    rows = rows_of(*[ask] * len(tokens))
    found = Remaining(rows, information, 100.0).fits_fraction(
        floats(*tokens), np.arange(len(tokens))
    )
    return found.tolist()


def test_the_share_of_points_within_the_tokens_fits() -> None:
    ask = Ask(points=steps(10))
    assert fits(ask, 9, 10, 160, 165, 319, 320) == [0, 1 / 32, 0.5, 0.5, 31 / 32, 1]


def test_only_points_beyond_what_has_been_generated_count() -> None:
    # 170 to 320 are left, sixteen points; within 40 tokens of 165 lie 170 to 200, four of them.
    assert fits(Ask(points=steps(10), generated=165), 4, 40, 155) == [0, 0.25, 1]


def test_less_than_a_token_never_fits() -> None:
    ask = Ask(points=(1.0,) * NUM_POINTS)
    assert fits(ask, 0.99, 0, -5, -math.inf) == [0, 0, 0, 0]


def test_what_max_tokens_leaves_always_fits() -> None:
    ask = Ask(points=(5000.0,) * NUM_POINTS, generated=100, max_output_tokens=120)
    assert fits(ask, 19, 20, math.inf) == [0, 1, 1]


def test_the_chance_of_an_outlived_answer_rises_with_the_tokens() -> None:
    ask = Ask(points=(10.0,) * NUM_POINTS, generated=200, max_output_tokens=100_000)
    few, more, many = fits(ask, 10, 100, 10_000)
    assert 0 < few < more < many <= 1
    # Half as long again is expected.
    assert 0.3 < more < 0.8


def test_the_rows_asked_for_are_the_rows_answered() -> None:
    rows = rows_of(Ask(points=(10.0,) * NUM_POINTS), Ask(points=(90.0,) * NUM_POINTS))
    left = Remaining(rows, Information.FORECAST, 100.0)
    assert left.fits_fraction(floats(50, 50), np.array([1, 0])).tolist() == [0, 1]


def test_a_known_length_is_certain_where_it_is_known() -> None:
    known, unknown = Ask(points=steps(10), known=50, generated=20), Ask(points=steps(10))
    left = Remaining(rows_of(known, unknown), Information.KNOWN, 100.0)
    assert left.mean_tokens.tolist() == [30, 165]
    assert left.bound_tokens[0] == 30
    assert fits(known, 29, 30, information=Information.KNOWN) == [0, 1]
    assert fits(unknown, 160, information=Information.KNOWN) == [0.5]


def test_a_known_length_counts_for_nothing_without_an_oracle() -> None:
    left = Remaining(rows_of(Ask(points=steps(10), known=50)), Information.FORECAST, 100.0)
    assert left.mean_tokens.tolist() == [165]


def test_a_known_length_beyond_max_tokens_ends_there() -> None:
    ask = Ask(points=steps(10), known=500, max_output_tokens=60)
    assert Remaining(rows_of(ask), Information.KNOWN, 100.0).mean_tokens.tolist() == [60]


def test_without_an_analyzer_everybody_gets_the_average() -> None:
    short, long = Ask(points=steps(1), known=3), Ask(points=steps(10), generated=40)
    left = Remaining(rows_of(short, long), Information.AVERAGE, 100.0)
    assert left.mean_tokens.tolist() == left.bound_tokens.tolist() == [100, 60]
    assert fits(short, 99, 100, information=Information.AVERAGE) == [0, 1]


def test_longer_than_the_average_means_one_more_token() -> None:
    ask = Ask(points=steps(10), generated=140)
    assert Remaining(rows_of(ask), Information.AVERAGE, 100.0).mean_tokens.tolist() == [1]


@given(
    ask=ABSURD.asks(),
    tokens=st.lists(st.floats(-1e12, 1e12) | st.floats(0, 1000), min_size=1, max_size=8),
    information=st.sampled_from(Information),
)
def test_the_chance_is_a_probability_that_rises_with_the_tokens(
    ask: Ask, tokens: list[float], information: Information
) -> None:
    found = fits(ask, *sorted(tokens), information=information)
    assert found == sorted(found)
    assert found[0] >= 0
    assert found[-1] <= 1
    room = max(request_of(ask).max_output_tokens - ask.generated, 1)
    assert fits(ask, 0.999, room, information=information) == [0, 1]


def test_a_best_effort_request_has_lengths_as_any_other() -> None:
    assert taught(70, slo=BestEffortSlo(600)).points("best_effort").mean() == 70


# The average request ------------------------------------------------------------------------------


def test_before_any_request_the_average_is_that_of_the_prior() -> None:
    average = AverageRequest()
    assert (average.input_tokens, average.output_tokens) == (0.0, PRIOR_TOKENS / 2)


def test_all_calls_of_a_program_count_as_one_request() -> None:
    average = AverageRequest()
    average.begun()
    for _ in range(3):
        average.add(30, 80)
    # Beside eight of 256 tokens.
    assert average.input_tokens == 90 / 9
    assert average.output_tokens == (8 * 256 + 240) / 9


def test_the_average_request_follows_a_load_that_changes() -> None:
    average = AverageRequest()
    for input_tokens, output_tokens in [(10, 10)] * 5000 + [(1000, 500)] * 5000:
        average.begun()
        average.add(input_tokens, output_tokens)
    # Halved about every 512: next to nothing is left of the first 5,000.
    assert average.input_tokens == pytest.approx(1000, rel=0.01)
    assert average.output_tokens == pytest.approx(500, rel=0.01)
