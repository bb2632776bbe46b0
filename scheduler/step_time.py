"""How long an engine step takes, fitted online to the steps that really ran."""

import msgspec
import numpy as np
import numpy.typing as npt


class StepObservation(msgspec.Struct, frozen=True):
    """One engine step as it ran."""

    duration_s: float
    num_decodes: int
    """Requests that got one token each."""
    context_tokens: int
    """Sum of the decoding requests' contexts."""
    prefill_tokens: int
    padding_tokens: int = 0
    """Of a padded batch: decodes times the longest context, less the sum of contexts."""


class StepTimeModel:
    """duration = a + b * decodes + c * context + d * prefill + e * padding tokens.

    Recursive least squares with forgetting, on scaled inputs; an observation more than
    ``outlier_factor`` times its prediction is clipped to that, so that a stall does not
    wreck the fit. Coefficients are kept non-negative when predicting.
    """

    _SCALE = np.array([1.0, 1e-1, 1e-4, 1e-3, 1e-4])
    _MAX_INPUT = 1e4
    _MAX_DURATION_S = 3600.0
    _PRIOR_WEIGHT = np.eye(5) * 0.1
    """What is known before any step, and never forgotten below this: a steady load says
    nothing about most coefficients, and without it noise would blow those up."""

    _RECENT_STEPS = 500.0
    """Steps that the share of prompts is learnt from, about."""
    _CHUNK_MEMORY = 0.99995
    """Per step: a chunk that is not seen any more is forgotten."""
    _AS_EXPECTED = 1e-3
    """A step within this share of what was expected changes nothing."""
    _PRIOR_DECODES = 100.0
    """Tokens without prompts that count beside them, lest the first prompts blow it up."""

    def __init__(self, forgetting: float = 0.995, outlier_factor: float = 4.0) -> None:
        self._forgetting = forgetting
        self._outlier_factor = outlier_factor
        # A weak prior in the middle of what CPUs and GPUs do; a dozen steps outweigh it.
        self._theta: npt.NDArray[np.float64] = np.array([0.01, 0.01, 0.005, 0.1, 0.0])
        self._information: npt.NDArray[np.float64] = self._PRIOR_WEIGHT.copy()
        self._num_steps = 0
        self._recent_decodes = 0.0
        self._recent_prefill_tokens = 0.0
        self._chunk_tokens = 0.0
        """Most prompt tokens that lately ran beside decodes in one step; 0: none did."""
        self._coefficients = tuple(float(x) for x in self._theta * self._SCALE)

    @classmethod
    def known(
        cls,
        constant_s: float,
        decode_s: float = 0.0,
        context_s: float = 0.0,
        prefill_s: float = 0.0,
        padding_s: float = 0.0,
    ) -> "StepTimeModel":
        """A model of an engine whose step times are known; it goes on learning from there."""
        model = cls()
        coefficients = np.array([constant_s, decode_s, context_s, prefill_s, padding_s])
        model._theta = coefficients / cls._SCALE
        model._information = np.eye(5) * 1e6
        model._coefficients = tuple(float(x) for x in np.maximum(coefficients, 0.0))
        return model

    @property
    def num_steps(self) -> int:
        """Steps learnt from."""
        return self._num_steps

    @property
    def coefficients(self) -> tuple[float, float, float, float, float]:
        """Seconds: constant, per decode, per context, prefill and padding token."""
        constant, decode, context, prefill, padding = self._coefficients
        return constant, decode, context, prefill, padding

    def observe(self, step: StepObservation) -> None:
        """Learn from a step; nonsense durations are ignored: none, negative, over an hour."""
        if not 0 < step.duration_s <= self._MAX_DURATION_S:
            return
        self._recent_decodes += step.num_decodes - self._recent_decodes / self._RECENT_STEPS
        self._recent_prefill_tokens += (
            step.prefill_tokens - self._recent_prefill_tokens / self._RECENT_STEPS
        )
        if step.num_decodes and step.prefill_tokens:
            self._chunk_tokens = max(self._chunk_tokens, float(step.prefill_tokens))
        self._chunk_tokens *= self._CHUNK_MEMORY
        duration_s = step.duration_s
        self._num_steps += 1
        if self._num_steps > 20:
            expected_s = self.step_s(
                step.num_decodes, step.context_tokens, step.prefill_tokens, step.padding_tokens
            )
            duration_s = min(duration_s, self._outlier_factor * expected_s)
            if abs(duration_s - expected_s) <= self._AS_EXPECTED * expected_s:
                # Nothing to learn: the fit is what costs here.
                return
        inputs = self._inputs(
            step.num_decodes, step.context_tokens, step.prefill_tokens, step.padding_tokens
        )
        self._information *= self._forgetting
        self._information += np.outer(inputs, inputs)
        self._information += (1 - self._forgetting) * self._PRIOR_WEIGHT
        error_s = duration_s - inputs @ self._theta
        self._theta += np.linalg.solve(self._information, inputs) * error_s
        clipped = np.maximum(self._theta, 0.0) * self._SCALE
        self._coefficients = tuple(float(x) for x in clipped)

    def step_s(
        self,
        num_decodes: float,
        context_tokens: float,
        prefill_tokens: float = 0,
        padding_tokens: float = 0,
    ) -> float:
        """Expected seconds of a step of this composition, at least a microsecond."""
        constant, decode, context, prefill, padding = self._coefficients
        expected_s = (
            constant
            + decode * num_decodes
            + context * context_tokens
            + prefill * prefill_tokens
            + padding * padding_tokens
        )
        return max(float(expected_s), 1e-6)

    @property
    def prefill_s_per_decode(self) -> float:
        """Engine seconds that prompts have lately taken per token decoded."""
        tokens = self._recent_prefill_tokens / (self._recent_decodes + self._PRIOR_DECODES)
        return self._coefficients[3] * tokens

    def pace_s(self, num_decodes: float, context_tokens: float) -> float:
        """Expected seconds between two tokens of a request, with the prompts in between.

        They count for as much as the step itself at most: a burst of prompts passes.
        """
        step_s = self.step_s(num_decodes, context_tokens)
        return step_s + min(num_decodes * self.prefill_s_per_decode, step_s)

    def prefill_s(self, tokens: float) -> float:
        """Expected seconds that prefilling ``tokens`` adds."""
        return self._coefficients[3] * tokens

    def prompt_token_s(self, step_s: float) -> float:
        """Expected seconds per prompt token until the first token is there.

        Where prompts are computed in chunks beside decodes, each chunk takes a step as well.

        Args:
            step_s: of those decodes.
        """
        beside_s = step_s / self._chunk_tokens if self._chunk_tokens >= 1.0 else 0.0
        return self._coefficients[3] + beside_s

    def _inputs(
        self, decodes: int, context: int, prefill: int, padding: int
    ) -> npt.NDArray[np.float64]:
        inputs: npt.NDArray[np.float64] = (
            np.array([1.0, decodes, context, prefill, padding]) * self._SCALE
        )
        return np.clip(inputs, 0.0, self._MAX_INPUT)
