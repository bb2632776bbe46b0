"""KV of preempted requests in host memory, to be brought back instead of computed again.

SGLang hands the KV of a preempted request to its prefix cache, where it lasts until the room is
needed. Here a copy is made before, and given back to the prefix cache just before the request is
prefilled again: SGLang then finds the whole of it cached, as far as it is not there anyway.
Losing a copy, or not finding room for it, costs the time of a prefill and nothing else.
"""

import logging
from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from core.clock import Clock

logger = logging.getLogger(__name__)

LEAST_TOKENS = 16
"""Fewer are computed again: a prefill step costs about as much without them."""
SMOOTHING = 0.2
_FAILURES = (RuntimeError, MemoryError, AssertionError, NotImplementedError)
"""Of SGLang's copies, where memory is short or a pool has none."""


class _Copy(NamedTuple):
    """Of one request: per layer keys and values, shape (tokens, heads, head size)."""

    key: RadixKey
    layers: list[tuple[torch.Tensor, torch.Tensor]]
    num_bytes: int

    @property
    def num_tokens(self) -> int:
        return int(self.layers[0][0].shape[0])


def can_swap(tree_cache: Any, allocator: Any) -> bool:
    """Whether requests' KV is plain enough: attention over all tokens, one radix tree by token.

    A tree that moves KV elsewhere by itself (hierarchical, linked) is left to do so.
    """
    if tree_cache.disable or tree_cache.page_size != 1:
        return False
    if type(tree_cache) is UnifiedRadixCache:
        is_plain = set(tree_cache.components) == {ComponentType.FULL}
        if not is_plain or tree_cache.cache_controller or tree_cache.linker:
            return False
    elif type(tree_cache) is not RadixCache:
        return False
    return getattr(allocator.get_kvcache(), "k_buffer", None) is not None


class KvSwap:
    """Copies by request, the oldest given up where ``max_bytes`` are not enough for all."""

    def __init__(
        self, tree_cache: Any, allocator: Any, token_pool: Any, clock: Clock, max_bytes: int
    ) -> None:
        self._tree = tree_cache
        self._allocator = allocator
        self._token_pool = token_pool
        self._clock = clock
        self._max_bytes = max_bytes
        self._copies: OrderedDict[str, _Copy] = OrderedDict()
        self.token_s: float | None = None
        """Measured seconds to move a token's KV one way; None before the first."""
        self.num_bytes = 0
        self.num_saved = self.num_restored = self.num_lost = 0
        self.restored_tokens = 0

    def save(self, name: str, req: Req) -> None:
        """Copy the KV of a request that is about to lose it. Never raises."""
        self.forget(name)
        num_tokens = req.owned_kv_len()
        if num_tokens < LEAST_TOKENS or not _is_plain(req):
            return
        begin_s = self._clock.now_s()
        try:
            copy = self._copy_of(req, num_tokens)
        except _FAILURES as error:
            self.num_lost += 1
            logger.warning("no copy of a request's KV, it will be computed again: %s", error)
            return
        if copy is None:
            return
        self._timed(begin_s, num_tokens)
        self._copies[name] = copy
        self.num_bytes += copy.num_bytes
        self.num_saved += 1

    def _copy_of(self, req: Req, num_tokens: int) -> _Copy | None:
        pool = self._allocator.get_kvcache()
        num_bytes = num_tokens * _token_bytes(pool)
        if num_bytes > self._max_bytes:
            return None
        while self.num_bytes + num_bytes > self._max_bytes:
            self.forget(next(iter(self._copies)))
            self.num_lost += 1
        req.refresh_fill_ids()
        slots = self._token_pool.req_to_token[req.kv.req_pool_idx, :num_tokens].long()
        # SGLang's own copy, which waits for the device.
        chunks = self._allocator.get_cpu_copy(slots)
        layers = [
            (_joined([chunk[0] for chunk in layer]), _joined([chunk[1] for chunk in layer]))
            for layer in chunks
        ]
        key = RadixKey(
            req.full_untruncated_fill_ids[:num_tokens], req.extra_key, cache_salt=req.cache_salt
        )
        return _Copy(key, layers, num_bytes)

    def restore(self, name: str, prefill_token_s: float) -> None:
        """Give a request's KV back to the prefix cache where that is cheaper. Never raises.

        Args:
            prefill_token_s: what computing a token again would take.
        """
        copy = self._copies.get(name)
        if copy is None or (self.token_s is not None and self.token_s >= prefill_token_s):
            return
        match = self._tree.match_prefix(MatchPrefixParams(key=copy.key))
        there = match.device_prefix_len
        missing = copy.num_tokens - there
        if missing < LEAST_TOKENS:
            return
        # What is there must stay while room is made for the rest.
        lock = self._tree.lock(match.last_device_node)
        try:
            self._bring_back(copy, match.last_device_node, there, missing)
        except _FAILURES as error:
            self.forget(name)
            self.num_lost += 1
            logger.warning("a copy of KV is lost, it will be computed again: %s", error)
        finally:
            self._tree.unlock(lock)

    def _bring_back(self, copy: _Copy, node: Any, there: int, missing: int) -> None:
        begin_s = self._clock.now_s()
        free = self._allocator.available_size() + self._tree.evictable_size()
        if free < missing:
            return
        evict_from_tree_cache(self._tree, missing)
        slots = self._allocator.alloc(missing)
        if slots is None:
            return
        try:
            self._allocator.load_cpu_copy(self._chunks(copy, there), slots)
        except BaseException:
            self._allocator.free(slots)
            raise
        known = self._tree.path_device_indices(node)[:there]
        values = torch.cat([known.to(slots.dtype), slots]).to(torch.int64)
        # Up to where the slots are the tree's own: else it would free them as duplicates.
        self._tree.insert(InsertParams(key=copy.key, value=values, prev_prefix_len=there))
        self._timed(begin_s, missing)
        self.num_restored += 1
        self.restored_tokens += missing

    def _chunks(self, copy: _Copy, begin: int) -> list[list[list[torch.Tensor]]]:
        """From a token on, in the pieces that SGLang's pool takes."""
        size = self._allocator.get_kvcache().cpu_offloading_chunk_size
        return [
            [
                [keys, values]
                for keys, values in zip(
                    all_keys[begin:].split(size), all_values[begin:].split(size), strict=True
                )
            ]
            for all_keys, all_values in copy.layers
        ]

    def forget(self, name: str) -> None:
        """It runs again, or ended: its copy is of no use."""
        copy = self._copies.pop(name, None)
        if copy is not None:
            self.num_bytes -= copy.num_bytes

    def clear(self) -> None:
        """Nothing of it is true any more: the model's weights may have changed."""
        self._copies.clear()
        self.num_bytes = 0

    def _timed(self, begin_s: float, num_tokens: int) -> None:
        token_s = max(self._clock.now_s() - begin_s, 0.0) / num_tokens
        before = token_s if self.token_s is None else self.token_s
        self.token_s = before + SMOOTHING * (token_s - before)

    def state(self) -> dict[str, Any]:
        """For ``/slo/state``."""
        return {
            "copies": len(self._copies),
            "bytes": self.num_bytes,
            "max_bytes": self._max_bytes,
            "saved": self.num_saved,
            "restored": self.num_restored,
            "restored_tokens": self.restored_tokens,
            "lost": self.num_lost,
            "token_s": self.token_s,
        }


def _is_plain(req: Req) -> bool:
    """Whether equal tokens mean equal KV, and the prefix cache may hold it."""
    return (
        req.multimodal_inputs is None
        and req.positional_embed_overrides is None
        and req.session is None
        and not req.skip_radix_cache_insert
    )


def _token_bytes(pool: Any) -> int:
    """KV bytes of one token in all layers."""
    return sum(
        buffer[0].numel() * buffer.element_size()
        for buffers in (pool.k_buffer, pool.v_buffer)
        for buffer in buffers
    )


def _joined(pieces: list[torch.Tensor]) -> torch.Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
