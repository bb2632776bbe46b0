"""Attention on a CPU: SGLang's torch-native backend with our kernel where it decodes.

SGLang's loops over the requests, gathers the keys and values of each and attends with every token
of a prompt, those that were cached included. Here a batch decodes in one call a layer, and of a
prompt only the tokens that are new attend.
"""

from collections.abc import Mapping
from typing import Any

import torch
from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn.functional import scaled_dot_product_attention

from engine.kernels import paged_attention
from engine.runtime.settings import CPU_ATTENTION

NAME = CPU_ATTENTION[0]
"""As --attention-backend takes it."""


class PagedCpuAttention(TorchNativeAttnBackend):  # type: ignore[misc]  # SGLang is untyped
    """Exact to rounding against its parent, which does what the kernel cannot."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self._has_kernel = paged_attention.is_available()

    def _run_sdpa_forward_decode(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        is_plain = encoder_lens is None and not options.get("is_cross_attn")
        if not (
            self._has_kernel and is_plain and paged_attention.supports(query, k_cache, v_cache)
        ):
            return super()._run_sdpa_forward_decode(
                query,
                output,
                k_cache,
                v_cache,
                req_to_token,
                req_pool_indices,
                seq_lens,
                encoder_lens,
                **options,
            )
        scale, window = options.get("scaling"), _window(options)
        paged_attention.decode(
            query.contiguous(),
            k_cache,
            v_cache,
            req_to_token,
            req_pool_indices,
            seq_lens,
            output,
            scale=query.shape[-1] ** -0.5 if scale is None else scale,
            # A window of n is the n tokens before this one, and this one.
            window_tokens=-1 if window is None else window + 1,
        )
        return output

    def _run_sdpa_forward_extend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        extend_seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        is_plain = encoder_lens is None and not options.get("is_cross_attn")
        if not (is_plain and options.get("causal")):
            return super()._run_sdpa_forward_extend(
                query,
                output,
                k_cache,
                v_cache,
                req_to_token,
                req_pool_indices,
                seq_lens,
                extend_prefix_lens,
                extend_seq_lens,
                encoder_lens,
                **options,
            )
        end = 0
        for row, total, new in zip(
            req_pool_indices.tolist(), seq_lens.tolist(), extend_seq_lens.tolist(), strict=True
        ):
            begin, end = end, end + new
            slots = req_to_token[row, :total]
            output[begin:end] = _attend(
                query[begin:end],
                k_cache[slots].to(query.dtype),
                v_cache[slots].to(query.dtype),
                options,
            )
        return output


def _window(options: Mapping[str, Any]) -> int | None:
    """How many tokens before itself one sees; None: all."""
    window: int | None = options.get("sliding_window_size")
    return None if window is None or window < 0 else window


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: Mapping[str, Any]
) -> torch.Tensor:
    """The last tokens of a request over all of it. Shapes (tokens, heads, head size)."""
    new, total, window = query.shape[0], keys.shape[0], _window(options)
    is_whole = new == total and window is None
    return scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        keys.transpose(0, 1).unsqueeze(0),
        values.transpose(0, 1).unsqueeze(0),
        attn_mask=None if is_whole else _causal_mask(new, total, window),
        is_causal=is_whole,
        scale=options.get("scaling"),
        enable_gqa=bool(options.get("enable_gqa")),
    )[0].transpose(0, 1)


def _causal_mask(new: int, total: int, window: int | None) -> torch.Tensor:
    """Which of ``total`` tokens each of the last ``new`` sees; of a window itself and so many."""
    at = torch.arange(total - new, total).unsqueeze(1)
    of = torch.arange(total).unsqueeze(0)
    mask = of <= at
    return mask if window is None else mask & (of >= at - window)


def register() -> None:
    """Make ``NAME`` a backend of SGLang's, in this process."""
    register_attention_backend(NAME)(PagedCpuAttention)
    if NAME not in ATTENTION_BACKEND_CHOICES:
        ATTENTION_BACKEND_CHOICES.append(NAME)
