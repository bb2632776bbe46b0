"""The least that a call costs the simulated engine, and the least time that it takes.

Never above what any schedule pays, so that ``bench.bound`` may build on it. Work is in
engine-seconds: the time of a step shared out among the tokens that it gives or computes, the
constant evenly among the at most ``max_batch`` requests that get a token from it. No second
is counted twice, so the work of all calls together fits into the time that the engine has.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
import numpy.typing as npt

from engine.simulator.steps import LinearSteps
from engine.simulator.workload import SimCall, SimStage

Floats = npt.NDArray[np.float64]


class CallWork(msgspec.Struct, frozen=True, kw_only=True):
    """Of one call, in seconds. The end of its prompt gives its first token.

    Attributes:
        prompt_s: engine-seconds of its prompt and first token.
        prompt_time_s: how long those take at least.
        token_s: engine-seconds of each further token; no token has less than the one before.
        rest_s: by how much a step that gives one of those lasts longer than the token's share.
    """

    prompt_s: float
    prompt_time_s: float
    token_s: Floats
    rest_s: float

    @property
    def answer_s(self) -> float:
        """Engine-seconds of all tokens but the first."""
        return float(self.token_s.sum())

    @property
    def answer_time_s(self) -> float:
        """How long all tokens but the first take at least."""
        return self.answer_s + self.rest_s * len(self.token_s)

    @property
    def time_s(self) -> float:
        """How long it takes at least."""
        return self.prompt_time_s + self.answer_time_s

    def earliest_s(self) -> Floats:
        """When each token but the first can be there, counted from the call's arrival."""
        earliest: Floats = self.prompt_time_s + np.cumsum(self.token_s + self.rest_s)
        return earliest

    def most_answer_s(self, time_s: float) -> float:
        """The most engine-seconds of its answer that fit into so much time.

        One token a step, of which the token's share is largest where its context is longest.
        """
        if not len(self.token_s):
            return 0.0
        last_s = float(self.token_s[-1])
        return min(self.answer_s, time_s * last_s / (last_s + self.rest_s))


class StageWork(msgspec.Struct, frozen=True, kw_only=True):
    """Calls side by side; ``time_s`` is how long all of them take at least."""

    calls: tuple[CallWork, ...]
    time_s: float


class LeastWork:
    """What calls cost.

    Args:
        steps: the engine's.
        max_batch: requests that may run together.
        chunk_tokens: most prompt tokens of a step; None: no limit.
        swap_token_s: as ``EngineShape`` has it.
        num_replicas: engines of that kind.

    Raises ValueError that begins with the name of what is out of range.
    """

    def __init__(
        self,
        steps: LinearSteps,
        *,
        max_batch: int,
        chunk_tokens: int | None = None,
        swap_token_s: float | None = None,
        num_replicas: int = 1,
    ) -> None:
        for name, count in (
            ("max_batch", max_batch),
            ("chunk_tokens", 1 if chunk_tokens is None else chunk_tokens),
            ("num_replicas", num_replicas),
        ):
            if count < 1:
                raise ValueError(f"{name} must be at least 1, got {count}")
        self._steps = steps
        self._chunk_tokens = math.inf if chunk_tokens is None else chunk_tokens
        self._share_s = steps.constant_s / max_batch
        self._again_s = min(steps.prefill_s, math.inf if swap_token_s is None else swap_token_s)
        """To have a token's KV back after a preemption."""
        self._num_replicas = num_replicas

    def of_call(self, call: SimCall) -> CallWork:
        """All that may be in the prefix cache is there; one prompt token is always computed."""
        steps, chunk_tokens = self._steps, self._chunk_tokens
        cached = min(call.prefix_tokens, call.input_tokens - 1)
        computed = call.input_tokens - cached
        pairs = (call.input_tokens * (call.input_tokens + 1) - cached * (cached + 1)) / 2
        compute_s = steps.prefill_s * computed + steps.pair_s * pairs
        step_s = steps.constant_s + steps.prefill_constant_s
        return CallWork(
            prompt_s=self._share_s + compute_s + steps.prefill_constant_s * computed / chunk_tokens,
            prompt_time_s=compute_s + step_s * max(1, math.ceil(computed / chunk_tokens)),
            token_s=self._token_s(call, computed),
            rest_s=steps.constant_s - self._share_s,
        )

    def _token_s(self, call: SimCall, computed: int) -> Floats:
        """Of tokens 1, 2, ...: decoded, or by a preemption just before them if that is cheaper.

        Where the prompt is cached it can be: what is lost then is had back, one token computed.
        """
        steps = self._steps
        places = np.arange(1, call.output_tokens, dtype=np.float64)
        decode_s = steps.decode_s + steps.context_s * (call.input_tokens + places)
        preempt_s = steps.prefill_s + self._again_s * (computed + places - 1)
        token_s: Floats = self._share_s + np.minimum(decode_s, preempt_s)
        return token_s

    def of_stage(self, stage: SimStage) -> StageWork:
        """Its calls run side by side, on all replicas."""
        calls = tuple(self.of_call(call) for call in stage.calls)
        work_s = sum(call.prompt_s + call.answer_s for call in calls)
        longest_s = max(call.time_s for call in calls)
        return StageWork(calls=calls, time_s=max(longest_s, work_s / self._num_replicas))
