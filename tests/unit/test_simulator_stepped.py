"""``FrameManager.stepped`` is ``progressed`` for many at once."""

from __future__ import annotations

import random

import numpy as np
import pytest

from core.slo import (
    BestEffortSlo,
    CompoundSlo,
    DeadlineSlo,
    LatencySlo,
    ReasoningSlo,
    RequestTerms,
    Slo,
)
from scheduler.config import SchedulerConfig
from scheduler.frame import FrameManager
from scheduler.lifecycle import RequestState
from scheduler.plan import EngineCapacity

CAPACITY = EngineCapacity(8, 100_000, 100_000, 64)
KINDS: tuple[Slo, ...] = (
    LatencySlo(1.0, 0.05),
    LatencySlo(0.01, 0.001),
    DeadlineSlo(9.0),
    CompoundSlo(9.0, "p"),
    CompoundSlo(9.0, "q"),
    BestEffortSlo(600.0),
    ReasoningSlo(5.0, 0.1),
)


def manager(policy: str) -> FrameManager:
    frames = FrameManager(SchedulerConfig(policy=policy, fairness=0.2, frame_steps=5))
    for index in range(21):
        frames.arrive(
            f"r{index}",
            RequestTerms(0.0, KINDS[index % len(KINDS)], tenant="abc"[index % 3]),
            input_tokens=10 + index,
            max_output_tokens=200,
        )
        frames.started(f"r{index}", 0.0)
    frames.answer_began("r6")
    return frames


def figures(frames: FrameManager) -> list[object]:
    programs = frames.programs
    return [
        [frames.tenants.service_of(tenant) for tenant in "abc"],
        programs.column("service").tolist(),
        [(item.request_id, item.generated_tokens, item.next_due_s()) for item in frames.live()],
        [bool(frames.table.is_stale[item.row]) for item in frames.live()],
    ]


@pytest.mark.parametrize("policy", ["fcfs", "plas", "vtc", "gmax"])
def test_a_step_is_a_token_for_each(policy: str) -> None:
    rng = random.Random(3)
    one, many = manager(policy), manager(policy)
    for number in range(40):
        names = [f"r{index}" for index in range(21) if one.get(f"r{index}") is not None]
        who = rng.sample(names, rng.randint(0, len(names)))
        for name in who:
            live = one.get(name)
            assert live is not None
            one.progressed(name, live.generated_tokens + 1)
        many.stepped([item for name in who if (item := many.get(name)) is not None])
        assert figures(one) == figures(many)
        if one.policy.tuner is not None and number % 7 == 0:
            assert one._earnings.take(100.0) == pytest.approx(many._earnings.take(100.0))
        if number % 10 == 9:
            for frames in (one, many):
                frames.ended(names[0], RequestState.FINISHED)
                plan = frames.tick(number * 0.1, CAPACITY)
                assert plan is not None
            assert figures(one) == figures(many)


def test_several_calls_of_a_program_and_of_a_tenant_in_one_step() -> None:
    frames = FrameManager(SchedulerConfig())
    requests = []
    for index in range(5):
        terms = RequestTerms(0.0, CompoundSlo(9.0, "p"), tenant="a")
        frames.arrive(f"r{index}", terms, input_tokens=10, max_output_tokens=9)
        frames.started(f"r{index}", 0.0)
        item = frames.get(f"r{index}")
        assert item is not None
        requests.append(item)
    service = frames.tenants.service_of("a")
    frames.stepped(requests)
    assert frames.tenants.service_of("a") == service + 10
    assert np.max(frames.programs.column("service")) == 55


def test_a_step_of_nobody() -> None:
    frames = manager("gmax")
    before = figures(frames)
    frames.stepped([])
    assert figures(frames) == before
