"""Measured step times of others, and how far the roofline profiles are from them.

Every check names what it fitted to, and reports errors on what it did not fit to.
"""

import csv
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from engine.simulator.profiles import (
    A100,
    H100,
    LLAMA_31_8B,
    LLAMA_31_70B,
    Hardware,
    ModelShape,
    Overheads,
    profile,
)
from engine.simulator.steps import Step

LLAMA_2_70B = msgspec.structs.replace(
    LLAMA_31_70B,
    name="llama-2-70b",
    vocab=32000,
    parameters=68_976_648_192,
    active_parameters=68_976_648_192,
)
"""huggingface.co/meta-llama/Llama-2-70b-hf config.json: Llama-3.1-70B's but for the vocabulary."""

LLAMA_2_7B = msgspec.structs.replace(
    LLAMA_31_8B,
    name="llama-2-7b",
    kv_heads=32,
    ffn=11008,
    vocab=32000,
    parameters=6_738_415_616,
    active_parameters=6_738_415_616,
)
"""huggingface.co/meta-llama/Llama-2-7b-hf config.json."""

MIXTRAL_8X7B = msgspec.structs.replace(
    LLAMA_31_8B,
    name="mixtral-8x7b",
    vocab=32000,
    parameters=46_702_792_704,
    active_parameters=12_879_925_248,
    experts=8,
    top_k=2,
)
"""huggingface.co/mistralai/Mixtral-8x7B-v0.1 config.json."""


class Point(NamedTuple):
    """One operating point: a step of a model on several GPUs, and how long it took."""

    model: ModelShape
    hardware: Hardware
    tensor_parallel: int
    step: Step
    measured_s: float


class Errors(NamedTuple):
    """Relative errors over operating points: |profile - measured| / measured."""

    points: int
    median: float
    p90: float
    bias: float
    """Median of the signed ones: above 0 where the profile is too slow."""


Fields = dict[str, float]
"""Of ``Hardware`` and ``Overheads``, by name."""

_FIRST_TOKENS = Step(1, 100, 0, 0)

_GPT_FAST = (
    (LLAMA_2_7B, {1: 104.9, 2: 168.84, 4: 254.02, 8: 328.43}),
    (LLAMA_2_70B, {2: 21.32, 4: 38.01, 8: 62.50}),
    (MIXTRAL_8X7B, {2: 96.67, 4: 155.35, 8: 227.82}),
)
"""Tokens per second of one request, bf16, A100s limited to 330 W; by number of GPUs. READMEs of
github.com/pytorch-labs/gpt-fast (BSD-3), and its mixtral-moe folder's."""


def gpt_fast() -> list[Point]:
    """One request's decoding on 1 to 8 A100s by compiled PyTorch, as its authors published it."""
    return [
        Point(model, A100, gpus, _FIRST_TOKENS, 1 / rate)
        for model, rates in _GPT_FAST
        for gpus, rate in rates.items()
    ]


def splitwise(path: Path) -> tuple[list[Point], list[Point]]:
    """Prefill and decode points of Llama-2-70B in Splitwise's profile, repetitions' medians.

    Left out: other models, power-capped runs, answers of more than 128 tokens (the same prompt
    and batch again, six times), and batches that the engine ran in parts (they took far longer
    end to end than their parts say). Raises ValueError with file and line.
    """
    runs: dict[tuple[str, int, int, int, int], list[list[float]]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        for row in reader:
            try:
                if row["model"] != "llama2-70b" or row["hardware"] not in _SPLITWISE_HARDWARE:
                    continue
                gpus, prompt, batch, tokens = (int(row[name]) for name in _SPLITWISE_KEY)
                times = [float(row[name]) / 1e3 for name in _SPLITWISE_TIMES]
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}:{reader.line_num}: {error!r}") from error
            if tokens > _SPLITWISE_TOKENS:
                continue
            runs.setdefault((row["hardware"], gpus, prompt, batch, tokens), []).append(times)
    prefills: list[Point] = []
    decodes: list[Point] = []
    for (name, gpus, prompt, batch, tokens), times_of in runs.items():
        prompt_s, token_s, total_s = map(statistics.median, zip(*times_of, strict=True))
        if total_s > _IN_PARTS * (prompt_s + tokens * token_s):
            continue
        where = (LLAMA_2_70B, _SPLITWISE_HARDWARE[name], gpus)
        pairs = batch * prompt * (prompt + 1) // 2
        prefills.append(Point(*where, Step(0, 0, 0, batch * prompt, pairs), prompt_s))
        context = prompt + tokens / 2
        decodes.append(Point(*where, Step(batch, round(batch * context), 0, 0), token_s))
    if not decodes:
        raise ValueError(f"{path}: no rows of llama2-70b on an A100 or H100")
    return prefills, decodes


_SPLITWISE_HARDWARE = {"a100-80gb": A100, "h100-80gb": H100}
_SPLITWISE_KEY = ("tensor_parallel", "prompt_size", "batch_size", "token_size")
_SPLITWISE_TIMES = ("prompt_time", "token_time", "e2e_time")
_SPLITWISE_TOKENS = 128
_IN_PARTS = 1.5


def errors(points: Sequence[Point], fields: Fields) -> Errors:
    """How far profiles with ``fields`` changed are from ``points``."""
    signed = np.array([_profile_s(point, fields) / point.measured_s - 1 for point in points])
    return Errors(
        len(points),
        float(np.median(np.abs(signed))),
        float(np.quantile(np.abs(signed), 0.9)),
        float(np.median(signed)),
    )


def fit(points: Sequence[Point], start: Fields, fixed: Fields) -> Fields:
    """The values of ``start``'s fields that bring the profiles nearest to ``points``."""

    def distance(values: Fields) -> float:
        times = ((_profile_s(point, fixed | values), point.measured_s) for point in points)
        # Logarithms of ratios: half and double are as far; absolute: a few outliers are no pull.
        return sum(abs(math.log(ours / measured)) for ours, measured in times)

    return fixed | search(distance, start)


def search(distance: Callable[[Fields], float], start: Fields) -> Fields:
    """Values near ``start`` of the least ``distance``: one field at a time, by ever less."""
    best, least = dict(start), distance(start)
    factor = 1.5
    while factor > 1.005:
        moved = False
        for name in start:
            for by in (factor, 1 / factor):
                tried = best | {name: best[name] * by}
                if name.endswith("_share") and tried[name] > 1:
                    continue
                found = distance(tried)
                if found < least:
                    best, least, moved = tried, found, True
        if not moved:
            factor = math.sqrt(factor)
    return best


def changed(hardware: Hardware, fields: Fields) -> tuple[Hardware, Overheads]:
    """``hardware`` and overheads with ``fields`` in place of their own."""
    of_hardware = {k: v for k, v in fields.items() if k in Hardware.__struct_fields__}
    of_engine = {k: v for k, v in fields.items() if k not in of_hardware}
    return msgspec.structs.replace(hardware, **of_hardware), Overheads(**of_engine)


def _profile_s(point: Point, fields: Fields) -> float:
    hardware, overheads = changed(point.hardware, fields)
    steps = profile(point.model, hardware, point.tensor_parallel, overheads)
    return steps.seconds(point.step)
