"""How long an answer will be, from the answers of its class that have finished."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.slo import BestEffortSlo, DeadlineSlo, LatencySlo, RequestTerms, Slo
from scheduler.lengths import OnlineClassLengths
from scheduler.request import Request

DEADLINE = DeadlineSlo(60.0)


def request_of(
    slo: Slo = DEADLINE, *, generated: int = 0, max_output_tokens: int = 10_000
) -> Request:
    """A request in the middle of its answer."""
    request = Request(
        "r",
        0,
        RequestTerms(0.0, slo),
        input_tokens=10,
        max_output_tokens=max_output_tokens,
    )
    request.generated_tokens = generated
    return request


def taught(*lengths: int, slo: Slo = DEADLINE, window: int = 512) -> OnlineClassLengths:
    """Estimates after answers of these lengths have finished."""
    estimates = OnlineClassLengths(window=window)
    for length in lengths:
        estimates.learn(request_of(slo, generated=length), is_censored=False)
    return estimates


# Before anything is known -------------------------------------------------------------------------


def test_before_any_answer_lengths_are_uniform_up_to_512() -> None:
    estimates = OnlineClassLengths()
    assert estimates.remaining_mean(request_of()) == pytest.approx(256.5)
    assert estimates.fits_fraction(request_of(), 256.5) == pytest.approx(0.5)
    assert 440 < estimates.remaining_bound(request_of()) < 475


def test_max_tokens_caps_every_estimate() -> None:
    estimates = OnlineClassLengths()
    short = request_of(max_output_tokens=20)
    assert estimates.remaining_mean(short) <= 20
    assert estimates.remaining_bound(short) == 20
    assert estimates.fits_fraction(short, 20) == 1.0


def test_an_answer_longer_than_all_seen_goes_on_for_half_its_length() -> None:
    estimates = OnlineClassLengths()
    assert estimates.remaining_mean(request_of(generated=1000)) == 500
    assert estimates.remaining_mean(request_of(generated=9900)) == 100
    assert estimates.remaining_bound(request_of(generated=1000)) == 9000
    assert estimates.fits_fraction(request_of(generated=1000), 50) == 0.5


# From finished answers ----------------------------------------------------------------------------


def test_the_mean_and_the_bound_are_those_of_the_finished_answers() -> None:
    estimates = taught(*range(10, 110, 10))
    assert estimates.remaining_mean(request_of()) == 55
    assert estimates.remaining_bound(request_of()) == 100


def test_another_quantile_gives_another_bound() -> None:
    estimates = OnlineClassLengths(quantile=0.5)
    for length in range(10, 110, 10):
        estimates.learn(request_of(generated=length), is_censored=False)
    assert estimates.remaining_bound(request_of()) == 60


def test_what_has_been_generated_rules_out_shorter_answers() -> None:
    estimates = taught(10, 20, 30, 100)
    # Only 30 and 100 are longer than 25: 5 and 75 tokens to come.
    request = request_of(generated=25)
    assert estimates.remaining_mean(request) == 40
    assert estimates.remaining_bound(request) == 75
    assert estimates.fits_fraction(request, 5) == 0.5
    assert estimates.fits_fraction(request, 4) == 0.0
    assert estimates.fits_fraction(request, 75) == 1.0


def test_an_answer_as_long_as_a_finished_one_is_not_expected_to_end_like_it() -> None:
    estimates = taught(10, 30)
    assert estimates.remaining_mean(request_of(generated=10)) == 20


def test_lengths_above_max_tokens_count_as_max_tokens() -> None:
    assert taught(10, 1000).remaining_mean(request_of(max_output_tokens=50)) == 30


def test_classes_learn_apart() -> None:
    estimates = taught(10, 10, 10)
    estimates.learn(request_of(LatencySlo(1, 1), generated=400), is_censored=False)
    assert estimates.remaining_mean(request_of(DEADLINE)) == 10
    assert estimates.remaining_mean(request_of(LatencySlo(1, 1))) == 400
    assert estimates.remaining_mean(request_of(BestEffortSlo(1))) == pytest.approx(256.5)


def test_only_the_last_answers_count() -> None:
    assert taught(1000, 1000, 10, 20, window=2).remaining_mean(request_of()) == 15


def test_a_new_answer_counts_at_once() -> None:
    estimates = taught(10)
    assert estimates.remaining_mean(request_of()) == 10
    estimates.learn(request_of(generated=30), is_censored=False)
    assert estimates.remaining_mean(request_of()) == 20


def test_an_answer_cut_off_early_teaches_nothing() -> None:
    estimates = taught(10)
    estimates.learn(request_of(generated=500), is_censored=True)
    assert estimates.remaining_mean(request_of()) == 10


def test_an_answer_cut_off_at_max_tokens_counts_in_full() -> None:
    estimates = taught(10)
    full = request_of(generated=50, max_output_tokens=50)
    estimates.learn(full, is_censored=True)
    assert estimates.remaining_mean(request_of()) == 30


def test_less_than_a_token_never_fits() -> None:
    estimates = taught(10)
    assert estimates.fits_fraction(request_of(), 0.5) == 0.0
    assert estimates.fits_fraction(request_of(), -math.inf) == 0.0
    assert estimates.fits_fraction(request_of(), math.inf) == 1.0


@pytest.mark.parametrize("quantile", [0, 1, -0.1, 1.1, math.nan])
def test_a_quantile_outside_zero_to_one_is_refused(quantile: float) -> None:
    with pytest.raises(ValueError, match="quantile must be between 0 and 1"):
        OnlineClassLengths(quantile)


@given(
    seen=st.lists(st.integers(0, 5000), max_size=20),
    generated=st.integers(0, 6000),
    max_output_tokens=st.integers(0, 1 << 30),
    tokens=st.floats(allow_nan=False),
)
def test_estimates_stay_between_one_token_and_what_max_tokens_leaves(
    seen: list[int], generated: int, max_output_tokens: int, tokens: float
) -> None:
    estimates = taught(*seen)
    request = request_of(generated=generated, max_output_tokens=max_output_tokens)
    most = max(max_output_tokens - generated, 1)
    assert 1 <= estimates.remaining_mean(request) <= most
    assert 1 <= estimates.remaining_bound(request) <= most
    assert 0 <= estimates.fits_fraction(request, tokens) <= 1


@given(
    seen=st.lists(st.integers(1, 500), min_size=1, max_size=20),
    generated=st.integers(0, 600),
    fewer=st.integers(0, 600),
    more=st.integers(0, 600),
)
def test_more_tokens_never_fit_less_likely(
    seen: list[int], generated: int, fewer: int, more: int
) -> None:
    estimates = taught(*seen)
    request = request_of(generated=generated, max_output_tokens=700)
    fractions = [estimates.fits_fraction(request, tokens) for tokens in sorted((fewer, more))]
    assert fractions[0] <= fractions[1]
