"""How long a step of the simulated engine takes."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import msgspec


class Step(NamedTuple):
    """What one step computes."""

    num_decodes: int
    """Requests that get one token each."""
    context_tokens: int
    """Sum of their contexts."""
    padding_tokens: int
    """Decodes times the longest of those contexts, less their sum."""
    prefill_tokens: int
    """Prompt tokens computed."""
    prefill_pairs: int = 0
    """Sum over those prompt tokens of the tokens that each attends to."""


class StepTime(Protocol):
    """A model of an engine's speed. Pure: the same step takes the same time."""

    def seconds(self, step: Step) -> float:
        """How long ``step`` takes, above 0."""
        ...


class LinearSteps(msgspec.Struct, frozen=True, kw_only=True):
    """constant + decode * decodes + context * context tokens + padding + prefill.

    The shape of ``scheduler.step_time.StepTimeModel``, but of an engine that is known. All in
    seconds per token, the constant per step. Raises ValueError unless all are finite and 0 or
    more, and the constant above 0.
    """

    constant_s: float
    decode_s: float = 0.0
    context_s: float = 0.0
    padding_s: float = 0.0
    prefill_s: float = 0.0
    pair_s: float = 0.0
    prefill_constant_s: float = 0.0
    """Of a step with prompt tokens, beside ``constant_s``."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be a number, 0 or more, got {value!r}")
        if self.constant_s == 0:
            raise ValueError("constant_s must be above 0: a step takes time")

    def slower(self, times: float) -> LinearSteps:
        """Every step takes so many times as long."""
        return LinearSteps(**{name: times * getattr(self, name) for name in _FIELDS})

    def seconds(self, step: Step) -> float:
        return (
            self.constant_s
            + self.decode_s * step.num_decodes
            + self.context_s * step.context_tokens
            + self.padding_s * step.padding_tokens
            + self.prefill_s * step.prefill_tokens
            + self.pair_s * step.prefill_pairs
            + (self.prefill_constant_s if step.prefill_tokens else 0.0)
        )


_FIELDS = LinearSteps.__struct_fields__

A100_LLAMA_8B = LinearSteps(
    constant_s=9.53e-3, decode_s=40e-6, context_s=65.5e-9, padding_s=1e-9, prefill_s=93.6e-6
)
"""Llama-3.1-8B on one A100 by a roofline, as the studies behind the policy used it."""
