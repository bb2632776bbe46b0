"""Fairness between tenants, blended with goodput."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from rows import Ask, estimates_of, floats

from scheduler.estimates import Estimates
from scheduler.fairness import attained_service, blend, least_service_first, users
from scheduler.table import Floats

LEAST_FIRST = [1.0, 0.5, 0.0]
"""For tenants that have been served 0, 50 and 100."""


def served(*service: float) -> Estimates:
    """One request of each tenant, with what the tenants have been served."""
    asks = [Ask(tenant=tenant) for tenant in range(len(service))]
    return estimates_of(*asks, tenant_service=floats(*service))


def fair(function: Callable[[Floats], Any], *service: float) -> list[float]:
    return users(function)(served(*service)).tolist()


# Blending -----------------------------------------------------------------------------------------


def test_without_weight_priorities_are_what_they_were() -> None:
    assert blend(floats(3, 1, 2), floats(0, 1, 0.5), 0.0).tolist() == [3, 1, 2]


def test_with_all_the_weight_only_fairness_orders() -> None:
    mixed = blend(floats(3, 1, 2), floats(0, 1, 0.5), 1.0)
    assert np.argsort(-mixed).tolist() == [1, 2, 0]


def test_in_between_both_count_by_their_weight_in_units_of_the_best_priority() -> None:
    # 0.75 * priority + 0.25 * fairness * 4
    assert blend(floats(4, 2, 0), floats(0, 1, 0.5), 0.25).tolist() == [3, 2.5, 0.5]


def test_more_weight_moves_the_fairer_one_up() -> None:
    gaps = []
    for weight in (0.0, 0.3, 0.6, 1.0):
        better, fairer = blend(floats(2, 1), floats(0, 1), weight)
        gaps.append(better - fairer)
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] > 0 > gaps[-1]


def test_where_all_priorities_are_nothing_fairness_still_orders() -> None:
    mixed = blend(floats(0, 0), floats(0, 1), 0.5)
    assert mixed[1] > mixed[0]


def test_nobody_to_blend_is_nobody() -> None:
    assert blend(floats(), floats(), 0.5).shape == (0,)


@given(
    pairs=st.lists(st.tuples(st.floats(0, 1e300), st.floats(0, 1)), min_size=1, max_size=8),
    weight=st.floats(0, 1),
)
def test_whoever_is_better_and_no_less_fairly_treated_stays_in_front(
    pairs: list[tuple[float, float]], weight: float
) -> None:
    scores, fairness = np.array(pairs).T
    mixed = blend(scores, fairness, weight)
    assert np.isfinite(mixed).all()
    for one in range(len(pairs)):
        for other in range(len(pairs)):
            if scores[one] >= scores[other] and fairness[one] >= fairness[other]:
                assert mixed[one] >= mixed[other]


# Least service first ------------------------------------------------------------------------------


def test_the_tenant_served_least_goes_first_and_the_one_served_most_last() -> None:
    assert least_service_first(served(0, 50, 100)).tolist() == LEAST_FIRST


def test_tenants_served_alike_are_alike() -> None:
    assert len(set(least_service_first(served(7, 7)).tolist())) == 1


def test_requests_of_one_tenant_are_alike() -> None:
    asks = Ask(tenant=1), Ask(tenant=0), Ask(tenant=1)
    estimates = estimates_of(*asks, tenant_service=floats(5, 9))
    assert attained_service(estimates).tolist() == [9, 5, 9]
    assert least_service_first(estimates).tolist() == [0, 1, 0]


def test_where_service_is_not_counted_all_are_alike() -> None:
    assert len(set(least_service_first(estimates_of(Ask(), Ask())).tolist())) == 1


def test_nobody_is_treated_fairly() -> None:
    assert least_service_first(estimates_of(tenant_service=floats(5))).shape == (0,)


# A user's own -------------------------------------------------------------------------------------


def test_a_users_function_gets_the_service_of_each_requests_tenant() -> None:
    assert fair(lambda service: service / 100, 0, 50, 100) == [0, 0.5, 1]


def test_what_a_users_function_returns_is_bounded() -> None:
    assert fair(lambda _: floats(-4, 0.5, 7), 0, 50, 100) == [0, 0.5, 1]


def test_a_users_function_that_raises_leaves_it_to_the_least_served() -> None:
    def raises(_: Floats) -> Floats:
        raise RuntimeError

    assert fair(raises, 0, 50, 100) == LEAST_FIRST


def test_a_users_function_that_returns_no_numbers_gives_nobody_an_advantage() -> None:
    found = fair(lambda service: service * math.nan, 0, 50, 100)
    assert found in ([0, 0, 0], LEAST_FIRST)
    assert fair(lambda _: floats(math.inf, -math.inf, 0.5), 0, 50, 100) == [1, 0, 0.5]


@pytest.mark.parametrize("answer", [floats(1, 0), np.ones((3, 3)), np.ones((3, 1)), "fair", {}])
def test_a_users_function_of_another_shape_leaves_it_to_the_least_served(answer: Any) -> None:
    assert fair(lambda _: answer, 0, 50, 100) == LEAST_FIRST


def test_a_users_function_cannot_write_to_the_counters() -> None:
    def vandal(service: Floats) -> Floats:
        service[:] = 0
        raise RuntimeError

    estimates = served(0, 50, 100)
    assert users(vandal)(estimates).tolist() == LEAST_FIRST
    assert attained_service(estimates).tolist() == [0, 50, 100]


@given(answer=arrays.arrays(np.float64, st.integers(0, 4)))
def test_whatever_a_users_function_returns_fairness_stays_between_0_and_1(answer: Floats) -> None:
    found = users(lambda _: answer)(served(0, 50, 100))
    assert found.shape == (3,)
    assert ((found >= 0) & (found <= 1)).all()
