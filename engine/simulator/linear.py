"""The plane through an engine's step times: what the scheduler's own model can know of it."""

from __future__ import annotations

import numpy as np

from engine.simulator.shape import EngineShape
from engine.simulator.steps import LinearSteps, Step, StepTime

_CONTEXTS = (200, 1000, 4000)
_PADDINGS = (0.0, 0.5)


def plane(shape: EngineShape, steps: StepTime) -> LinearSteps:
    """Least squares through steps of up to ``max_batch`` decodes and one chunk of prompts.

    Coefficients that come out negative are 0.
    """
    if isinstance(steps, LinearSteps):
        return steps
    inputs, seconds = [], []
    for num in sorted({1, shape.max_batch // 4, shape.max_batch // 2, shape.max_batch} - {0}):
        for context in _CONTEXTS:
            for share in _PADDINGS:
                for prompt in (0, shape.chunk_tokens // 2, shape.chunk_tokens):
                    pairs = prompt * prompt // 2
                    padding = int(share * num * context)
                    step = Step(num, num * context, padding, prompt, pairs)
                    inputs.append([1.0, num, num * context, padding, prompt])
                    seconds.append(steps.seconds(step))
    scale = np.array([1.0, 1e-1, 1e-4, 1e-4, 1e-3])
    solution, *_ = np.linalg.lstsq(np.array(inputs) * scale, np.array(seconds), rcond=None)
    constant, decode, each, padding_s, prefill = np.maximum(solution, 0.0) * scale
    return LinearSteps(
        constant_s=max(float(constant), 1e-6),
        decode_s=float(decode),
        context_s=float(each),
        padding_s=float(padding_s),
        prefill_s=float(prefill),
    )
