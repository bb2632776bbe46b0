"""Batches of the same total context whose lengths spread, and what the spread costs."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

EQUAL = "equal"
"""The spread that is none: what the others are compared with."""

Timed = Callable[[], float]
"""Decodes one token of every request and says in how many seconds, all layers together."""


class Shape(NamedTuple):
    """Of a model's attention."""

    heads: int
    kv_heads: int
    head_size: int
    layers: int

    def bytes_per_token(self, bytes_per_value: int) -> int:
        """Of one token's key and value in one layer."""
        return 2 * self.kv_heads * self.head_size * bytes_per_value


SHAPES: Mapping[str, Shape] = {"demo": Shape(9, 3, 64, 30), "llama": Shape(32, 8, 128, 32)}
"""SmolLM2-135M and Llama-3.1-8B."""

VALUE_BYTES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
CACHE_BYTES = 256 << 20
"""More than the caches of a CPU or GPU hold."""


def num_pools(token_bytes: int, shape: Shape) -> int:
    """Layers' pools to read in turn, each of ``token_bytes``.

    A step reads every layer's pool once, so none is still in a cache when it is read again; a
    small pool read over and over would be. No more than it takes, as they cost memory.
    """
    return max(1, min(shape.layers, math.ceil(CACHE_BYTES / token_bytes)))


class Kernels(Protocol):
    """The attention kernels of one device, ready to be timed."""

    description: str
    """The device, and with what it was measured."""
    csv_kernel: str
    """Whose times stand for a step's."""
    memory_bytes: int
    """For a batch's keys and values."""

    def prepare(self, batches: Mapping[str, Sequence[int]]) -> Mapping[str, Mapping[str, Timed]]:
        """By kernel and name of a batch; ``batches`` are the contexts, of the same total."""
        ...


def _equal(batch: int, _: random.Random) -> list[float]:
    return [1.0] * batch


def _uniform(batch: int, rng: random.Random) -> list[float]:
    return [rng.uniform(0.5, 1.5) for _ in range(batch)]


def _halves(batch: int, _: random.Random) -> list[float]:
    return [15.0 if index < batch // 2 else 1.0 for index in range(batch)]


def _one_long(batch: int, _: random.Random) -> list[float]:
    # 16 means long: at large batches three quarters of the total would be no request's length.
    share = min(16.0 / batch, 0.75)
    return [share, *[(1.0 - share) / (batch - 1)] * (batch - 1)] if batch > 1 else [1.0]


def _lognormal(batch: int, rng: random.Random) -> list[float]:
    return [rng.lognormvariate(0.0, 1.0) for _ in range(batch)]


SPREADS: Mapping[str, Callable[[int, random.Random], list[float]]] = {
    EQUAL: _equal,
    "0.5-1.5": _uniform,
    "1:15": _halves,
    "one long": _one_long,
    "lognormal": _lognormal,
}
"""Relative lengths: all equal; uniform from 0.5 to 1.5 of the mean; half short and half 15 times
as long; one of 16 means (at most three quarters of the total) and the rest short; lognormal with
sigma 1."""


def lengths(spread: str, batch: int, mean: int, seed: int) -> list[int]:
    """``batch`` contexts in tokens, each 1 or more, that sum up to ``batch * mean``.

    In an order drawn like the lengths: a kernel that deals requests out in their order would
    otherwise be measured at its best or its worst. The same for the same arguments.
    """
    rng = random.Random(f"{seed}/{spread}/{batch}/{mean}")
    weights = SPREADS[spread](batch, rng)
    rng.shuffle(weights)
    return _apportion(weights, batch * mean)


def _apportion(weights: Sequence[float], total: int) -> list[int]:
    """Whole numbers of 1 or more as near to ``weights`` as sums up to ``total``."""
    spare = total - len(weights)
    if spare < 0:
        raise ValueError(f"{total} tokens are too few for {len(weights)} requests")
    scale = spare / sum(weights)
    exact = [weight * scale for weight in weights]
    whole = [math.floor(value) for value in exact]
    by_rest = sorted(range(len(exact)), key=lambda index: whole[index] - exact[index])
    for index in by_rest[: spare - sum(whole)]:
        whole[index] += 1
    return [1 + tokens for tokens in whole]


def padding(contexts: Sequence[int]) -> int:
    """Tokens that a kernel which pads to the longest would compute for nothing."""
    return len(contexts) * max(contexts) - sum(contexts)


class Extra(NamedTuple):
    """A batch beside the one of equal lengths and the same total."""

    padding_tokens: int
    extra_s: float
    """Longer than the equal one took; negative: shorter."""
    equal_s: float


class PaddingCost(NamedTuple):
    """Seconds per padding token, with the standard error."""

    per_token_s: float
    error_s: float

    def verdict(self) -> str:
        """Whether that is a penalty, in words."""
        if self.per_token_s > 2 * self.error_s:
            return "a penalty"
        if self.per_token_s < -2 * self.error_s:
            return "no penalty: it is negative"
        return "no penalty: it is about zero"


def padding_cost(found: Sequence[Extra]) -> PaddingCost:
    """Least squares of extra = cost * padding, relative to the equal batch's time.

    Relative, so that short steps count as much as long ones. Through the origin: the batch of
    equal lengths has no padding and no extra. Raises ValueError without padding in ``found``.
    """
    pads = [row.padding_tokens / row.equal_s for row in found]
    extras = [row.extra_s / row.equal_s for row in found]
    square = sum(pad * pad for pad in pads)
    if square == 0:
        raise ValueError("no padding to fit a cost to")
    cost = sum(pad * extra for pad, extra in zip(pads, extras, strict=True)) / square
    rest = sum((extra - cost * pad) ** 2 for pad, extra in zip(pads, extras, strict=True))
    # A single batch says nothing of the error; infinity keeps it from being called a penalty.
    error = math.sqrt(rest / (len(found) - 1) / square) if len(found) > 1 else math.inf
    return PaddingCost(cost, error)
