"""What the scheduler needs to know of an SGLang request when it arrives."""

import math
from typing import Any

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req

from core.slo import BestEffortSlo, LatencySlo, RequestTerms
from core.terms import SloDefaults
from engine.runtime import wire


def terms_of(req: Req, defaults: SloDefaults, now_s: float) -> RequestTerms:
    """The terms its sender agreed to, or the defaults for routes that carry none."""
    terms = wire.detach(req.sampling_params.custom_params)
    if terms is not None:
        return terms
    if req.stream and defaults.streaming_is_latency_sensitive and not is_health_check(req):
        return RequestTerms(now_s, LatencySlo(defaults.target_ttft, defaults.target_tbt))
    return RequestTerms(now_s, BestEffortSlo(defaults.best_effort_deadline))


NO_LIMIT_TOKENS = 1 << 30
KNOWN_TOKENS_KEY = "known_output_tokens"
"""Where a request of a test says how long its answer will be."""


def max_output_tokens(req: Req) -> int:
    """Where its answer is cut off at the latest."""
    limit = req.sampling_params.max_new_tokens
    return limit if limit is not None and limit < math.inf else NO_LIMIT_TOKENS


def arrival_arguments(req: Req, *, trusts_known_lengths: bool = False) -> dict[str, Any]:
    """Keyword arguments of ``FrameManager.arrive`` for ``req``."""
    limit = req.sampling_params.max_new_tokens
    known = _certain_output_tokens(req)
    if trusts_known_lengths:
        known = _claimed_output_tokens(req) or known
    return {
        "input_tokens": len(req.origin_input_ids),
        "max_output_tokens": max_output_tokens(req),
        "is_pinned": is_pinned(req),
        # A refused request runs one token to be answered; a health check must not queue.
        "is_urgent": is_refused(req) or (is_health_check(req) and limit is not None and limit <= 1),
        "priority": req.priority or 0,
        "known_output_tokens": known,
    }


def _claimed_output_tokens(req: Req) -> int | None:
    claims = req.sampling_params.custom_params
    claim = claims.get(KNOWN_TOKENS_KEY) if isinstance(claims, dict) else None
    return claim if isinstance(claim, int) and claim > 0 else None


def _certain_output_tokens(req: Req) -> int | None:
    """How long the answer will be where the request itself says so: nothing can end it early."""
    params = req.sampling_params
    is_open = params.ignore_eos and not params.stop_strs and not params.stop_token_ids
    limit = params.max_new_tokens
    return limit if is_open and limit is not None and limit < math.inf else None


def has_answer_begun(req: Req) -> bool:
    """Whether its next token is one of the visible answer and not of the thinking before it."""
    return not req.require_reasoning or bool(req._is_reasoning_over)


def is_health_check(req: Req) -> bool:
    """SGLang's own request behind ``/health``."""
    return bool(req.rid.startswith(HEALTH_CHECK_RID_PREFIX))


def is_refused(req: Req) -> bool:
    """SGLang has already decided to abort it and only needs a step to say so."""
    return isinstance(req.finished_reason, FINISH_ABORT) or isinstance(req.to_finish, FINISH_ABORT)


def is_pinned(req: Req) -> bool:
    """State that SGLang keeps per batch row or per session and that a move would lose.

    Penalties count the tokens seen by the row, a token behind under the overlap schedule;
    beam members share rows; a streaming session owns its row.
    """
    params = req.sampling_params
    is_counted = has_penalty(params) or params.min_new_tokens > 0
    return is_counted or req.beam_group is not None or req.session is not None


def has_penalty(params: Any) -> bool:
    """Whether tokens that were generated change what is likely next."""
    return bool(
        params.frequency_penalty != 0
        or params.presence_penalty != 0
        or params.repetition_penalty != 1
    )
