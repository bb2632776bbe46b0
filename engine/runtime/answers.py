"""Follows the answers of one HTTP request and says how they went.

The HTTP layer opens an ``AnswerLog`` for the request; the hook around SGLang's
``TokenizerManager.generate_request`` finds it through a context variable and reports every
output to it. Times are taken where the answer leaves for the client.
"""

import contextvars
import math
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from core.clock import Clock
from core.programs import ProgramRecord
from core.slo import OutcomeTracker, RequestTerms, SloOutcome
from engine.runtime import wire
from engine.runtime.drops import reason_of_drop
from predictor.features import NO_CUES, Cues

current: contextvars.ContextVar["AnswerLog | None"] = contextvars.ContextVar(
    "jitserve_answer_log", default=None
)


class AnswerLog:
    """The outcomes of the one or more answers (``n``, batches) of an HTTP request."""

    def __init__(
        self,
        terms: RequestTerms,
        clock: Clock,
        cues: Cues = NO_CUES,
        program: ProgramRecord | None = None,
    ) -> None:
        self.terms = terms
        self.cues = cues
        self.program = program
        self._clock = clock
        self._trackers: dict[str, OutcomeTracker] = {}
        self._outcomes: dict[str, SloOutcome] = {}
        self.drop_reason: str | None = None
        self.has_finished = False
        """An answer of it came to its end."""

    def observe(self, output: dict[str, Any]) -> None:
        """One output of SGLang: tokens so far of one answer, and whether it is its last."""
        meta = output.get("meta_info")
        if not isinstance(meta, dict) or "id" not in meta:
            return
        now_s = self._clock.now_s()
        answer_id = meta["id"]
        tracker = self._trackers.setdefault(answer_id, OutcomeTracker(self.terms))
        sent_tokens = int(meta.get("completion_tokens") or 0)
        thinking_tokens = int(meta.get("reasoning_tokens") or 0)
        if sent_tokens > thinking_tokens:
            # SGLang counts every token as thinking until the one that ends it.
            tracker.answer_began(thinking_tokens)
        tracker.sent(sent_tokens, now_s)
        finish = meta.get("finish_reason")
        if not finish:
            return
        reason = None
        if isinstance(finish, dict) and finish.get("type") == "abort":
            message = str(finish.get("message") or "aborted")
            drop = reason_of_drop(message)
            self.drop_reason = drop or self.drop_reason
            reason = drop or message
        input_tokens = int(meta.get("prompt_tokens") or 0)
        outcome = tracker.finish(input_tokens, now_s, reason)
        if self.program is not None:
            if reason is None:
                # A last call that streams by targets of its own is judged and counted by them; one
                # without a token only fills a cache, or is read.
                if sent_tokens and not self.terms.closes_program:
                    tokens = input_tokens + sent_tokens
                    self.program.finished(tokens, now_s, is_first=not self.has_finished)
                self.has_finished = True
            outcome = msgspec.structs.replace(outcome, program=self.program.outcome())
        self._outcomes[answer_id] = outcome
        output["metadata"] = {"slo": to_json(outcome)}

    def observe_error(self, message: str) -> None:
        """SGLang gave an error in place of an answer."""
        self.drop_reason = reason_of_drop(message) or self.drop_reason

    @property
    def has_output(self) -> bool:
        """Something of an answer has been seen."""
        return bool(self._trackers)

    @property
    def is_complete(self) -> bool:
        """Every answer seen so far has ended."""
        return bool(self._trackers) and len(self._outcomes) == len(self._trackers)

    def summary(self) -> dict[str, Any] | None:
        """The ``metadata.slo`` of the whole response; None before anything has ended."""
        outcomes = list(self._outcomes.values())
        if not outcomes:
            return None
        return to_json(outcomes[0] if len(outcomes) == 1 else combine(outcomes))


def combine(outcomes: list[SloOutcome]) -> SloOutcome:
    """Several answers to one request: met if all were, as late as the latest."""
    first = outcomes[0]
    ttfts = [outcome.ttft_s for outcome in outcomes if outcome.ttft_s is not None]
    lateness = [o.worst_lateness_s for o in outcomes if o.worst_lateness_s is not None]
    return msgspec.structs.replace(
        first,
        met=all(outcome.met for outcome in outcomes),
        goodput_tokens=sum(outcome.goodput_tokens for outcome in outcomes),
        ttft_s=min(ttfts, default=None),
        worst_lateness_s=max(lateness, default=None),
        e2el_s=max(outcome.e2el_s for outcome in outcomes),
        output_tokens=sum(outcome.output_tokens for outcome in outcomes),
        reason=next((o.reason for o in outcomes if o.reason is not None), None),
        program=outcomes[-1].program,
    )


def to_json(outcome: SloOutcome) -> dict[str, Any]:
    """Only finite numbers: JSON has no infinity."""
    data: dict[str, Any] = msgspec.to_builtins(outcome)
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in data.items()
    }


async def follow(generate: Any, manager: Any, obj: Any, request: Any = None) -> AsyncIterator[Any]:
    """Around ``TokenizerManager.generate_request``: attach the terms, report the outputs.

    Raises:
        ValueError: ``n`` is out of range; SGLang's routes answer it with a 400.
    """
    log = current.get()
    _attach(obj, None if log is None else log.terms, NO_CUES if log is None else log.cues)
    stream = generate(manager, obj, request)
    try:
        async for output in stream:
            if log is not None:
                for item in output if isinstance(output, list) else (output,):
                    if isinstance(item, dict):
                        log.observe(item)
            yield output
    except Exception as error:
        # Where the answer is not streamed SGLang raises the abort instead of yielding it.
        if log is not None:
            log.observe_error(str(getattr(error, "detail", error)))
        raise
    finally:
        await stream.aclose()


def _attach(obj: Any, terms: RequestTerms | None, cues: Cues) -> None:
    params = getattr(obj, "sampling_params", None)
    if params is None and hasattr(obj, "sampling_params"):
        params = obj.sampling_params = {}
    for item in params if isinstance(params, list) else (params,):
        if isinstance(item, dict):
            check_n(item.get("n"))
            wire.attach(item, terms, cues)


MAX_N = 128
"""Most answers per prompt, as OpenAI's API has it."""


def check_n(n: Any) -> None:
    """Raise ValueError unless ``n`` is missing or a sensible number of answers."""
    if n is None:
        return
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_N:
        raise ValueError(f"n: takes a whole number from 1 to {MAX_N}, got {n!r:.40}")
