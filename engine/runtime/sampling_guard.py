"""Sampling parameters that pass SGLang's validation and can then kill its scheduler."""

from typing import Any

MAX_TOP_K = 2**31 - 1


def check(params: Any, vocab_size: int) -> None:
    """Raise ValueError, naming the field, on what the sampling tensors cannot hold.

    Args:
        params: SGLang's ``SamplingParams`` after its own ``__post_init__``.
        vocab_size: token ids are in [0, vocab_size).
    """
    if params.top_k > MAX_TOP_K:
        raise ValueError(f"top_k: takes -1 or 1 to {MAX_TOP_K}, got {params.top_k}")
    for token_id in params.stop_token_ids or ():
        if not 0 <= token_id < vocab_size:
            raise ValueError(
                f"stop_token_ids: takes token ids from 0 to {vocab_size - 1}, got {token_id}"
            )
    interval = params.stream_interval
    if interval is not None and interval < 1:
        raise ValueError(f"stream_interval: takes a whole number from 1, got {interval}")
