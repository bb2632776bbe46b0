"""The step-time model, fitted to steps of an engine whose law is known."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.step_time import StepObservation, StepTimeModel

Law = tuple[float, float, float, float]
CPU_LAW: Law = (0.015, 0.004, 2e-6, 4e-4)
GPU_LAW: Law = (0.006, 2e-5, 3e-8, 2e-5)
BAD_DURATIONS = [0.0, -1.0, math.nan, math.inf, -math.inf, 1e300]


def duration_s(law: Law, decodes: int, context: int, prefill: int) -> float:
    """Seconds of a step under the law."""
    return law[0] + law[1] * decodes + law[2] * context + law[3] * prefill


def steps_of(
    law: Law, num_steps: int, *, noise: float = 0.03, seed: int = 7
) -> list[StepObservation]:
    """Steps as a server makes them: batches that grow and shrink, now and then a prefill."""
    rng = random.Random(seed)
    steps = []
    for _ in range(num_steps):
        decodes = rng.randrange(1, 33)
        context = sum(rng.randrange(20, 2000) for _ in range(decodes))
        prefill = rng.choice([0, 0, 0, rng.randrange(16, 1024)])
        exact_s = duration_s(law, decodes, context, prefill)
        observed_s = exact_s * rng.uniform(1 - noise, 1 + noise)
        steps.append(StepObservation(observed_s, decodes, context, prefill))
    return steps


def fitted(steps: list[StepObservation]) -> StepTimeModel:
    """A model after these steps."""
    model = StepTimeModel()
    for step in steps:
        model.observe(step)
    return model


@pytest.mark.parametrize("law", [CPU_LAW, GPU_LAW], ids=["cpu", "gpu"])
@pytest.mark.parametrize("seed", range(5))
def test_two_hundred_noisy_steps_are_enough_for_five_percent(law: Law, seed: int) -> None:
    model = fitted(steps_of(law, 200, seed=seed))
    for step in steps_of(law, 100, noise=0.0, seed=seed + 100):
        predicted = model.step_s(step.num_decodes, step.context_tokens, step.prefill_tokens)
        assert predicted == pytest.approx(step.duration_s, rel=0.05)


def test_without_noise_the_coefficients_are_found() -> None:
    model = fitted(steps_of(CPU_LAW, 400, noise=0.0))
    assert model.coefficients[:4] == pytest.approx(CPU_LAW, rel=0.02)
    assert model.coefficients[4] == 0
    assert model.prefill_s(1000) == pytest.approx(1000 * CPU_LAW[3], rel=0.02)


def test_padding_is_told_apart_from_context() -> None:
    rng = random.Random(5)
    model = StepTimeModel()
    for _ in range(400):
        decodes = rng.randrange(1, 33)
        contexts = [rng.randrange(20, 2000) for _ in range(decodes)]
        padding = decodes * max(contexts) - sum(contexts)
        seconds = duration_s(CPU_LAW, decodes, sum(contexts), 0) + 1e-6 * padding
        model.observe(StepObservation(seconds, decodes, sum(contexts), 0, padding))
    assert model.coefficients[2] == pytest.approx(CPU_LAW[2], rel=0.05)
    assert model.coefficients[4] == pytest.approx(1e-6, rel=0.05)


def test_prefill_costs_nothing_where_there_is_nothing_to_prefill() -> None:
    model = fitted(steps_of(CPU_LAW, 50))
    assert model.prefill_s(0) == 0.0
    assert model.step_s(4, 100, 300) == pytest.approx(model.step_s(4, 100) + model.prefill_s(300))


def test_it_follows_an_engine_that_becomes_slower() -> None:
    twice = (2 * CPU_LAW[0], 2 * CPU_LAW[1], 2 * CPU_LAW[2], 2 * CPU_LAW[3])
    model = fitted(steps_of(CPU_LAW, 300) + steps_of(twice, 1500, seed=8))
    assert model.step_s(16, 8000) == pytest.approx(duration_s(twice, 16, 8000, 0), rel=0.1)


def test_a_stall_of_a_minute_does_not_wreck_the_fit() -> None:
    model = fitted(steps_of(CPU_LAW, 200))
    expected_s = model.step_s(16, 16_000)
    model.observe(StepObservation(60.0, 16, 16_000, 0))
    assert model.step_s(16, 16_000) < expected_s * 1.3
    for step in steps_of(CPU_LAW, 400, seed=9):
        model.observe(step)
    assert model.step_s(16, 16_000) == pytest.approx(duration_s(CPU_LAW, 16, 16_000, 0), rel=0.05)


@pytest.mark.parametrize("bad_s", BAD_DURATIONS)
def test_a_duration_that_cannot_be_is_ignored(bad_s: float) -> None:
    model = fitted(steps_of(CPU_LAW, 30))
    before = (model.coefficients, model.num_steps)
    model.observe(StepObservation(bad_s, 16, 8000, 100))
    assert (model.coefficients, model.num_steps) == before


def test_steps_are_counted() -> None:
    assert fitted(steps_of(CPU_LAW, 17)).num_steps == 17


def test_before_any_step_predictions_are_sensible_and_grow_with_the_load() -> None:
    model = StepTimeModel()
    assert 1e-3 < model.step_s(1, 100) < model.step_s(32, 20_000) < model.step_s(32, 20_000, 4096)
    assert model.step_s(32, 20_000, 4096) < 10


@pytest.mark.parametrize("law", [CPU_LAW, GPU_LAW], ids=["cpu", "gpu"])
def test_a_steady_load_for_long_keeps_the_model_sound(law: Law) -> None:
    # Such steps hardly tell the coefficients apart; forgetting must not let noise decide them.
    rng = random.Random(1)
    model = StepTimeModel()
    for step in range(4000):
        context = 4000 + step % 50
        observed_s = duration_s(law, 8, context, 0) * rng.uniform(0.9, 1.1)
        model.observe(StepObservation(observed_s, 8, context, 0))
        if step > 200:
            assert model.step_s(8, context) == pytest.approx(
                duration_s(law, 8, context, 0), rel=0.2
            )
    for load in steps_of(law, 600):
        model.observe(load)
    assert model.step_s(16, 8000, 500) == pytest.approx(duration_s(law, 16, 8000, 500), rel=0.06)


durations = st.sampled_from(BAD_DURATIONS) | st.floats(1e-9, 1e9) | st.floats(1e-3, 1.0)
observations = st.builds(
    StepObservation,
    durations,
    st.integers(0, 10_000),
    st.integers(0, 10**10),
    st.integers(0, 10**8),
)


@given(st.lists(observations, max_size=60))
def test_predictions_are_finite_and_positive_whatever_was_observed(
    steps: list[StepObservation],
) -> None:
    model = fitted(steps)
    for load in ((0, 0, 0), (1, 100, 0), (256, 10**6, 8192), (10_000, 10**10, 10**8)):
        predicted_s = model.step_s(*load)
        assert math.isfinite(predicted_s)
        assert predicted_s > 0
    assert math.isfinite(model.prefill_s(10**8))
    assert model.prefill_s(10**8) >= 0
    assert all(value >= 0 for value in model.coefficients)


def test_a_step_as_expected_changes_nothing_and_one_that_is_not_does() -> None:
    # 10 ms and 1 ms a decode: 18 ms of eight, and a thousandth of it is 18 us.
    for duration_s, is_news in ((0.018, False), (0.018017, False), (0.018019, True)):
        model = StepTimeModel.known(0.01, 0.001)
        for _ in range(20):
            model.observe(StepObservation(0.018, 8, 0, 0))
        before_s = model.step_s(8, 0)
        assert before_s == pytest.approx(0.018, rel=1e-6)
        before = model.coefficients
        model.observe(StepObservation(duration_s, 8, 0, 0))
        assert (model.coefficients != before) == is_news
        assert model.num_steps == 21


def test_where_prompts_run_beside_decodes_their_chunks_take_steps() -> None:
    model = StepTimeModel.known(0.01, 0.001, prefill_s=1e-4)
    assert model.prompt_token_s(0.02) == pytest.approx(1e-4)
    # Alone a prompt holds nobody up; nobody's decodes were beside it.
    model.observe(StepObservation(0.01 + 1e-4 * 800, 0, 0, 800))
    assert model.prompt_token_s(0.02) == pytest.approx(1e-4, rel=1e-3)
    for chunk in (100, 200, 50):
        model.observe(StepObservation(0.02 + 1e-4 * chunk, 10, 0, chunk))
    # The largest chunk of the 200: 20 ms for each.
    assert model.prompt_token_s(0.02) == pytest.approx(1e-4 + 0.02 / 200, rel=1e-3)


def test_a_chunk_that_is_not_seen_any_more_is_forgotten() -> None:
    model = StepTimeModel.known(0.01, 0.001, prefill_s=1e-4)
    model.observe(StepObservation(0.02 + 1e-4 * 2000, 10, 0, 2000))
    for _ in range(20_000):
        model.observe(StepObservation(0.02 + 1e-4 * 100, 10, 0, 100))
    # 2,000 / e = 736 tokens after so many steps; half of it after 14,000 more.
    beside_s = model.prompt_token_s(0.02) - model.prompt_token_s(0.0)
    assert beside_s == pytest.approx(0.02 / (2000 / math.e), rel=1e-3)


def test_the_pace_counts_the_prompts_that_come_in_between() -> None:
    model = StepTimeModel.known(0.01, 0.001, prefill_s=1e-4)
    assert model.pace_s(10, 0) == pytest.approx(0.02)
    for _ in range(2000):
        model.observe(StepObservation(0.02 + 1e-4 * 50, 10, 0, 50))
    # 5 prompt tokens per decoded token: half a millisecond for each of the ten.
    assert model.prefill_s_per_decode == pytest.approx(5e-4, rel=0.05)
    assert model.pace_s(10, 0) == pytest.approx(0.025, rel=0.05)
