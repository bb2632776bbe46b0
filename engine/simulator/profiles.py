"""Step times of known models on known GPUs, by a roofline.

A part of a step takes as long as its arithmetic or its memory traffic, whichever is more, at
the share of the peak that kernels sustain; the parts follow one another. Sizes are of public
data sheets and model configurations, named beside each. The few constants that no data sheet
has are fitted, and say to what; ``python -m bench profiles`` measures their errors.

What it leaves out: kernels that fill a tile badly, prompt chunks that read their prefix again,
experts chosen unevenly, anything that the host does late.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from engine.simulator import measured
from engine.simulator.measured import Measurement
from engine.simulator.steps import LinearSteps, Step, StepTime

BYTES = 2
"""Of a bf16 weight, activation, key or value."""


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU, and how much of its peaks kernels sustain.

    Attributes:
        flops_per_s: peak dense bf16 with fp32 accumulation, without sparsity.
        bytes_per_s: peak of its memory.
        memory_bytes: as its data sheet has it.
        link_bytes_per_s: peak to the other GPUs of its node, one direction.
        flops_share: of the peak, in matrix products of many tokens and in prompts' attention.
        bandwidth_share: of the peak, reading weights and keys and values.
        link_share: of the peak, in large all-reduces.
    """

    name: str
    flops_per_s: float
    bytes_per_s: float
    memory_bytes: float
    link_bytes_per_s: float
    flops_share: float = 0.66
    """Fitted to prompts of Llama-2-70B on A100s (Splitwise's profile); used for all GPUs."""
    bandwidth_share: float = 0.834
    """1,700 GB/s is what gpt-fast's README found an A100's memory to reach of 2,039. Weight
    products on an H100 measured for LLMServingSim (lm_head of Llama-3.1-8B: 1.05 GB in 366 us)
    reach 0.86."""
    link_share: float = 0.83
    """375 of 450 GB/s in NVIDIA's own peer-to-peer test on H100s (NVIDIA/nccl issue 1264).
    All-reduces of an engine of 2023 (Splitwise's) reached 0.15 of the peak."""

    def __post_init__(self) -> None:
        for name in ("flops_per_s", "bytes_per_s", "memory_bytes", "link_bytes_per_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a number above 0")
        for name in ("flops_share", "bandwidth_share", "link_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1")


A100 = Hardware(
    name="a100",
    flops_per_s=312e12,
    bytes_per_s=2.039e12,
    memory_bytes=80e9,
    link_bytes_per_s=300e9,
)
"""A100 80GB SXM. NVIDIA A100 Tensor Core GPU data sheet (nvidia-a100-datasheet-us-nvidia-
1758950-r4): 312 TFLOPS bf16, 2,039 GB/s, 80 GB, NVLink 600 GB/s for both directions."""

H100 = Hardware(
    name="h100",
    flops_per_s=989e12,
    bytes_per_s=3.35e12,
    memory_bytes=80e9,
    link_bytes_per_s=450e9,
)
"""H100 80GB SXM5. https://www.nvidia.com/en-us/data-center/h100/: 1,979 TFLOPS bf16 with
sparsity and so 989 without, 3.35 TB/s, 80 GB, NVLink 900 GB/s for both directions."""

H200 = Hardware(
    name="h200",
    flops_per_s=989e12,
    bytes_per_s=4.8e12,
    memory_bytes=141e9,
    link_bytes_per_s=450e9,
)
"""H200 SXM. https://www.nvidia.com/en-us/data-center/h200/: as the H100 SXM, with 141 GB at
4.8 TB/s."""


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """A transformer with grouped-query attention and gated feed-forward layers, in bf16.

    Attributes:
        ffn: width of a feed-forward layer; of one expert where there are several.
        vocab: rows of the embedding and of the output head, which are two matrices.
        parameters: all of them, biases and norms included.
        active_parameters: that one token's forward pass uses, the embedding included.
        experts: per layer; 1: dense.
        top_k: experts that a token goes through.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    parameters: int
    active_parameters: int
    experts: int = 1
    top_k: int = 1

    @property
    def attention_parameters(self) -> int:
        """Of all layers' projections."""
        per_layer = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * per_layer

    @property
    def expert_parameters(self) -> int:
        """Of one expert in all layers; of the feed-forward layers where there is one."""
        return self.layers * 3 * self.hidden * self.ffn

    @property
    def head_parameters(self) -> int:
        """Of the output head; the embedding is as large, but only looked up."""
        return self.hidden * self.vocab

    @property
    def kv_bytes(self) -> int:
        """Keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES


LLAMA_31_8B = ModelShape(
    name="llama-3.1-8b",
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    ffn=14336,
    vocab=128256,
    parameters=8_030_261_248,
    active_parameters=8_030_261_248,
)
"""huggingface.co/meta-llama/Llama-3.1-8B: config.json, and its model card (8.03B)."""

QWEN25_14B = ModelShape(
    name="qwen2.5-14b",
    layers=48,
    hidden=5120,
    heads=40,
    kv_heads=8,
    head_dim=128,
    ffn=13824,
    vocab=152064,
    parameters=14_770_033_664,
    active_parameters=14_770_033_664,
)
"""huggingface.co/Qwen/Qwen2.5-14B-Instruct: config.json, and its model card (14.7B)."""

QWEN3_30B_A3B = ModelShape(
    name="qwen3-30b-a3b",
    layers=48,
    hidden=2048,
    heads=32,
    kv_heads=4,
    head_dim=128,
    ffn=768,
    vocab=151936,
    parameters=30_532_122_624,
    active_parameters=3_353_032_704,
    experts=128,
    top_k=8,
)
"""huggingface.co/Qwen/Qwen3-30B-A3B: config.json, and its model card (30.5B, 3.3B active)."""

LLAMA_31_70B = ModelShape(
    name="llama-3.1-70b",
    layers=80,
    hidden=8192,
    heads=64,
    kv_heads=8,
    head_dim=128,
    ffn=28672,
    vocab=128256,
    parameters=70_553_706_496,
    active_parameters=70_553_706_496,
)
"""huggingface.co/meta-llama/Llama-3.1-70B: config.json, and its model card (70.6B)."""

MODELS: Mapping[str, ModelShape] = {
    model.name: model for model in (LLAMA_31_8B, QWEN25_14B, QWEN3_30B_A3B, LLAMA_31_70B)
}
HARDWARE: Mapping[str, Hardware] = {hardware.name: hardware for hardware in (A100, H100, H200)}


class Overheads(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine adds to its kernels' traffic and arithmetic, in seconds.

    The defaults are of an engine that captures its steps as graphs and prepares the next step
    while the GPU computes, as SGLang and vLLM do today: ``layer_s`` and ``all_reduce_s`` are
    rounded, near gpt-fast's Llama-2-7B and 70B on 1 to 8 A100s; ``request_s`` is fitted to a
    vLLM run of Llama-3.1-8B (LLMServingSim's, on an RTX PRO 6000). An engine of 2023 that
    launched every kernel by itself (Splitwise's) had a ``launch_s`` of 0.37 to 0.55 ms and a
    ``request_s`` of 0.43 ms.

    Attributes:
        layer_s: of a layer: its small kernels, and the gaps between kernels.
        all_reduce_s: of an all-reduce of few bytes; two a layer under tensor parallelism.
        launch_s: that the host takes to launch a layer's kernels. Hidden while the GPU has
            more to do than that; 0 where steps are captured.
        request_s: of a request that decodes: its sampling and its bookkeeping.
    """

    layer_s: float = 50e-6
    all_reduce_s: float = 10e-6
    launch_s: float = 0.0
    request_s: float = 40e-6

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a number of seconds, 0 or more")


GRAPHS = Overheads()


class RooflineSteps(msgspec.Struct, frozen=True, kw_only=True):
    """Step times by a roofline, with everything that a step does not change multiplied out.

    In seconds, of one GPU of the ``tensor_parallel`` that share the work. Made by ``profile``.
    """

    name: str
    constant_s: float
    """Small kernels, gaps and all-reduces' latencies."""
    least_s: float
    """That a step takes for the host's sake, if the GPU would be faster."""
    weights_s: float
    """Reading every dense weight of the layers."""
    token_s: float
    """Their arithmetic for one token."""
    head_weights_s: float
    head_token_s: float
    experts_s: float = 0.0
    """Reading all experts."""
    experts_token_s: float = 0.0
    miss_log: float = 0.0
    """Logarithm of an expert's chance not to be among a token's."""
    context_s: float
    """Attention of a decoding request, per token of its context."""
    pair_s: float
    """Attention of a prompt, per pair of tokens."""
    reduce_token_s: float = 0.0
    """All-reducing one token's activations."""
    request_s: float = 0.0

    def seconds(self, step: Step) -> float:
        decodes = step.num_decodes
        tokens = decodes + step.prefill_tokens
        compute_s = self.token_s * tokens
        head_s = self.head_token_s * decodes
        total_s = (
            self.constant_s
            + (compute_s if compute_s > self.weights_s else self.weights_s)
            + (head_s if head_s > self.head_weights_s else self.head_weights_s)
            + self.context_s * step.context_tokens
            + self.pair_s * step.prefill_pairs
            + self.reduce_token_s * tokens
        )
        if self.experts_s:
            # Each token picks top_k of the experts; an expert is read if any token picks it.
            read_s = self.experts_s * (1.0 - math.exp(self.miss_log * tokens))
            compute_s = self.experts_token_s * tokens
            total_s += compute_s if compute_s > read_s else read_s
        return (total_s if total_s > self.least_s else self.least_s) + self.request_s * decodes


_: type[StepTime] = RooflineSteps


def profile(
    model: ModelShape,
    hardware: Hardware,
    tensor_parallel: int = 1,
    overheads: Overheads = GRAPHS,
) -> RooflineSteps:
    """How long steps of ``model`` take on ``tensor_parallel`` GPUs.

    Experts are cut like every other weight, not placed whole. Padding costs nothing: kernels
    read each request's own context. Raises ValueError if the GPUs cannot share the heads.
    """
    _check_parallel(model, tensor_parallel)
    flops = hardware.flops_per_s * hardware.flops_share * tensor_parallel
    bandwidth = hardware.bytes_per_s * hardware.bandwidth_share * tensor_parallel
    is_dense = model.experts == 1
    dense = model.attention_parameters + (model.expert_parameters if is_dense else 0)
    router = 0 if is_dense else model.layers * model.hidden * model.experts
    pair_flops = 4 * model.layers * model.heads * model.head_dim
    kv_copies = max(1.0, tensor_parallel / model.kv_heads)
    return RooflineSteps(
        name=f"{model.name} on {tensor_parallel} x {hardware.name}",
        constant_s=model.layers * overheads.layer_s
        + _reduces(model, tensor_parallel) * overheads.all_reduce_s,
        least_s=model.layers * overheads.launch_s,
        weights_s=(dense + router) * BYTES / bandwidth,
        token_s=2 * (dense + router) / flops,
        head_weights_s=model.head_parameters * BYTES / bandwidth,
        head_token_s=2 * model.head_parameters / flops,
        experts_s=0.0 if is_dense else model.experts * model.expert_parameters * BYTES / bandwidth,
        experts_token_s=0.0 if is_dense else 2 * model.top_k * model.expert_parameters / flops,
        miss_log=0.0 if is_dense else math.log1p(-model.top_k / model.experts),
        context_s=max(model.kv_bytes * kv_copies / bandwidth, pair_flops / flops),
        pair_s=pair_flops / flops,
        reduce_token_s=_reduces(model, tensor_parallel)
        * _reduce_s(model, hardware, tensor_parallel),
        request_s=overheads.request_s,
    )


def named(
    model: str, hardware: str, tensor_parallel: int = 1, overheads: Overheads = GRAPHS
) -> RooflineSteps:
    """``profile`` by names; ValueError with the accepted ones for a name that is not known."""
    return profile(model_named(model), hardware_named(hardware), tensor_parallel, overheads)


def model_named(name: str) -> ModelShape:
    """The model of that name; ValueError with the accepted ones."""
    if name not in MODELS:
        raise ValueError(f"model must be one of {', '.join(MODELS)}, got {name!r}")
    return MODELS[name]


def hardware_named(name: str) -> Hardware:
    """The GPU of that name; ValueError with the accepted ones."""
    if name not in HARDWARE:
        raise ValueError(f"hardware must be one of {', '.join(HARDWARE)}, got {name!r}")
    return HARDWARE[name]


def kv_tokens(
    model: ModelShape,
    hardware: Hardware,
    tensor_parallel: int = 1,
    memory_fraction: float = 0.9,
) -> int:
    """Tokens whose keys and values fit beside the weights, within that share of the memory.

    Activations are taken to fit into the rest; engines keep a little more for them. With
    Llama-3.1-8B and 0.92 of 101.98 GB vLLM had 574,608 (LLMServingSim, meta.json), this says
    3 % more. Raises ValueError if the weights leave no room.
    """
    _check_parallel(model, tensor_parallel)
    if not 0 < memory_fraction <= 1:
        raise ValueError("memory_fraction must be above 0 and at most 1")
    per_gpu = hardware.memory_bytes * memory_fraction
    free = per_gpu - model.parameters * BYTES / tensor_parallel
    # A GPU holds whole heads: beyond one head each they are copied, not cut.
    kv_bytes = model.kv_bytes / min(tensor_parallel, model.kv_heads)
    if free < kv_bytes:
        raise ValueError(
            f"{model.name} does not fit on {tensor_parallel} x {hardware.name}: its weights "
            f"take {model.parameters * BYTES / 1e9:.0f} GB; use more GPUs"
        )
    return int(free / kv_bytes)


def linear(steps: StepTime, *, with_pairs: bool = False) -> LinearSteps:
    """The linear step times nearest to ``steps``, by relative least squares over ``GRID``.

    For a scheduler's prior, and for bounds that need linear costs. Without ``with_pairs`` the
    attention of prompts goes into their tokens' cost, as for prompts of those lengths.
    """
    rows = [Measurement(step, steps.seconds(step)) for step in GRID]
    if not with_pairs:
        rows = [Measurement(row.step._replace(prefill_pairs=0), row.duration_s) for row in rows]
    return measured.fit(rows, with_prefill_constant=False)


GRID = tuple(
    Step(decodes, decodes * context, 0, prompt, prompt * (prompt + 1) // 2)
    for decodes in (1, 8, 32, 64, 128, 256)
    for context in (256, 1024, 4096)
    for prompt in (0, 0, 256, 512, 1024, 2048)
)
"""Steps that a busy engine takes: up to 256 decodes, prompts in chunks of up to 2,048."""


def _check_parallel(model: ModelShape, tensor_parallel: int) -> None:
    if tensor_parallel < 1 or model.heads % tensor_parallel:
        raise ValueError(
            f"tensor_parallel must divide the {model.heads} heads of {model.name}, "
            f"got {tensor_parallel}"
        )


def _reduces(model: ModelShape, tensor_parallel: int) -> int:
    return 2 * model.layers if tensor_parallel > 1 else 0


def _reduce_s(model: ModelShape, hardware: Hardware, tensor_parallel: int) -> float:
    """Of one token in one all-reduce: a ring sends it out nearly twice."""
    sent = 2 * (tensor_parallel - 1) / tensor_parallel * model.hidden * BYTES
    return sent / (hardware.link_bytes_per_s * hardware.link_share)
