"""What a simulated replica is."""

from __future__ import annotations

import math

import msgspec


class EngineShape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and habits of an engine. Raises ValueError that begins with the field's name.

    Attributes:
        max_batch: requests that may run together.
        kv_tokens: KV tokens that fit.
        slots: requests that may hold KV, parked ones included; 0: as many as there is KV for.
        chunk_tokens: most prompt tokens of a step.
        mixes_chunks: decodes run beside the prompts of a step (chunked prefill as in Sarathi);
            else a step is one or the other, and prompts go first as far as the policy lets them.
        swap_token_s: seconds to bring one token of given-up KV back from host memory; None: it
            is computed again. The cheaper way is taken.
        has_prefix_cache: whether prompts that begin alike share KV.
    """

    max_batch: int = 64
    kv_tokens: int = 340_000
    slots: int = 0
    chunk_tokens: int = 512
    mixes_chunks: bool = True
    swap_token_s: float | None = None
    has_prefix_cache: bool = True

    def __post_init__(self) -> None:
        for name in ("max_batch", "kv_tokens", "chunk_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.slots < 0:
            raise ValueError(f"slots must be 0 or more, got {self.slots}")
        swap = self.swap_token_s
        if swap is not None and not (math.isfinite(swap) and swap >= 0):
            raise ValueError(f"swap_token_s must be a number of seconds, got {swap!r}")

    @property
    def num_slots(self) -> int:
        """Requests that may hold KV at once."""
        return self.slots or max(self.kv_tokens, self.max_batch)
