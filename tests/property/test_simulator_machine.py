"""Random simulations under audit, and the KV pool against a naive model of it."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from simulated import Run, call, program, simulate, stage, workload

from core.slo import (
    BestEffortSlo,
    CompoundSlo,
    DeadlineSlo,
    LatencySlo,
    OnMiss,
    OutcomeTracker,
    RequestTerms,
)
from engine.simulator.analysts import (
    KnownLengths,
    KnownPrograms,
    NoisyLengths,
    ProgramHabits,
    UnawareOfLengths,
    UnawareOfPrograms,
)
from engine.simulator.dispatch import (
    ByProgram,
    LeastLoad,
    OnlyOne,
    PowerOfKDispatch,
    RoundRobin,
)
from engine.simulator.job import Job
from engine.simulator.kv import KvPool
from engine.simulator.lanes import Lanes
from engine.simulator.shape import EngineShape
from engine.simulator.steps import LinearSteps
from engine.simulator.workload import SimCall, SimProgram, Workload
from scheduler.config import SchedulerConfig

# Random workloads ---------------------------------------------------------------------------------

POLICY_NAMES = (
    *("fcfs", "sarathi", "edf", "sjf", "plas", "ltr", "vtc", "gmax", "gmax-paper"),
    *("gmax+cancel", "edf+cancel", "gmax-oracle"),
)


def random_workload(rng: random.Random, num_programs: int) -> Workload:
    """Programs of every kind, some of which share prompts, some of which never fit."""
    at_s, programs = 0.0, []
    for index in range(num_programs):
        if rng.random() < 0.7:
            at_s += rng.choice([0.0, 0.01, 0.1, 0.5])
        more = {
            "tenant": rng.choice(["", "a", "b"]),
            "on_miss": rng.choice(list(OnMiss)),
            "waiting_time_s": rng.choice([None, None, 0.001, 0.05, 1.0]),
            "application": rng.choice(["x", "y"]),
        }
        programs.append(_random_program(rng, index, at_s, more))
    return workload(*programs)


def _random_call(rng: random.Random, index: int, number: int, *, follows: bool) -> SimCall:
    limit = rng.choice([40, 40, 120, 500])
    output = rng.randint(1, 40)
    prefix, tokens, leaves = 0, 0, 0
    size = rng.randint(1, limit)
    kind = rng.random()
    if kind < 0.4:
        prefix = 1 + rng.randrange(3)
        tokens = 20 * prefix
        size += tokens
    elif kind < 0.7 and follows:
        prefix, tokens = 100 + index * 10 + number - 1, min(size, 30)
    if rng.random() < 0.5:
        leaves = 100 + index * 10 + number
    return call(
        size,
        output,
        max_output_tokens=output + rng.choice([0, 10, 4000]),
        prefix=prefix,
        prefix_tokens=tokens,
        leaves=leaves,
        role=rng.choice(["", "r"]),
    )


def _random_program(rng: random.Random, index: int, at_s: float, more: dict) -> SimProgram:
    kind = rng.randrange(4)
    if kind < 3:
        slo = (
            LatencySlo(rng.choice([0.05, 1.0]), rng.choice([0.01, 0.02, 0.1])),
            DeadlineSlo(rng.choice([0.1, 1.0, 5.0])),
            BestEffortSlo(rng.choice([1.0, 600.0])),
        )[kind]
        return program(
            stage(_random_call(rng, index, 0, follows=False)), at_s=at_s, slo=slo, **more
        )
    stages = [
        stage(
            *(
                _random_call(rng, index, number, follows=number > 0)
                for _ in range(rng.randint(1, 3))
            ),
            tool_s=rng.choice([0.0, 0.1]),
        )
        for number in range(rng.randint(1, 3))
    ]
    slo = CompoundSlo(rng.choice([0.5, 3.0, 30.0]), "")
    return program(*stages, at_s=at_s, slo=slo, **more)


def _random_shape(rng: random.Random) -> EngineShape:
    return EngineShape(
        max_batch=rng.randint(1, 5),
        kv_tokens=rng.choice([60, 100, 200, 400]),
        slots=rng.choice([0, 1, 2, 5, 8]),
        chunk_tokens=rng.choice([1, 16, 64, 512]),
        mixes_chunks=rng.random() < 0.5,
        swap_token_s=rng.choice([None, 0.0, 1e-5, 1.0]),
        has_prefix_cache=rng.random() < 0.7,
    )


def _random_speed(rng: random.Random) -> LinearSteps:
    return LinearSteps(
        constant_s=rng.choice([1e-3, 0.02]),
        decode_s=rng.choice([0.0, 1e-3]),
        context_s=rng.choice([0.0, 1e-5]),
        padding_s=rng.choice([0.0, 1e-6]),
        prefill_s=rng.choice([0.0, 1e-4]),
        pair_s=rng.choice([0.0, 1e-7]),
    )


def random_run(seed: int) -> Run:
    """Everything at random: load, engines, policy, what is known, who gets what."""
    rng = random.Random(seed)
    work = random_workload(rng, rng.randrange(15))
    num_replicas = rng.choice([1, 1, 2, 3])
    options = {
        "frame_steps": rng.choice([1, 2, 5, 50]),
        "fairness": rng.choice([0.0, 0.5]),
        "goodput": rng.choice(["token", "request"]),
    }
    policy = rng.choice(POLICY_NAMES)
    analysts = rng.choice(
        [
            lambda: (UnawareOfLengths(), UnawareOfPrograms()),
            lambda: (KnownLengths(), KnownPrograms()),
            lambda: (NoisyLengths(0.5, seed, latency_s=0.02), ProgramHabits(latency_s=0.05)),
        ]
    )
    lengths, programs = analysts()
    dispatcher = rng.choice(
        [
            OnlyOne,
            RoundRobin,
            LeastLoad,
            ByProgram,
            lambda: PowerOfKDispatch(
                num_replicas,
                min(2, num_replicas),
                SchedulerConfig(policy=policy, **options),
                random.Random(seed),
            ),
        ]
    )()
    return simulate(
        work,
        *(_random_shape(rng) for _ in range(num_replicas)),
        steps=[_random_speed(rng) for _ in range(num_replicas)],
        policy=policy,
        config=options,
        knows_speed=rng.random() < 0.5,
        drain_s=rng.choice([None, None, 0.5]),
        lengths=lengths,
        programs=programs,
        dispatcher=dispatcher,
    )


@pytest.mark.parametrize("first_seed", range(0, 120, 10))
def test_nothing_is_lost_and_nothing_is_over_its_limit(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 10):
        random_run(seed)


# The pool of KV -----------------------------------------------------------------------------------

TOTAL = 300
ROOTS = {1: 30, 2: 60, 3: 90}
"""Texts that many prompts begin with, and their tokens."""


@dataclass
class Holder:
    """A request that holds KV."""

    call: SimCall
    hit: int
    own: int
    is_computed: bool = False

    @property
    def tokens(self) -> int:
        return self.hit + self.own


class PoolMachine(RuleBasedStateMachine):
    """A pool against a model that knows of each text only its size, its parent and its users."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = KvPool(TOTAL)
        self.sizes = dict(ROOTS)
        self.parents = dict.fromkeys(ROOTS, 0)
        self.holders: list[Holder] = []
        self.next_name = 100

    # What the model knows.

    def chain(self, name: int) -> set[int]:
        names = set()
        while name:
            names.add(name)
            name = self.parents[name]
        return names

    def own_size(self, name: int) -> int:
        return self.sizes[name] - self.sizes.get(self.parents[name], 0)

    def in_use(self) -> set[int]:
        users = [holder.call.prefix for holder in self.holders if holder.hit]
        return set().union(*map(self.chain, users))

    def present(self) -> set[int]:
        return {name for name in self.sizes if self.is_present(name)}

    def is_present(self, name: int) -> bool:
        size = self.sizes[name]
        whole = call(size + 1, 1, prefix=name, prefix_tokens=size)
        cached = self.pool.cached(whole)
        assert cached in (0, size), "a text is there whole or not at all"
        return cached > 0

    def taken(self, in_use: set[int]) -> int:
        return sum(holder.own for holder in self.holders) + sum(map(self.own_size, in_use))

    def check_evicted(self, before: set[int], used: set[int], need: int, held: int) -> None:
        """Only what nobody uses goes, no more than it takes, children before parents."""
        after = self.present()
        gone = before - after
        assert not gone & used, "evicted though in use"
        for name in after:
            assert self.chain(name) <= after, "a parent went before its child"
        if held + sum(map(self.own_size, before)) + need <= TOTAL:
            assert not gone, "evicted without need"
        elif gone:
            stays = held + need + sum(map(self.own_size, after))
            assert stays + max(map(self.own_size, gone)) > TOTAL, "evicted more than it takes"

    # What happens.

    @rule(data=st.data(), extra=st.integers(1, 80), leaves=st.booleans())
    def begin(self, data, extra: int, leaves: bool) -> None:
        prefix = data.draw(st.sampled_from([0, *self.sizes]))
        size = self.sizes.get(prefix, 0)
        name = self.next_name if leaves else 0
        self.next_name += 1
        asked = call(size + extra, 5, prefix=prefix, prefix_tokens=size, leaves=name)
        self.start(asked)

    @rule(name=st.sampled_from(sorted(ROOTS)))
    def begin_with_nothing_else(self, name: int) -> None:
        size = ROOTS[name]
        self.start(call(size, 5, prefix=name, prefix_tokens=size))

    def start(self, asked: SimCall) -> None:
        before, used = self.present(), self.in_use()
        expected = 0
        if asked.prefix in before:
            expected = min(self.sizes[asked.prefix], asked.input_tokens - 1)
        assert self.pool.cached(asked) == expected
        needs = used | (self.chain(asked.prefix) if expected else set())
        fresh = asked.input_tokens - expected
        held = sum(holder.own for holder in self.holders)
        fits = self.taken(needs) + fresh <= TOTAL
        assert self.pool.fits(asked, asked.input_tokens) == fits
        if not fits:
            figures = (self.pool.available_tokens, self.pool.own_tokens)
            with pytest.raises(ValueError, match="fit"):
                self.pool.begin(asked, asked.input_tokens)
            assert figures == (self.pool.available_tokens, self.pool.own_tokens)
            assert self.present() == before
            return
        hit = self.pool.begin(asked, asked.input_tokens)
        assert hit == expected
        self.holders.append(Holder(asked, hit, fresh))
        self.check_evicted(before, needs, fresh, held)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), tokens=st.integers(1, 60))
    def grow(self, data, tokens: int) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        before, used = self.present(), self.in_use()
        if self.taken(used) + tokens > TOTAL:
            with pytest.raises(ValueError, match="fit"):
                self.pool.grow(tokens)
            return
        held = sum(other.own for other in self.holders)
        self.pool.grow(tokens)
        holder.own += tokens
        self.check_evicted(before, used, tokens, held)

    @precondition(lambda self: any(not holder.is_computed for holder in self.holders))
    @rule(data=st.data())
    def share(self, data) -> None:
        waiting = [holder for holder in self.holders if not holder.is_computed]
        holder = data.draw(st.sampled_from(waiting))
        prefix = holder.call.prefix
        was_there = prefix in self.present()
        if prefix >= 100 and not was_there:
            # It is now a text of its own, wherever it came from.
            self.parents[prefix] = 0
        hit = self.pool.share(holder.call, holder.hit)
        assert hit == holder.call.prefix_tokens
        holder.own -= hit - holder.hit
        holder.hit, holder.is_computed = hit, True
        assert not prefix or prefix in self.present()

    @precondition(lambda self: any(holder.is_computed for holder in self.holders))
    @rule(data=st.data())
    def end(self, data) -> None:
        done = [holder for holder in self.holders if holder.is_computed]
        holder = data.draw(st.sampled_from(done))
        before = self.present()
        self.pool.end(holder.call, holder.hit, holder.tokens)
        self.holders.remove(holder)
        name = holder.call.leaves
        if name:
            self.sizes[name] = holder.tokens
            self.parents[name] = holder.call.prefix
            before.add(name)
        assert self.present() == before

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def give_up(self, data) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        before = self.present()
        self.pool.give_up(holder.call, holder.hit, holder.tokens)
        self.holders.remove(holder)
        assert self.present() == before

    @invariant()
    def account_agrees(self) -> None:
        held = sum(holder.own for holder in self.holders)
        assert self.pool.own_tokens == held
        assert self.pool.available_tokens == TOTAL - self.taken(self.in_use())
        assert 0 <= self.pool.available_tokens <= TOTAL
        assert held + sum(map(self.own_size, self.present())) <= TOTAL

    def teardown(self) -> None:
        for holder in self.holders:
            self.pool.give_up(holder.call, holder.hit, holder.tokens)
        assert self.pool.own_tokens == 0
        assert self.pool.available_tokens == TOTAL


PoolMachine.TestCase.settings = settings(
    max_examples=200,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestPool = PoolMachine.TestCase


# Judging ------------------------------------------------------------------------------------------

moments = st.one_of(
    st.integers(0, 60).map(lambda tenths: tenths / 10), st.floats(0, 6, allow_nan=False)
)
targets = st.sampled_from([0.001, 0.1, 0.3, 0.7])


@given(
    times=st.lists(moments, min_size=1, max_size=12).map(sorted),
    arrival_s=st.sampled_from([0.0, 0.1, 0.7]),
    ttft_s=targets,
    tbt_s=targets,
    losses=st.sets(st.integers(1, 11)),
    company=st.integers(0, 3),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_lanes_judge_token_by_token_as_the_tracker_does(
    times: list[float],
    arrival_s: float,
    ttft_s: float,
    tbt_s: float,
    losses: set[int],
    company: int,
) -> None:
    """Also a request that has lost its KV in between, whose lane others had before."""
    lanes = Lanes()
    slo = LatencySlo(ttft_s, tbt_s)
    terms = RequestTerms(arrival_s, slo)
    others = [
        Job(
            number + 1,
            call(5, 99),
            RequestTerms(0.0, LatencySlo(9.0, 0.5)),
            program=1 + number,
            stage=0,
            place=0,
        )
        for number in range(company)
    ]
    for other in others:
        lanes.first_token(other, 0.0)
        lanes.enter(other)
    job = Job(0, call(10, len(times)), terms, program=0, stage=0, place=0)
    times = [arrival_s + time_s for time_s in times]
    tracker = OutcomeTracker(terms)
    has_lane = False
    for index, now_s in enumerate(times):
        tracker.sent(index + 1, now_s)
        if index in losses and has_lane:
            lanes.leave(job)
            has_lane = False
            if others:
                lanes.leave(others[-1])
                lanes.enter(others[-1])
        if has_lane:
            done = job.lane in lanes.step(lanes.at([job, *others]), now_s).tolist()
        else:
            done = lanes.first_token(job, now_s)
            lanes.enter(job)
            has_lane = True
        assert done == (index + 1 == len(times))
    lanes.leave(job)
    outcome = tracker.finish(10, times[-1])
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert job.generated == outcome.output_tokens == len(times)
    assert job.on_time_tokens == outcome.goodput_tokens
    assert (job.worst_lateness_s <= 0) == outcome.met
    assert job.worst_lateness_s == pytest.approx(outcome.worst_lateness_s, abs=1e-6)
    assert job.first_token_s == times[0]
    assert job.last_token_s == times[-1]
    assert job.max_tbt_s == max(gaps, default=0.0)
