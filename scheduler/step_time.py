"""How long an engine step takes, fitted online to the steps that really ran."""

import math

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

    def __init__(self, forgetting: float = 0.995, outlier_factor: float = 4.0) -> None:
        self._forgetting = forgetting
        self._outlier_factor = outlier_factor
        # A weak prior in the middle of what CPUs and GPUs do; a dozen steps outweigh it.
        self._theta: npt.NDArray[np.float64] = np.array([0.01, 0.01, 0.005, 0.1])
        self._covariance: npt.NDArray[np.float64] = np.eye(4) * 10.0
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
        """Learn from a step; nonsense durations (zero, negative, not finite) are ignored."""
        if not (math.isfinite(step.duration_s) and step.duration_s > 0):
            return
        inputs = self._inputs(step.num_decodes, step.context_tokens, step.prefill_tokens)
        duration_s = step.duration_s
        if self._num_steps >= 20:
            expected_s = self.step_s(step.num_decodes, step.context_tokens, step.prefill_tokens)
            duration_s = min(duration_s, self._outlier_factor * expected_s)
        gain = self._covariance @ inputs
        gain /= self._forgetting + inputs @ gain
        self._theta += gain * (duration_s - inputs @ self._theta)
        self._covariance -= np.outer(gain, inputs @ self._covariance)
        self._covariance /= self._forgetting
        # Directions that the load does not excite would otherwise grow without bound.
        np.clip(self._covariance, -1e4, 1e4, out=self._covariance)
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
        return inputs
