"""Every SGLang name that we replace or wrap, in one place.

``tests/unit/test_sglang_contract.py`` checks that each of them, and each name that
``USED_NAMES`` lists, is where the pinned version has it.
"""

from typing import Any

from engine.runtime import answers, sampling_guard
from engine.runtime.settings import Settings

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
GENERATE_REQUEST = "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request"
ATTENTION = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
VERIFY_SAMPLING = "sglang.srt.sampling.sampling_params.SamplingParams.verify"

OVERRIDDEN_METHODS: tuple[str, ...] = (
    "_abort_on_queued_limit",
    "_add_request_to_queue",
    "_collect_inflight_batches",
    "_poll_timeout_aborts",
    "abort_request",
    "collect_inflight_reqs",
    "flush_cache",
    "get_internal_state",
    "get_new_batch_prefill",
    "init_invariant_checker",
    "is_fully_idle",
    "pause_generation",
    "process_batch_result",
    "process_input_requests",
    "run_batch",
    "set_internal_state",
    "update_running_batch",
)
"""Methods of SGLang's ``Scheduler`` that ``FrameScheduler`` overrides."""

USED_METHODS: tuple[str, ...] = (
    "_release_aborted_request",
    "_reqs_finishing_inflight",
    "maybe_send_health_check_signal",
    "send_abort_output",
)
"""Methods of SGLang's ``Scheduler`` that ``FrameScheduler`` calls."""

OVERRIDDEN_ATTENTION_METHODS: tuple[str, ...] = (
    "_run_sdpa_forward_decode",
    "_run_sdpa_forward_extend",
)
"""Methods of ``ATTENTION`` that ``PagedCpuAttention`` overrides."""

USED_REQUEST_ATTRIBUTES: tuple[str, ...] = ("_is_reasoning_over", "priority", "require_reasoning")
"""What we read of SGLang's ``Req`` beside what its scheduler reads itself."""

CLIP_VARIABLE = "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION"
"""SGLang's own variable: of how many tokens ahead it keeps KV free before it admits a prompt."""

USED_NAMES: tuple[str, ...] = (
    ATTENTION,
    SCHEDULER,
    GENERATE_REQUEST,
    VERIFY_SAMPLING,
    "sglang.srt.arg_groups.choices.ATTENTION_BACKEND_CHOICES",
    "sglang.srt.constants.HEALTH_CHECK_RID_PREFIX",
    "sglang.srt.entrypoints.http_server.app",
    "sglang.srt.entrypoints.http_server.launch_server",
    "sglang.srt.layers.attention.attention_registry.register_attention_backend",
    "sglang.srt.managers.io_struct.AbortReq",
    "sglang.srt.managers.io_struct.GetInternalStateReqOutput",
    "sglang.srt.managers.io_struct.SetInternalStateReq",
    "sglang.srt.managers.io_struct.SetInternalStateReqOutput",
    "sglang.srt.managers.schedule_batch.FINISH_ABORT",
    "sglang.srt.managers.schedule_batch.FINISH_LENGTH",
    "sglang.srt.managers.schedule_batch.NextBatchPlan",
    "sglang.srt.managers.schedule_batch.Req.reset_for_retract",
    "sglang.srt.managers.schedule_batch.ScheduleBatch.check_decode_mem",
    "sglang.srt.managers.schedule_batch.ScheduleBatch.filter_batch",
    "sglang.srt.managers.schedule_batch.ScheduleBatch.merge_batch",
    "sglang.srt.managers.schedule_policy.CLIP_MAX_NEW_TOKENS",
    "sglang.srt.managers.scheduler._make_abort_req",
    "sglang.srt.mem_cache.base_prefix_cache.InsertParams",
    "sglang.srt.mem_cache.base_prefix_cache.MatchPrefixParams",
    "sglang.srt.mem_cache.common.evict_from_tree_cache",
    "sglang.srt.mem_cache.common.release_kv_cache",
    "sglang.srt.mem_cache.radix_cache.RadixCache.lock",
    "sglang.srt.mem_cache.radix_cache.RadixCache.path_device_indices",
    "sglang.srt.mem_cache.radix_cache.RadixKey",
    "sglang.srt.mem_cache.unified_cache.components.ComponentType.FULL",
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.insert",
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.lock",
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.path_device_indices",
    "sglang.srt.platforms.cpu.CpuDeviceMixin",
    "sglang.srt.platforms.interface.SRTPlatform",
    "sglang.srt.plugins.hook_registry.HookRegistry.register",
    "sglang.srt.runtime_context.get_parallel",
    "sglang.srt.server_args.ServerArgs.add_cli_args",
    "sglang.srt.server_args.prepare_server_args",
)
"""Dotted names of SGLang that we import, subclass or wrap."""

FRONTEND_NAMES: tuple[str, ...] = (
    "sglang.lang.backend.base_backend.BaseBackend.end_program",
    "sglang.lang.backend.runtime_endpoint.RuntimeEndpoint._add_images",
    "sglang.lang.backend.runtime_endpoint.RuntimeEndpoint._assert_success",
    "sglang.lang.backend.runtime_endpoint.RuntimeEndpoint.commit_lazy_operations",
    "sglang.lang.backend.runtime_endpoint.RuntimeEndpoint.generate",
    "sglang.lang.backend.runtime_endpoint.RuntimeEndpoint.generate_stream",
    "sglang.lang.backend.runtime_endpoint.RuntimeEndpoint.select",
    "sglang.lang.choices.ChoicesDecision",
    "sglang.lang.interpreter.ProgramStateGroup.join",
    "sglang.lang.interpreter.StreamExecutor.end",
    "sglang.lang.interpreter.StreamExecutor.submit",
    "sglang.lang.ir.SglCommitLazy",
    "sglang.lang.ir.SglFunction",
    "sglang.lang.ir.SglGen",
    "sglang.lang.ir.SglSelect",
)
"""Those of SGLang's frontend language, which runs where programs run and not in the server."""


def install(settings: Settings) -> None:
    """Register our hooks with SGLang; it applies them in every process it starts."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    offer_cpu_attention()
    HookRegistry.register(VERIFY_SAMPLING, _guard_sampling, HookType.BEFORE)
    HookRegistry.register(GENERATE_REQUEST, answers.follow, HookType.AROUND)
    if not settings.is_stock:
        from engine.runtime.frame_scheduler import FrameScheduler

        HookRegistry.register(SCHEDULER, FrameScheduler, HookType.REPLACE)


def offer_cpu_attention() -> None:
    """Let SGLang's --attention-backend take ours, in this process, where there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        from engine.runtime import cpu_attention

        cpu_attention.register()


def _guard_sampling(params: Any, vocab_size: int) -> None:
    sampling_guard.check(params, vocab_size)
