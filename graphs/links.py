"""Who a call's prompt comes from: parents inferred from shared prefixes.

A call needed an earlier one of its program if its prompt begins with that call's prompt and is
longer than prompt and answer together: then it most likely contains the answer. Prompts are
compared by one number per block of tokens, which depends on everything before it.
"""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]

BLOCK_TOKENS = 32
MAX_BLOCKS = 512
"""Of a longer prompt the rest is not looked at."""
MAX_CALLS = 64
"""Calls of a program that a later one is compared with: the latest."""
_FACTOR = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def _powers(num: int) -> Hashes:
    powers = np.empty(num, dtype=np.uint64)
    power = 1
    for index in range(num):
        powers[index] = power
        power = power * _FACTOR & _MASK
    return powers


_POWERS = _powers(BLOCK_TOKENS * MAX_BLOCKS)


def prefix_hashes(token_ids: Sequence[int]) -> Hashes:
    """A number for the prefix up to the end of each whole block, shape (blocks,).

    A polynomial of the tokens modulo 2**64: it tells honest prompts apart. Who makes two of
    his own prompts collide only misleads the forecast for his own program.
    """
    num = min(len(token_ids) // BLOCK_TOKENS, MAX_BLOCKS)
    tokens = np.asarray(token_ids[: num * BLOCK_TOKENS], dtype=np.int64).astype(np.uint64)
    terms = (tokens + np.uint64(1)) * _POWERS[: len(tokens)]
    hashes: Hashes = np.cumsum(terms, dtype=np.uint64)[BLOCK_TOKENS - 1 :: BLOCK_TOKENS]
    return hashes


class _Seen:
    __slots__ = ("end_tokens", "has_ended", "last_hash", "node", "num_blocks")

    def __init__(self, node: int, hashes: Hashes, input_tokens: int) -> None:
        self.node = node
        self.num_blocks = len(hashes)
        self.last_hash = int(hashes[-1]) if len(hashes) else 0
        self.end_tokens = input_tokens
        """Length of its prompt; with its answer once that is there."""
        self.has_ended = False


class PrefixLinks:
    """The calls of one program as far as a later prompt may begin with theirs."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, _Seen] = OrderedDict()

    def arrived(self, node: int, hashes: Hashes, input_tokens: int) -> tuple[int, ...]:
        """A call has arrived; the nodes it continues: the longest prompt that it begins with."""
        best: list[_Seen] = []
        for seen in self._seen.values():
            if not 0 < seen.num_blocks <= len(hashes) or input_tokens <= seen.end_tokens:
                continue
            if not seen.has_ended:
                # Its answer cannot be in the prompt.
                continue
            if int(hashes[seen.num_blocks - 1]) != seen.last_hash:
                continue
            if best and seen.end_tokens < best[0].end_tokens:
                continue
            if best and seen.end_tokens > best[0].end_tokens:
                best = []
            best.append(seen)
        self._seen[node] = _Seen(node, hashes, input_tokens)
        while len(self._seen) > MAX_CALLS:
            self._seen.popitem(last=False)
        # Of several that fit alike, the latest: it is what a retry repeats.
        return (best[-1].node,) if best else ()

    def ended(self, node: int, output_tokens: int) -> None:
        """Its answer is there."""
        seen = self._seen.get(node)
        if seen is not None:
            seen.end_tokens += output_tokens
            seen.has_ended = True
