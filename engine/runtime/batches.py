"""Moving requests between SGLang batches without losing a token.

A parked request keeps its KV row; its place in the batch tensors moves to a batch of its
own, split off and merged back with SGLang's own ``filter_batch`` and ``merge_batch``.
"""

import copy
import weakref
from collections.abc import Callable
from typing import Any

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache.common import evict_from_tree_cache, release_kv_cache


def split_off(batch: ScheduleBatch, indices: list[int]) -> ScheduleBatch:
    """Take the requests at ``indices`` out of ``batch`` (in place) into a batch of their own.

    ``batch`` may end up empty. The order of the requests is kept on both sides.
    """
    taken = set(indices)
    keep = [index for index in range(len(batch.reqs)) if index not in taken]
    piece = copy.copy(batch)
    piece.sampling_info = copy.copy(batch.sampling_info)
    _copy_penalties(piece)
    piece.filter_batch(keep_indices=sorted(taken))
    batch.filter_batch(keep_indices=keep)
    piece.batch_is_full = False
    return piece


def _copy_penalties(piece: ScheduleBatch) -> None:
    """Give ``piece`` penalizers of its own: filtering rebinds their tensors in place."""
    orchestrator = copy.copy(piece.sampling_info.penalizer_orchestrator)
    orchestrator.batch = piece
    orchestrator.penalizers = {
        kind: copy.copy(penalizer) for kind, penalizer in orchestrator.penalizers.items()
    }
    for penalizer in orchestrator.penalizers.values():
        penalizer._orchestrator_ref = weakref.ref(orchestrator)
    piece.sampling_info.penalizer_orchestrator = orchestrator


def join(batch: ScheduleBatch | None, piece: ScheduleBatch) -> ScheduleBatch:
    """Put ``piece`` at the end of ``batch``; an empty batch is replaced by it."""
    if piece.is_empty():
        return piece if batch is None else batch
    if batch is None or batch.is_empty():
        return piece
    batch.merge_batch(piece)
    return batch


def indices_where(batch: ScheduleBatch, wanted: Callable[[Req], bool]) -> list[int]:
    """Positions of the requests of ``batch`` for which ``wanted`` holds."""
    return [index for index, req in enumerate(batch.reqs) if wanted(req)]


def release_kv(req: Req, tree_cache: Any) -> None:
    """Preempt: hand the request's KV to the radix cache, from where it can be evicted.

    The request must not be in a batch any more and is left as SGLang leaves a retracted
    one: ready to be prefilled again, its output so far kept.
    """
    release_kv_cache(req, tree_cache, checkpoint=not tree_cache.supports_mamba())
    evict_from_tree_cache(tree_cache, 0)
    req.reset_for_retract()
