"""Power-of-K: dummies on some replicas, one of them bound, as late as possible."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.slo import BestEffortSlo, CompoundSlo, DeadlineSlo, LatencySlo, RequestTerms, Slo
from scheduler.config import SchedulerConfig
from scheduler.plan import EngineCapacity
from scheduler.policies import CANCEL_SUFFIX, POLICIES
from scheduler.replicas import Assignment, PowerOfK, ReplicaOffer
from scheduler.step_time import StepTimeModel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from scheduler.table import Floats

NOW_S = 1000.0
FRAME_STEPS = 10
STEP_S = 1 / 64
LOOSE = DeadlineSlo(60.0)
PLAIN = [name for name in POLICIES if not name.endswith(CANCEL_SUFFIX)]


class Fixed:
    """Draws the replicas that it was told to, request by request."""

    def __init__(self, *draws: list[int]) -> None:
        self.draws = list(draws)

    def sample(self, population: Any, k: int) -> list[int]:
        drawn = self.draws.pop(0)
        assert len(drawn) == k
        assert set(drawn) <= set(population)
        return drawn


def queue_of(
    num_replicas: int = 2,
    k: int | None = None,
    *,
    rng: Any = None,
    policy: str = "gmax",
    **more: Any,
) -> PowerOfK:
    """A queue in front of so many replicas; without ``k`` each request waits for all of them."""
    return PowerOfK(
        num_replicas,
        num_replicas if k is None else k,
        SchedulerConfig(policy=policy, frame_steps=FRAME_STEPS),
        rng or random.Random(0),
        **more,
    )


def offer(
    slots: int = 1, kv: int = 100_000, *, step_s: float = STEP_S, total_kv: int = 100_000
) -> ReplicaOffer:
    """What a replica takes now."""
    capacity = EngineCapacity(8, kv, total_kv, slots)
    return ReplicaOffer(capacity=capacity, step_time=StepTimeModel.known(step_s))


def arrive(
    queue: PowerOfK,
    name: str,
    slo: Slo = LOOSE,
    *,
    input_tokens: int = 100,
    max_output_tokens: int = 100,
    length: float = 20.0,
) -> tuple[int, ...]:
    """A request arrives; the replicas with a dummy of it."""
    return queue.arrive(
        name,
        RequestTerms(NOW_S, slo),
        input_tokens=input_tokens,
        max_output_tokens=max_output_tokens,
        lengths=[length],
    )


def bound(queue: PowerOfK, offers: Mapping[int, ReplicaOffer]) -> dict[str, int]:
    """Whom a round binds, and where."""
    assignments = queue.assign(NOW_S, offers)
    found = {assignment.request_id: assignment.replica for assignment in assignments}
    assert len(found) == len(assignments)
    return found


# Dummies ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_a_request_has_as_many_dummies_as_k_each_on_another_replica(k: int) -> None:
    queue = queue_of(5, k)
    for index in range(50):
        replicas = arrive(queue, f"r{index}")
        assert len(set(replicas)) == k
        assert set(replicas) <= set(range(5))
        assert queue.dummies(f"r{index}") == replicas == tuple(sorted(replicas))
    assert len(queue) == 50


def test_with_k_as_large_as_can_be_every_replica_has_a_dummy() -> None:
    queue = queue_of(4)
    assert queue.num_replicas == 4
    assert arrive(queue, "a") == (0, 1, 2, 3)


def test_where_the_dummies_are_is_drawn_and_the_same_for_the_same_seed() -> None:
    def draws(seed: int) -> list[tuple[int, ...]]:
        queue = queue_of(6, 2, rng=random.Random(seed))
        return [arrive(queue, f"r{index}") for index in range(20)]

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)
    assert len(set(draws(1))) > 5


@pytest.mark.parametrize("k", [0, -1, 4])
def test_k_must_be_between_one_and_the_number_of_replicas(k: int) -> None:
    with pytest.raises(ValueError, match=f"k must be between 1 and the 3 replicas, got {k}"):
        queue_of(3, k)


@pytest.mark.parametrize("num_replicas", [0, -2])
def test_there_must_be_a_replica(num_replicas: int) -> None:
    with pytest.raises(ValueError, match="k must be between 1"):
        queue_of(num_replicas, 1)


def test_an_objective_by_its_dotted_path_needs_its_object() -> None:
    with pytest.raises(ValueError, match=r"goodput: 'shop\.prices:all' needs an objective object"):
        PowerOfK(1, 1, SchedulerConfig(goodput="shop.prices:all"), random.Random(0))


def test_one_that_is_waiting_is_refused_a_second_time_and_may_come_again_once_bound() -> None:
    queue = queue_of()
    arrive(queue, "a")
    with pytest.raises(ValueError, match="'a' is already waiting"):
        arrive(queue, "a")
    assert len(queue) == 1
    assert bound(queue, {0: offer()}) == {"a": 0}
    assert arrive(queue, "a") == (0, 1)


def test_a_forecast_that_is_none_is_refused_and_nothing_waits() -> None:
    queue = queue_of()
    with pytest.raises(ValueError, match="a length forecast takes"):
        arrive(queue, "a", length=-1.0)
    assert len(queue) == 0
    assert queue.dummies("a") == ()


# Binding ------------------------------------------------------------------------------------------


def test_binding_removes_the_dummies_on_the_other_replicas() -> None:
    queue = queue_of(3)
    arrive(queue, "a")
    (assignment,) = queue.assign(NOW_S, {1: offer()})
    assert isinstance(assignment, Assignment)
    assert (assignment.request_id, assignment.replica) == ("a", 1)
    assert (queue.dummies("a"), len(queue)) == ((), 0)
    assert bound(queue, {0: offer(), 1: offer(), 2: offer()}) == {}


def test_a_request_is_bound_only_where_it_has_a_dummy() -> None:
    queue = queue_of(3, 1, rng=Fixed([2], [0]))
    arrive(queue, "a")
    arrive(queue, "b")
    assert bound(queue, {1: offer(8)}) == {}
    assert bound(queue, {0: offer(8), 1: offer(8), 2: offer(8)}) == {"a": 2, "b": 0}


def test_dummies_stay_with_their_requests_when_others_leave() -> None:
    queue = queue_of(4, 2, rng=Fixed([0, 1], [1, 2], [2, 3]))
    for name in "abc":
        arrive(queue, name)
    queue.withdraw("a")
    assert (queue.dummies("b"), queue.dummies("c")) == ((1, 2), (2, 3))
    assert bound(queue, {1: offer(8)}) == {"b": 1}
    assert queue.dummies("c") == (2, 3)


def test_many_requests_keep_their_dummies() -> None:
    queue = queue_of(7, 3)
    expected = {f"r{index}": arrive(queue, f"r{index}") for index in range(200)}
    for name in list(expected)[::3]:
        assert queue.withdraw(name)
        del expected[name]
    assert {name: queue.dummies(name) for name in expected} == expected


def test_no_replica_gets_more_than_its_free_slots() -> None:
    queue = queue_of(3)
    for index in range(20):
        arrive(queue, f"r{index}")
    found = bound(queue, {0: offer(2), 1: offer(0), 2: offer(5)})
    where = list(found.values())
    assert (where.count(0), where.count(1), where.count(2)) == (2, 0, 5)
    assert len(queue) == 13


def test_no_replica_gets_more_than_its_free_kv() -> None:
    queue = queue_of(2)
    for index in range(10):
        arrive(queue, f"r{index}", input_tokens=100)  # and the 10 of a frame
    found = bound(queue, {0: offer(8, kv=329), 1: offer(8, kv=109)})
    assert list(found.values()) == [0, 0]


def test_one_that_does_not_fit_holds_nothing_back() -> None:
    queue = queue_of(1)
    arrive(queue, "big", DeadlineSlo(5.0), input_tokens=1000)
    arrive(queue, "small", DeadlineSlo(60.0))
    assert bound(queue, {0: offer(8, kv=500)}) == {"small": 0}
    assert bound(queue, {0: offer(8, kv=5000)}) == {"big": 0}


def test_the_best_are_bound_first() -> None:
    queue = queue_of(1)
    arrive(queue, "whenever", BestEffortSlo(600.0))
    arrive(queue, "loose", DeadlineSlo(60.0))
    arrive(queue, "tight", DeadlineSlo(2.0))
    assert [bound(queue, {0: offer(1)}) for _ in range(3)] == [
        {"tight": 0},
        {"loose": 0},
        {"whenever": 0},
    ]


@pytest.mark.parametrize("policy", PLAIN)
def test_equals_are_bound_in_order_of_arrival_under_every_policy(policy: str) -> None:
    queue = queue_of(2, policy=policy)
    for index in range(6):
        arrive(queue, f"r{index}")
    for index in range(0, 6, 2):
        found = bound(queue, {0: offer(1), 1: offer(1)})
        assert sorted(found) == [f"r{index}", f"r{index + 1}"]


def test_a_tight_deadline_goes_to_the_replica_that_is_fast_enough() -> None:
    # 20 tokens take 5 s on the slow one and a third of a second on the other.
    for slow, fast in ((0, 1), (1, 0)):
        queue = queue_of(2)
        arrive(queue, "tight", DeadlineSlo(2.0))
        assert bound(queue, {slow: offer(step_s=0.25), fast: offer()}) == {"tight": fast}


def test_of_two_the_one_that_only_the_fast_replica_can_serve_in_time_gets_it() -> None:
    queue = queue_of(2)
    arrive(queue, "loose", DeadlineSlo(60.0))
    arrive(queue, "tight", DeadlineSlo(2.0))
    found = bound(queue, {0: offer(step_s=0.25), 1: offer()})
    assert found == {"tight": 1, "loose": 0}


def test_a_request_without_a_dummy_on_the_fast_replica_goes_to_the_slow_one() -> None:
    queue = queue_of(2, 1, rng=Fixed([0]))
    arrive(queue, "tight", DeadlineSlo(2.0))
    assert bound(queue, {0: offer(step_s=0.25), 1: offer()}) == {"tight": 0}


def test_of_like_replicas_the_one_with_the_lower_number_is_taken() -> None:
    queue = queue_of(3)
    arrive(queue, "a")
    assert bound(queue, {2: offer(), 1: offer()}) == {"a": 1}


@pytest.mark.parametrize("silent", [{}, {0: offer(0)}, {0: offer(8, kv=0)}])
def test_a_replica_that_offers_nothing_holds_nothing_back(
    silent: dict[int, ReplicaOffer],
) -> None:
    queue = queue_of(2)
    for index in range(3):
        arrive(queue, f"r{index}")
    assert bound(queue, {**silent, 1: offer(8)}) == {"r0": 1, "r1": 1, "r2": 1}


def test_without_offers_or_requests_nothing_is_bound() -> None:
    queue = queue_of(2)
    assert queue.assign(NOW_S, {0: offer(), 1: offer()}) == []
    arrive(queue, "a")
    assert queue.assign(NOW_S, {}) == []
    assert queue.dummies("a") == (0, 1)


def test_a_replica_that_there_is_not_is_refused() -> None:
    queue = queue_of(2)
    arrive(queue, "a")
    with pytest.raises(IndexError):
        queue.assign(NOW_S, {2: offer()})


def test_a_replica_of_a_negative_number_is_refused() -> None:
    queue = queue_of(2)
    arrive(queue, "a")
    with pytest.raises(IndexError):
        queue.assign(NOW_S, {-1: offer()})


def test_a_prompt_as_large_as_an_empty_replica_is_bound_to_it() -> None:
    queue = queue_of(1)
    arrive(queue, "big", input_tokens=995)
    assert bound(queue, {0: offer(8, kv=1000, total_kv=1000)}) == {"big": 0}


def test_a_short_answer_needs_kv_for_no_more_than_its_tokens() -> None:
    queue = queue_of(1)
    arrive(queue, "a", input_tokens=100, max_output_tokens=4)
    assert bound(queue, {0: offer(1, kv=105)}) == {"a": 0}


def test_however_many_do_not_fit_one_that_does_is_bound() -> None:
    queue = queue_of(1)
    for index in range(20):
        arrive(queue, f"big{index}", DeadlineSlo(10.0), input_tokens=1000)
    arrive(queue, "small", BestEffortSlo(600.0))
    assert bound(queue, {0: offer(1, kv=500)}) == {"small": 0}


def test_a_slower_replica_gets_what_the_faster_ones_leave() -> None:
    queue = queue_of(2)
    for index in range(40):
        arrive(queue, f"r{index}")
    where = list(bound(queue, {0: offer(1, step_s=0.25), 1: offer(30)}).values())
    assert (where.count(0), where.count(1)) == (1, 30)


class Raises:
    """An objective that fails."""

    def answer_value(self, input_tokens: Floats, output_tokens: Floats) -> Floats:
        raise ZeroDivisionError

    def stream_value(self, tokens_in_time: Floats, all_tokens: Floats) -> Floats:
        raise ZeroDivisionError


def test_a_users_objective_that_raises_does_not_stop_the_queue() -> None:
    queue = queue_of(1, objective=Raises())
    arrive(queue, "a")
    assert bound(queue, {0: offer()}) == {"a": 0}


# Leaving ------------------------------------------------------------------------------------------


def test_a_request_that_is_withdrawn_is_never_bound() -> None:
    queue = queue_of(2)
    arrive(queue, "a")
    arrive(queue, "b")
    assert queue.withdraw("a")
    assert (queue.dummies("a"), len(queue)) == ((), 1)
    assert bound(queue, {0: offer(8), 1: offer(8)}) == {"b": 0}


def test_only_what_still_waits_can_be_withdrawn() -> None:
    queue = queue_of(2)
    assert not queue.withdraw("never seen")
    arrive(queue, "a")
    bound(queue, {0: offer()})
    assert not queue.withdraw("a")
    arrive(queue, "b")
    assert queue.withdraw("b")
    assert not queue.withdraw("b")


def test_calls_of_programs_come_and_go() -> None:
    queue = queue_of(2)
    arrive(queue, "a", CompoundSlo(60.0, "p"))
    arrive(queue, "b", CompoundSlo(60.0, "p", final=True))
    assert queue.withdraw("a")
    assert bound(queue, {1: offer()}) == {"b": 1}
    arrive(queue, "c", CompoundSlo(60.0, "p"))
    assert bound(queue, {0: offer()}) == {"c": 0}


# All of it ----------------------------------------------------------------------------------------

SLOS = st.sampled_from(
    [
        LatencySlo(1.0, 0.125),
        DeadlineSlo(2.0),
        DeadlineSlo(-5.0),
        CompoundSlo(30.0, "p"),
        CompoundSlo(30.0, "q", final=True),
        BestEffortSlo(600.0),
    ]
)
ARRIVALS = st.tuples(st.just("arrive"), SLOS, st.integers(1, 300))
OFFERS = st.tuples(
    st.just("assign"),
    st.dictionaries(
        st.integers(0, 2),
        st.tuples(st.integers(0, 3), st.integers(0, 900), st.sampled_from([STEP_S, 0.25])),
    ),
    st.floats(-10, 100),
)
WITHDRAWALS = st.tuples(st.just("withdraw"), st.integers(0, 20), st.none())


@given(
    k=st.integers(1, 3),
    seed=st.integers(0, 9),
    policy=st.sampled_from(["gmax", "gmax-paper", "fcfs", "edf", "vtc", "plas"]),
    events=st.lists(ARRIVALS | OFFERS | WITHDRAWALS, max_size=16),
)
def test_every_request_is_bound_at_most_once_and_only_where_a_dummy_of_it_was(
    k: int, seed: int, policy: str, events: list[tuple[Any, ...]]
) -> None:
    queue = queue_of(3, k, rng=random.Random(seed), policy=policy)
    waiting: dict[str, tuple[tuple[int, ...], int]] = {}
    gone: set[str] = set()
    for count, (event, what, how) in enumerate(events):
        if event == "arrive":
            waiting[str(count)] = (arrive(queue, str(count), what, input_tokens=how), how)
        elif event == "withdraw":
            assert queue.withdraw(str(what)) == (str(what) in waiting)
            if waiting.pop(str(what), None):
                gone.add(str(what))
        else:
            slots = {replica: free for replica, (free, _, _) in what.items()}
            kv = {replica: free for replica, (_, free, _) in what.items()}
            offers = {
                replica: offer(free, tokens, step_s=step_s)
                for replica, (free, tokens, step_s) in what.items()
            }
            for assignment in queue.assign(NOW_S + how, offers):
                name, replica = assignment.request_id, assignment.replica
                assert name not in gone
                replicas, input_tokens = waiting.pop(name)
                gone.add(name)
                assert replica in replicas
                slots[replica] -= 1
                kv[replica] -= input_tokens + FRAME_STEPS
                assert slots[replica] >= 0
                assert kv[replica] >= 0
            # Nobody is left waiting for a replica that has room for it.
            for replicas, input_tokens in waiting.values():
                for replica in set(replicas) & set(slots):
                    assert slots[replica] < 1 or kv[replica] < input_tokens + FRAME_STEPS
        assert len(queue) == len(waiting)
        for name, (replicas, _) in waiting.items():
            assert queue.dummies(name) == replicas


def test_a_run_is_the_same_for_the_same_seed() -> None:
    def run() -> list[list[Assignment]]:
        queue = queue_of(4, 2, rng=random.Random(7))
        rounds = []
        for index in range(30):
            slo = LatencySlo(1.0, 0.125) if index % 2 else DeadlineSlo(2.0 + index)
            arrive(queue, f"r{index}", slo)
            if index % 3 == 2:
                offers = {replica: offer(1) for replica in range(index % 4 + 1)}
                rounds.append(queue.assign(NOW_S + index, offers))
        return rounds

    assert run() == run()
