"""The learnt patterns as bytes and back: numbers in msgpack, nothing executable."""

import math
from collections.abc import Iterable

import msgspec

from graphs.shape import MAX_STAGES, ProgramShape, StageShape
from graphs.store import PatternStore

FORMAT_VERSION = 1
MAX_PATTERNS = 20_000
_MAX_AMOUNT = 1e15


class _State(msgspec.Struct, frozen=True):
    patterns: tuple[ProgramShape, ...]
    weights: tuple[float, ...]
    num_added: int


def encode(store: PatternStore) -> bytes:
    """All patterns with their weights."""
    weights = tuple(float(weight) for weight in store.pack.weight)
    return msgspec.msgpack.encode(_State(tuple(store.shapes), weights, store.num_added))


def decode_into(data: bytes, store: PatternStore) -> None:
    """Give a fresh store what ``encode`` wrote.

    Raises:
        ValueError: it is not the state of a store; drop the store then.
    """
    try:
        state = msgspec.msgpack.decode(data, type=_State)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if len(state.patterns) != len(state.weights) or len(state.patterns) > MAX_PATTERNS:
        raise ValueError("patterns and weights that do not fit")
    if not _are_amounts(state.weights):
        raise ValueError("a weight that is none")
    for shape, weight in zip(state.patterns, state.weights, strict=True):
        _check(shape)
        store.restore(shape, weight)
    store.num_added = max(state.num_added, 0)


def _check(shape: ProgramShape) -> None:
    is_good = 0 < len(shape.stages) <= MAX_STAGES and all(
        0 <= name < 1 << 63 for name in (shape.application, shape.tenant)
    )
    if not is_good or not all(_is_stage(stage) for stage in shape.stages):
        raise ValueError("a pattern that is none")


def _is_stage(stage: StageShape) -> bool:
    names = (stage.identity, stage.role, stage.tools)
    amounts = (
        float(stage.num_calls),
        stage.input_tokens,
        stage.output_tokens,
        stage.longest_tokens,
        stage.tool_s,
    )
    is_new = stage.new_tokens == -1.0 or _are_amounts((stage.new_tokens,))
    return is_new and all(0 <= name < 1 << 63 for name in names) and _are_amounts(amounts)


def _are_amounts(values: Iterable[float]) -> bool:
    return all(math.isfinite(value) and 0 <= value <= _MAX_AMOUNT for value in values)
