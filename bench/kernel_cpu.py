"""Decode attention of a CPU: our kernel, and torch's request by request as SGLang calls it."""

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from bench.kernel_spreads import Shape, Timed, num_pools
from core.clock import MonotonicClock
from engine.kernels import paged_attention

OURS = "jitserve_cpu"
TORCH = "torch_native"
Pool = tuple[torch.Tensor, torch.Tensor]
"""A layer's keys and values: (slots, key-value heads, head size) each."""


class Batch(NamedTuple):
    """One token of each request to decode."""

    query: torch.Tensor
    """(requests, heads, head size)"""
    table: torch.Tensor
    """(requests, most tokens), int32: the slot of each token."""
    lengths: torch.Tensor
    """(requests,), int64"""
    out: torch.Tensor
    """As ``query``."""


class CpuKernels:
    """``kernel_spreads.Kernels`` of this machine's CPU; one call is timed, times the layers."""

    def __init__(self, shape: Shape, dtype: str, seed: int, threads: int | None = None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self._shape = shape
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._generator = torch.Generator().manual_seed(seed)
        self._clock = MonotonicClock()
        self._has_ours = paged_attention.is_available() and self._dtype in paged_attention.DTYPES
        self.description = f"CPU, threads: {torch.get_num_threads()}, torch {torch.__version__}"
        self.csv_kernel = OURS if self._has_ours else TORCH
        # What is free counts no file cache: half of it leaves room for what is gathered.
        self.memory_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2

    def prepare(self, batches: Mapping[str, Sequence[int]]) -> dict[str, dict[str, Timed]]:
        """By kernel and name of a batch; ``batches`` are the contexts, of the same total."""
        slots = max(sum(contexts) for contexts in batches.values())
        token_bytes = slots * self._shape.bytes_per_token(self._dtype.itemsize)
        size = (slots, self._shape.kv_heads, self._shape.head_size)
        pools: list[Pool] = [
            (self._noise(*size), self._noise(*size))
            for _ in range(num_pools(token_bytes, self._shape))
        ]
        # One turn for all who are timed: each finds a pool that nobody read just now.
        turn = itertools.cycle(pools)
        ready = {name: self.batch(contexts, slots) for name, contexts in batches.items()}
        timed = {TORCH: {name: self._timed(TORCH, batch, turn) for name, batch in ready.items()}}
        if self._has_ours:
            timed[OURS] = {name: self._timed(OURS, batch, turn) for name, batch in ready.items()}
        return timed

    def batch(self, contexts: Sequence[int], slots: int) -> Batch:
        """A batch whose tokens lie anywhere in a pool of ``slots``, as after hours of serving."""
        table = torch.zeros(len(contexts), max(contexts), dtype=torch.int32)
        order = torch.randperm(slots, generator=self._generator).to(torch.int32)
        for row, part in enumerate(order[: sum(contexts)].split(list(contexts))):
            table[row, : len(part)] = part
        query = self._noise(len(contexts), self._shape.heads, self._shape.head_size)
        return Batch(query, table, torch.tensor(contexts), torch.empty_like(query))

    def _noise(self, *size: int) -> torch.Tensor:
        return torch.empty(size, dtype=self._dtype).uniform_(-1, 1, generator=self._generator)

    def _timed(self, kernel: str, batch: Batch, turn: Iterator[Pool]) -> Timed:
        decode = decode_ours if kernel == OURS else decode_torch

        def timed() -> float:
            keys, values = next(turn)
            start_s = self._clock.now_s()
            decode(batch, keys, values)
            return (self._clock.now_s() - start_s) * self._shape.layers

        return timed


def decode_ours(batch: Batch, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Into ``batch.out``, by the kernel for whole batches."""
    query, table, lengths, out = batch
    rows = torch.arange(len(lengths))
    scale = query.shape[-1] ** -0.5
    paged_attention.decode(query, keys, values, table, rows, lengths, out, scale=scale)


def decode_torch(batch: Batch, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Into ``batch.out``, gathered request by request as SGLang's ``torch_native`` does."""
    query = batch.query.movedim(0, 1)
    for row in range(len(batch.lengths)):
        slots = batch.table[row, : batch.lengths[row]]
        found = scaled_dot_product_attention(
            query[:, row : row + 1].unsqueeze(0),
            keys[slots].movedim(0, 1).unsqueeze(0),
            values[slots].movedim(0, 1).unsqueeze(0),
            enable_gqa=True,
        )
        batch.out[row : row + 1] = found.squeeze(0).movedim(1, 0)
