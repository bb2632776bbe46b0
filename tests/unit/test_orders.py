"""The baselines: each an order over the queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows import ABSURD, BEST_EFFORT, NOW_S, Ask, estimates_of, floats

from core.slo import CompoundSlo, DeadlineSlo, LatencySlo
from scheduler.policies import BASELINES
from scheduler.policies.base import DisplaceRule, Policy, PrefillRule, best_first, finite
from scheduler.policies.orders import (
    EarliestDeadlineFirst,
    FirstComeFirstServed,
    LearningToRank,
    LeastAttainedService,
    Priority,
    Sarathi,
    ShortestJobFirst,
    VirtualTokenCounter,
)
from scheduler.programs import Programs
from scheduler.table import PARKED, PREEMPTED, RUNNING, WAITING

ORDERS: dict[str, Callable[[], Policy]] = {
    "fcfs": FirstComeFirstServed,
    "sarathi": Sarathi,
    "sjf": ShortestJobFirst,
    "ltr": LearningToRank,
    "plas": LeastAttainedService,
    "edf": EarliestDeadlineFirst,
    "priority": Priority,
    "vtc": VirtualTokenCounter,
}
every_order = pytest.mark.parametrize("name", ORDERS)


def order(name: str, *asks: Ask, **context: Any) -> list[int]:
    """Places of the requests, best first."""
    estimates = estimates_of(*asks, **context)
    scores = finite(ORDERS[name]().assess(estimates).scores)
    assert scores.shape == (len(asks),)
    return best_first(scores, estimates.rows.serial, len(asks)).tolist()


def test_every_baseline_is_in_the_registry_by_its_name() -> None:
    for name, make in ORDERS.items():
        assert type(BASELINES[name]()) is make


# All of them --------------------------------------------------------------------------------------


@every_order
@pytest.mark.parametrize(
    "ask",
    [
        Ask(slo=DeadlineSlo(60)),
        Ask(slo=LatencySlo(1, 0.1), state=RUNNING),
        Ask(slo=CompoundSlo(60, "p"), program=0, state=PREEMPTED, generated=5),
        Ask(waited=1e6),
        Ask(slo=DeadlineSlo(-60), state=PARKED, generated=5000),
    ],
    ids=["deadline", "stream", "call", "starved", "late and long"],
)
def test_equals_keep_the_order_of_arrival(name: str, ask: Ask) -> None:
    serials = (7, 3, 900_000, 0)
    programs = Programs()
    programs.join("", "p", is_final=False)
    asks = [Ask(**{**vars(ask), "serial": serial}) for serial in serials]
    found = order(name, *asks, programs=programs, tenant_service=floats(50.0))
    assert found == [3, 1, 0, 2]


@every_order
def test_nobody_is_a_queue_too(name: str) -> None:
    assert order(name) == []


@every_order
def test_the_top_of_the_order_runs(name: str) -> None:
    estimates = estimates_of(*[Ask()] * 4)
    ranked = np.array([2, 0, 3, 1])
    found = ORDERS[name]().group(ranked, floats(1, 1, 1, 1), estimates, 3, ranked[:0])
    assert found.tolist() == [2, 0, 3]


@pytest.mark.filterwarnings("error")
@every_order
@given(asks=st.lists(ABSURD.asks(num_programs=2, num_tenants=2), min_size=1, max_size=6))
def test_whatever_is_claimed_scores_are_numbers_and_everybody_is_in_the_order(
    name: str, asks: list[Ask]
) -> None:
    programs = Programs()
    for program, served in (("p", 1e300), ("q", 0.0)):
        programs.serve(programs.join("", program, is_final=False), served)
    context: dict[str, Any] = {"programs": programs, "tenant_service": floats(0.0, 1e300)}
    scores = ORDERS[name]().assess(estimates_of(*asks, **context)).scores
    assert np.isfinite(scores).all()
    assert sorted(order(name, *asks, **context)) == list(range(len(asks)))


@every_order
def test_a_policy_without_a_notion_of_goodput_claims_none(name: str) -> None:
    assessment = ORDERS[name]().assess(estimates_of(Ask(slo=DeadlineSlo(60)), Ask()))
    assert assessment.values.tolist() == [0, 0]


# fcfs and sarathi ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fcfs", "sarathi"])
def test_first_come_is_first_served_whatever_else(name: str) -> None:
    asks = (
        Ask(serial=2, priority=9, slo=LatencySlo(0.1, 0.01)),
        Ask(serial=0, mean=5000, bound=5000),
        Ask(serial=1, waited=1e6, slo=DeadlineSlo(1)),
    )
    assert order(name, *asks) == [1, 2, 0]


@pytest.mark.parametrize("name", ["fcfs", "sarathi", "sjf", "vtc"])
def test_under_some_orders_nobody_who_runs_is_displaced(name: str) -> None:
    assert ORDERS[name]().traits.displace is DisplaceRule.NEVER
    assert not ORDERS[name]().traits.may_displace


def test_only_sarathi_decodes_before_it_prefills() -> None:
    stall_free = {
        name for name, make in ORDERS.items() if make().traits.prefill is PrefillRule.STALL_FREE
    }
    assert stall_free == {"sarathi"}


# sjf and ltr --------------------------------------------------------------------------------------


def test_the_shortest_rest_goes_first() -> None:
    asks = Ask(mean=50), Ask(mean=10), Ask(mean=30, generated=1000)
    assert order("sjf", *asks) == [1, 2, 0]


def test_the_shortest_whole_answer_goes_first() -> None:
    # 50, 60 and 40 tokens in all.
    asks = Ask(mean=50), Ask(mean=10, generated=50), Ask(mean=30, generated=10)
    assert order("ltr", *asks) == [2, 0, 1]


def test_what_was_passed_over_for_long_goes_before_all_and_the_oldest_of_it_first() -> None:
    limit = LearningToRank.PROMOTE_AFTER_FRAMES
    asks = (
        Ask(mean=1, bound=1),
        Ask(mean=9000, waited=limit, serial=9),
        Ask(mean=8000, waited=limit - 1),
        Ask(mean=9500, waited=limit + 50, serial=8),
    )
    assert order("ltr", *asks) == [3, 1, 0, 2]


# plas ---------------------------------------------------------------------------------------------

LEVEL = LeastAttainedService.FIRST_LEVEL_TOKENS


def call(program: int, **ask: Any) -> Ask:
    return Ask(slo=CompoundSlo(60, "p"), program=program, **ask)


def programs_served(*service: float) -> Programs:
    """Programs with so much attained service each."""
    programs = Programs()
    for number, tokens in enumerate(service):
        programs.serve(programs.join("", f"p{number}", is_final=False), tokens)
    return programs


def test_a_new_call_waits_behind_those_of_programs_served_less() -> None:
    programs = programs_served(16 * LEVEL, 0, 3 * LEVEL)
    assert order("plas", call(0), call(1), call(2), programs=programs) == [1, 2, 0]


def test_calls_of_one_program_are_on_one_level_whatever_they_got_themselves() -> None:
    long = call(0, state=RUNNING, generated=5000)
    assert order("plas", long, call(0), programs=programs_served(9 * LEVEL)) == [0, 1]


def test_within_a_level_arrival_decides_and_not_service() -> None:
    programs = programs_served(LEVEL, 0)
    assert order("plas", call(0), call(1), programs=programs) == [0, 1]
    programs = programs_served(2 * LEVEL, 1.5 * LEVEL)
    assert order("plas", call(0), call(1), programs=programs) == [0, 1]


def test_each_level_is_twice_as_wide_as_the_one_before() -> None:
    programs = programs_served(2.1 * LEVEL, 2 * LEVEL, 4 * LEVEL, 4.1 * LEVEL, LEVEL)
    found = order("plas", *[call(number) for number in range(5)], programs=programs)
    assert found == [4, 1, 0, 2, 3]


def test_on_the_last_level_all_are_equal() -> None:
    last = 2.0**LeastAttainedService.NUM_LEVELS * LEVEL
    programs = programs_served(1000 * last, last)
    assert order("plas", call(0), call(1), programs=programs) == [0, 1]


def test_a_request_without_a_program_is_a_program_of_its_own() -> None:
    # It has attained nothing while it waits, however long its prompt.
    asks = (
        Ask(state=RUNNING, input_tokens=3000),
        Ask(state=WAITING, input_tokens=3000),
        Ask(state=PREEMPTED, input_tokens=100, generated=500),
    )
    assert order("plas", *asks) == [1, 2, 0]


def test_one_that_has_waited_for_long_is_back_on_the_first_level() -> None:
    limit = LeastAttainedService.PROMOTE_AFTER_FRAMES
    programs = programs_served(16 * LEVEL, 0, 16 * LEVEL)
    asks = call(0, waited=limit), call(1), call(2, waited=limit - 1)
    assert order("plas", *asks, programs=programs) == [0, 1, 2]


def test_one_that_was_served_for_longer_than_it_waited_is_not_back_on_the_first_level() -> None:
    limit = LeastAttainedService.PROMOTE_AFTER_FRAMES
    # 200 frames have at most 50 steps each: 10,000 tokens.
    programs = programs_served(1e6, 0)
    asks = call(0, waited=limit, state=RUNNING), call(1)
    assert order("plas", *asks, programs=programs) == [1, 0]


def test_the_order_of_arrival_survives_a_billion_requests() -> None:
    asks = call(0, serial=10**9 + 1), call(0, serial=10**9)
    assert order("plas", *asks, programs=programs_served(1e9)) == [1, 0]


# edf, priority and vtc ----------------------------------------------------------------------------


def test_the_earliest_due_time_goes_first_of_whatever_class() -> None:
    asks = (
        Ask(slo=DeadlineSlo(5)),
        Ask(slo=LatencySlo(1.0, 0.5), generated=2),  # its third token is due after 2 s
        Ask(slo=CompoundSlo(1, "p")),
        Ask(slo=BEST_EFFORT, arrival_s=NOW_S - 597),
        Ask(slo=DeadlineSlo(-1)),
    )
    assert order("edf", *asks) == [4, 2, 1, 3, 0]


def test_a_time_that_never_comes_is_last() -> None:
    asks = Ask(slo=DeadlineSlo(float("nan"))), Ask(slo=DeadlineSlo(1e9))
    assert order("edf", *asks) == [1, 0]


def test_the_higher_priority_goes_first() -> None:
    asks = Ask(priority=-1), Ask(priority=5), Ask(), Ask(priority=5)
    assert order("priority", *asks) == [1, 3, 2, 0]


def test_a_priority_has_no_margin() -> None:
    assert Priority().assess(estimates_of(Ask())).is_strict


def test_the_tenant_served_least_goes_first() -> None:
    asks = Ask(tenant=0), Ask(tenant=2), Ask(tenant=1), Ask(tenant=1)
    assert order("vtc", *asks, tenant_service=floats(50, 100, 0)) == [1, 0, 2, 3]


def test_where_service_is_not_counted_arrival_decides() -> None:
    assert order("vtc", Ask(tenant=1, serial=5), Ask(tenant=0, serial=4)) == [1, 0]
