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


class StepTimeModel:
    """duration = a + b * decodes + c * context tokens + d * prefill tokens.

    Recursive least squares with forgetting, on scaled inputs; an observation more than
    ``outlier_factor`` times its prediction is clipped to that, so that a stall does not
    wreck the fit. Coefficients are kept non-negative when predicting.
    """

    _SCALE = np.array([1.0, 1e-1, 1e-4, 1e-3])
    _MAX_INPUT = 1e4
    _MAX_DURATION_S = 3600.0
    _PRIOR_WEIGHT = np.eye(4) * 0.1
    """What is known before any step, and never forgotten below this: a steady load says
    nothing about most coefficients, and without it noise would blow those up."""

    def __init__(self, forgetting: float = 0.995, outlier_factor: float = 4.0) -> None:
        self._forgetting = forgetting
        self._outlier_factor = outlier_factor
        # A weak prior in the middle of what CPUs and GPUs do; a dozen steps outweigh it.
        self._theta: npt.NDArray[np.float64] = np.array([0.01, 0.01, 0.005, 0.1])
        self._information: npt.NDArray[np.float64] = self._PRIOR_WEIGHT.copy()
        self._num_steps = 0
        self._coefficients = tuple(float(x) for x in self._theta * self._SCALE)

    @property
    def num_steps(self) -> int:
        """Steps learnt from."""
        return self._num_steps

    @property
    def coefficients(self) -> tuple[float, float, float, float]:
        """Seconds: constant, per decode, per context token, per prefill token."""
        constant, decode, context, prefill = self._coefficients
        return constant, decode, context, prefill

    def observe(self, step: StepObservation) -> None:
        """Learn from a step; nonsense durations are ignored: none, negative, over an hour."""
        if not 0 < step.duration_s <= self._MAX_DURATION_S:
            return
        inputs = self._inputs(step.num_decodes, step.context_tokens, step.prefill_tokens)
        duration_s = step.duration_s
        if self._num_steps >= 20:
            expected_s = self.step_s(step.num_decodes, step.context_tokens, step.prefill_tokens)
            duration_s = min(duration_s, self._outlier_factor * expected_s)
        self._information *= self._forgetting
        self._information += np.outer(inputs, inputs)
        self._information += (1 - self._forgetting) * self._PRIOR_WEIGHT
        error_s = duration_s - inputs @ self._theta
        self._theta += np.linalg.solve(self._information, inputs) * error_s
        self._num_steps += 1
        clipped = np.maximum(self._theta, 0.0) * self._SCALE
        self._coefficients = tuple(float(x) for x in clipped)

    def step_s(self, num_decodes: int, context_tokens: int, prefill_tokens: int = 0) -> float:
        """Predicted seconds of a step; never below a microsecond."""
        constant, decode, context, prefill = self._coefficients
        seconds = constant + decode * num_decodes + context * context_tokens
        return max(seconds + prefill * prefill_tokens, 1e-6)

    def prefill_s(self, tokens: int) -> float:
        """Predicted seconds that prefilling ``tokens`` adds."""
        return self._coefficients[3] * tokens

    def _inputs(self, decodes: int, context: int, prefill: int) -> npt.NDArray[np.float64]:
        inputs: npt.NDArray[np.float64] = np.array([1.0, decodes, context, prefill]) * self._SCALE
        return np.minimum(inputs, self._MAX_INPUT)
