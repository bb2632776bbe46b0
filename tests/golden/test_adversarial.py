"""The paper's adversarial sequences (appendix): EDF and SJF fall without bound, ours does not."""

from __future__ import annotations

import random

import pytest

from bench.exact import Instance, Job, achieved, optimum, random_instance

THEOREM = 1 / 8.56
NUM_SMALL = 12
OURS = ("gmax", "gmax-paper", "gmax-oracle", "gmax-paper-oracle")


def one_big_among_many_small(big_value: int) -> Instance:
    """A is worth much and takes all of the time; a small one with less to wait comes each step.

    Each B is the shorter and the more urgent, so EDF and SJF serve all of them and A too late.
    """
    big = Job(arrival=0, steps=NUM_SMALL + 1, due=NUM_SMALL + 1, input_tokens=big_value)
    small = [Job(arrival=i, steps=1, due=i + 1, input_tokens=0) for i in range(NUM_SMALL)]
    return Instance(1, (big, *small))


@pytest.mark.parametrize("big_value", [100, 1_000, 10_000, 100_000])
@pytest.mark.parametrize("policy", ["edf", "sjf"])
def test_edf_and_sjf_earn_the_same_however_much_the_big_one_is_worth(
    policy: str, big_value: int
) -> None:
    instance = one_big_among_many_small(big_value)
    assert optimum(instance) == big_value + NUM_SMALL + 1
    assert achieved(instance, policy) == NUM_SMALL


@pytest.mark.parametrize("big_value", [100, 1_000, 10_000, 100_000])
@pytest.mark.parametrize("policy", OURS)
def test_ours_serves_the_big_one(policy: str, big_value: int) -> None:
    instance = one_big_among_many_small(big_value)
    assert achieved(instance, policy) == optimum(instance)


def test_the_optimum_of_an_instance_worked_out_by_hand() -> None:
    # Two slots and three jobs of four steps each in six steps of time: all three fit only by
    # interrupting one and going on with it in the other slot.
    jobs = tuple(Job(arrival=0, steps=4, due=6, input_tokens=0) for _ in range(3))
    assert optimum(Instance(2, jobs)) == 12
    assert optimum(Instance(1, jobs)) == 4
    tighter = tuple(Job(arrival=0, steps=4, due=5, input_tokens=0) for _ in range(3))
    assert optimum(Instance(2, tighter)) == 8


@pytest.mark.parametrize("policy", OURS)
def test_the_theorem_holds_on_random_instances(policy: str) -> None:
    rng = random.Random(11)
    for _ in range(150):
        instance = random_instance(rng)
        assert achieved(instance, policy) >= THEOREM * optimum(instance)
