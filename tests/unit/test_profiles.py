"""Roofline step times: what must hold for any, and figures worked out by hand."""

import itertools
import math

import msgspec
import pytest

from engine.simulator import profiles
from engine.simulator.profiles import (
    A100,
    GRID,
    HARDWARE,
    LLAMA_31_8B,
    LLAMA_31_70B,
    MODELS,
    QWEN3_30B_A3B,
    Hardware,
    ModelShape,
    Overheads,
)
from engine.simulator.steps import A100_LLAMA_8B, Step

NOTHING = Overheads(layer_s=0.0, all_reduce_s=0.0, request_s=0.0)
PEAK = msgspec.structs.replace(A100, flops_share=1.0, bandwidth_share=1.0, link_share=1.0)
EVERY = [(model, gpu) for model in MODELS.values() for gpu in HARDWARE.values()]


def name_of(value: object) -> str:
    return getattr(value, "name", str(value))


@pytest.mark.parametrize("model", MODELS.values(), ids=name_of)
def test_a_shape_has_the_parameters_of_its_model_card(model: ModelShape) -> None:
    embeddings = 2 * model.head_parameters
    total = model.attention_parameters + model.experts * model.expert_parameters + embeddings
    active = model.attention_parameters + model.top_k * model.expert_parameters + embeddings
    assert total == pytest.approx(model.parameters, rel=1e-3)
    assert active == pytest.approx(model.active_parameters, rel=5e-3)


@pytest.mark.parametrize(("model", "gpu"), EVERY, ids=name_of)
@pytest.mark.parametrize("field", ["num_decodes", "context_tokens", "prefill_tokens"])
def test_more_work_never_takes_less_time(model: ModelShape, gpu: Hardware, field: str) -> None:
    steps = profiles.profile(model, gpu, 4)
    base = Step(8, 8_000, 0, 100, 5_050)
    times = [steps.seconds(base._replace(**{field: value})) for value in range(8, 40_000, 397)]
    assert all(a <= b for a, b in itertools.pairwise(times))
    assert times[0] < times[-1]


@pytest.mark.parametrize(("model", "gpu"), EVERY, ids=name_of)
def test_every_step_takes_a_finite_time_above_0(model: ModelShape, gpu: Hardware) -> None:
    steps = profiles.profile(model, gpu)
    for step in (Step(0, 0, 0, 0), Step(1, 1, 0, 0), Step(512, 4_000_000, 9, 16_384, 10**9)):
        assert 0 < steps.seconds(step) < math.inf


def test_decoding_reads_each_weight_but_the_embedding_once() -> None:
    read = 2 * (LLAMA_31_8B.parameters - 128_256 * 4096) / 2.039e12
    steps = profiles.profile(LLAMA_31_8B, PEAK, 1, NOTHING)
    assert steps.seconds(Step(1, 0, 0, 0)) == pytest.approx(read, rel=1e-3)
    assert steps.seconds(Step(64, 0, 0, 0)) == pytest.approx(read, rel=1e-3)


def test_a_long_prompt_takes_two_flops_a_parameter_and_token() -> None:
    steps = profiles.profile(LLAMA_31_8B, PEAK, 1, NOTHING)
    took_s = steps.seconds(Step(0, 0, 0, 8192)) - steps.seconds(Step(0, 0, 0, 4096))
    layers = LLAMA_31_8B.parameters - 2 * 128_256 * 4096
    assert took_s == pytest.approx(4096 * 2 * layers / 312e12, rel=1e-3)


def test_a_pair_costs_the_flops_of_scores_and_values() -> None:
    steps = profiles.profile(LLAMA_31_8B, PEAK, 1, NOTHING)
    took_s = steps.seconds(Step(0, 0, 0, 10, 10**6)) - steps.seconds(Step(0, 0, 0, 10, 0))
    assert took_s == pytest.approx(10**6 * 4 * 32 * 32 * 128 / 312e12)


def test_context_costs_the_reading_of_its_keys_and_values() -> None:
    steps = profiles.profile(LLAMA_31_8B, PEAK, 1, NOTHING)
    assert steps.context_s == pytest.approx(131_072 / 2.039e12)
    assert steps.context_s == pytest.approx(A100_LLAMA_8B.context_s, rel=0.03)


def test_two_gpus_halve_weights_arithmetic_and_attention() -> None:
    one, two = (profiles.profile(LLAMA_31_70B, PEAK, gpus, NOTHING) for gpus in (1, 2))
    for name in ("weights_s", "token_s", "head_weights_s", "context_s", "pair_s"):
        assert getattr(two, name) == pytest.approx(getattr(one, name) / 2)
    assert one.reduce_token_s == 0
    # 160 all-reduces of 8,192 bf16 numbers, of which a ring of two sends all once.
    assert two.reduce_token_s == pytest.approx(160 * 8192 * 2 / 300e9)


def test_more_gpus_than_kv_heads_read_copies() -> None:
    four, eight = (profiles.profile(QWEN3_30B_A3B, PEAK, gpus, NOTHING) for gpus in (4, 8))
    assert eight.context_s == pytest.approx(four.context_s)
    assert eight.experts_s == pytest.approx(four.experts_s / 2)


def test_one_token_reads_its_own_experts_and_many_read_all() -> None:
    steps = profiles.profile(QWEN3_30B_A3B, PEAK, 1, NOTHING)
    rest_s = steps.weights_s + steps.head_weights_s
    assert steps.seconds(Step(1, 0, 0, 0)) - rest_s == pytest.approx(steps.experts_s * 8 / 128)
    assert steps.seconds(Step(150, 0, 0, 0)) - rest_s == pytest.approx(steps.experts_s, rel=1e-4)
    # Of two tokens' 16 choices some coincide: 1 - (1 - 8/128)^2 of all are read.
    read = 1 - (1 - 8 / 128) ** 2
    assert steps.seconds(Step(2, 0, 0, 0)) - rest_s == pytest.approx(steps.experts_s * read)


def test_prompts_go_through_the_active_parameters_only() -> None:
    steps = profiles.profile(QWEN3_30B_A3B, PEAK, 1, NOTHING)
    took_s = steps.seconds(Step(0, 0, 0, 200_000)) - steps.seconds(Step(0, 0, 0, 100_000))
    active = QWEN3_30B_A3B.active_parameters - 2 * QWEN3_30B_A3B.head_parameters
    assert took_s == pytest.approx(100_000 * 2 * active / 312e12, rel=0.01)


def test_launching_is_hidden_behind_a_busy_gpu_and_not_behind_an_idle_one() -> None:
    eager = Overheads(layer_s=0.0, launch_s=1e-3, request_s=0.0)
    steps = profiles.profile(LLAMA_31_8B, A100, 1, eager)
    busy = Step(0, 0, 0, 4096)
    assert steps.seconds(Step(1, 100, 0, 0)) == pytest.approx(32e-3)
    assert steps.seconds(busy) == profiles.profile(LLAMA_31_8B, A100, 1, NOTHING).seconds(busy)


def test_kv_tokens_as_worked_out_by_hand() -> None:
    # 72 GB less 16.06 GB of weights, at 128 KiB a token.
    expected = (72e9 - 2 * 8_030_261_248) / 131_072
    assert profiles.kv_tokens(LLAMA_31_8B, A100) == int(expected) == 426_784
    # On four GPUs 288 GB less 141 GB, at 320 KiB a token over all.
    expected = (288e9 - 2 * 70_553_706_496) / 327_680
    assert profiles.kv_tokens(LLAMA_31_70B, A100, 4) == int(expected)


def test_kv_of_copied_heads_takes_room_on_every_gpu() -> None:
    # 4 KV heads on 8 GPUs: each GPU holds one head, so a token takes twice its bytes.
    free = 8 * 72e9 - 2 * QWEN3_30B_A3B.parameters
    assert profiles.kv_tokens(QWEN3_30B_A3B, A100, 8) == int(free / (2 * QWEN3_30B_A3B.kv_bytes))


def test_weights_that_do_not_fit_say_so() -> None:
    with pytest.raises(ValueError, match=r"llama-3.1-70b does not fit on 1 x a100.*use more GPUs"):
        profiles.kv_tokens(LLAMA_31_70B, A100)
    with pytest.raises(ValueError, match="memory_fraction"):
        profiles.kv_tokens(LLAMA_31_8B, A100, memory_fraction=1.5)


@pytest.mark.parametrize("gpus", [0, -1, 3, 64])
def test_gpus_must_share_the_heads(gpus: int) -> None:
    with pytest.raises(ValueError, match="tensor_parallel must divide the 32 heads"):
        profiles.profile(LLAMA_31_8B, A100, gpus)


def test_names() -> None:
    assert profiles.named("llama-3.1-8b", "a100") == profiles.profile(LLAMA_31_8B, A100)
    with pytest.raises(ValueError, match=r"model must be one of llama-3.1-8b, qwen2.5-14b, q"):
        profiles.named("gpt-2", "a100")
    with pytest.raises(ValueError, match="hardware must be one of a100, h100, h200, got 'tpu'"):
        profiles.named("llama-3.1-8b", "tpu")


def test_hardware_and_overheads_are_checked() -> None:
    with pytest.raises(ValueError, match="bandwidth_share must be above 0 and at most 1"):
        Hardware(
            name="x",
            flops_per_s=1,
            bytes_per_s=1,
            memory_bytes=1,
            link_bytes_per_s=1,
            bandwidth_share=1.1,
        )
    with pytest.raises(ValueError, match="bytes_per_s must be a number above 0"):
        Hardware(name="x", flops_per_s=1, bytes_per_s=math.nan, memory_bytes=1, link_bytes_per_s=1)
    with pytest.raises(ValueError, match="layer_s must be a number of seconds"):
        Overheads(layer_s=-1.0)


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen2.5-14b"])
def test_a_dense_profile_is_nearly_linear(model: str) -> None:
    steps = profiles.named(model, "a100")
    line = profiles.linear(steps, with_pairs=True)
    off = sorted(abs(line.seconds(step) / steps.seconds(step) - 1) for step in GRID)
    assert off[len(off) // 2] < 0.08
    assert off[-1] < 0.3
    assert line.context_s == pytest.approx(steps.context_s, rel=0.1)


def test_without_pairs_their_cost_is_in_the_tokens() -> None:
    steps = profiles.named("llama-3.1-8b", "a100")
    assert profiles.linear(steps).pair_s == 0
    assert profiles.linear(steps, with_pairs=True).pair_s > 0
    assert profiles.linear(steps).prefill_s > profiles.linear(steps, with_pairs=True).prefill_s


def test_the_reference_machine_is_near_the_profile_it_stands_for() -> None:
    steps = profiles.named("llama-3.1-8b", "a100")
    for decodes in (1, 16, 64, 128):
        step = Step(decodes, 1000 * decodes, 0, 0)
        assert steps.seconds(step) == pytest.approx(A100_LLAMA_8B.seconds(step), rel=0.15)


@pytest.mark.parametrize(
    ("gpus", "tokens_per_s"),
    [(2, 21.32), (4, 38.01), (8, 62.50)],
)
def test_published_decode_rates_of_a_70b_model_are_met(gpus: int, tokens_per_s: float) -> None:
    # gpt-fast's README: Llama-2-70B in bf16 on A100s; it differs in its vocabulary.
    model = msgspec.structs.replace(LLAMA_31_70B, vocab=32_000, parameters=68_976_648_192)
    steps = profiles.profile(model, A100, gpus, Overheads(request_s=0.0))
    assert 1 / steps.seconds(Step(1, 100, 0, 0)) == pytest.approx(tokens_per_s, rel=0.05)
