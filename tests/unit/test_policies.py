"""The registry of policies, and the ranking that they share."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows import Ask, estimates_of, floats, steps

from core.slo import DeadlineSlo, LatencySlo
from scheduler.lengths import Information
from scheduler.policies import ABLATIONS, BASELINES, CANCEL_SUFFIX, CHOICES, ORACLES, POLICIES
from scheduler.policies.base import arrival_order, best_first, finite

PLAIN = [name for name in POLICIES if not name.endswith(CANCEL_SUFFIX)]
every_policy = pytest.mark.parametrize("name", POLICIES)
every_plain = pytest.mark.parametrize("name", PLAIN)


# The registry -------------------------------------------------------------------------------------


def test_all_policies_of_the_comparison_are_there() -> None:
    baselines = "fcfs sarathi sjf ltr plas edf priority vtc gmax-paper"
    oracles = "gmax-oracle gmax-paper-oracle"
    ablations = "no-analyzer no-gmax no-grouping no-jit no-adaptive-batch"
    assert set(baselines.split()) <= set(BASELINES)
    assert set(oracles.split()) <= set(ORACLES)
    assert {f"gmax-{part}" for part in ablations.split()} <= set(ABLATIONS)
    assert {"gmax", *BASELINES, *ABLATIONS, *ORACLES} == set(PLAIN)


def test_every_policy_has_a_variant_that_cancels() -> None:
    assert set(POLICIES) == {*PLAIN, *(name + CANCEL_SUFFIX for name in PLAIN)}


def test_the_choices_name_every_policy() -> None:
    assert all(name in CHOICES for name in PLAIN)


@every_policy
def test_every_policy_names_its_source_and_what_is_approximated(name: str) -> None:
    policy = POLICIES[name]()
    assert policy.source.strip()
    assert policy.approximates.strip()


@every_plain
def test_a_variant_differs_only_in_cancelling(name: str) -> None:
    variant, plain = POLICIES[name + CANCEL_SUFFIX](), POLICIES[name]()
    assert type(variant) is type(plain)
    assert (variant.source, variant.approximates) == (plain.source, plain.approximates)
    assert not plain.traits.cancels_expired
    assert variant.traits == dataclasses.replace(plain.traits, cancels_expired=True)


@every_plain
def test_a_variant_scores_alike(name: str) -> None:
    asks = (
        Ask(slo=DeadlineSlo(20), points=steps(10)),
        Ask(slo=DeadlineSlo(-5), points=steps(3), waited=40),
        Ask(slo=LatencySlo(1, 0.25), points=steps(2)),
        Ask(points=steps(5), priority=3),
    )
    estimates = estimates_of(*asks)
    plain, variant = POLICIES[name](), POLICIES[name + CANCEL_SUFFIX]()
    assert plain.assess(estimates).scores.tolist() == variant.assess(estimates).scores.tolist()


@every_policy
def test_two_of_a_name_share_nothing_that_they_learn(name: str) -> None:
    one, other = POLICIES[name](), POLICIES[name]()
    assert one is not other
    assert one.tuner is None or one.tuner is not other.tuner


def test_only_oracles_know_lengths_and_only_no_analyzer_knows_no_more_than_the_average() -> None:
    known = {name for name in PLAIN if POLICIES[name]().traits.information is Information.KNOWN}
    average = {name for name in PLAIN if POLICIES[name]().traits.information is Information.AVERAGE}
    assert known == set(ORACLES)
    assert average == {"gmax-no-analyzer"}


# Ranking ------------------------------------------------------------------------------------------


def test_arrival_order_puts_the_first_first() -> None:
    scores = arrival_order(np.array([5, 2, 9]))
    assert np.argsort(-scores).tolist() == [1, 0, 2]


def test_scores_that_are_no_numbers_can_be_compared_and_are_the_worst() -> None:
    scores = finite(floats(np.nan, -np.inf, np.inf, 5, -1e308))
    assert np.isfinite(scores).all()
    assert np.argmin(scores) == 0
    assert scores[2] > scores[3] == 5 > scores[1]


requests = st.lists(
    st.tuples(
        st.integers(-3, 3).map(float) | st.floats(-1e300, 1e300) | st.just(np.inf), st.booleans()
    ),
    max_size=40,
)


@given(requests=requests, most=st.integers(-1, 45), seed=st.randoms(use_true_random=False))
def test_the_best_first_are_the_first_of_all_sorted(
    requests: list[tuple[float, bool]], most: int, seed: random.Random
) -> None:
    scores = floats(*[score for score, _ in requests])
    serial = list(range(100, 100 + len(requests)))
    seed.shuffle(serial)
    ranked = sorted(range(len(requests)), key=lambda index: (-scores[index], serial[index]))
    found = best_first(scores, np.array(serial, dtype=np.int64), most)
    assert found.tolist() == ranked[: max(most, 0)]


@given(requests=requests, most=st.integers(0, 45))
def test_only_those_asked_for_are_ranked(requests: list[tuple[float, bool]], most: int) -> None:
    scores = floats(*[score for score, _ in requests])
    serial = np.arange(len(requests))
    among = np.array([is_in for _, is_in in requests], dtype=np.bool_)
    ranked = [
        index
        for index in sorted(range(len(requests)), key=lambda index: (-scores[index], index))
        if among[index]
    ]
    assert best_first(scores, serial, most, among).tolist() == ranked[:most]
