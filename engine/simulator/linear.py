"""The plane through an engine's step times: what the scheduler's own model can know of it."""

from __future__ import annotations

from engine.simulator import measured
from engine.simulator.measured import Measurement
from engine.simulator.shape import EngineShape
from engine.simulator.steps import LinearSteps, Step, StepTime

_CONTEXTS = (200, 1000, 4000)
_PADDINGS = (0.0, 0.5)


def plane(shape: EngineShape, steps: StepTime) -> LinearSteps:
    """The nearest to steps of up to ``max_batch`` decodes and one chunk of prompts.

    As ``measured.fit`` has it. What the tokens of a prompt attend to goes into their own cost.
    """
    if isinstance(steps, LinearSteps):
        return steps
    rows = []
    for num in sorted({1, shape.max_batch // 4, shape.max_batch // 2, shape.max_batch} - {0}):
        for context in _CONTEXTS:
            for share in _PADDINGS:
                for prompt in (0, shape.chunk_tokens // 2, shape.chunk_tokens):
                    padding = int(share * num * context)
                    step = Step(num, num * context, padding, prompt, prompt * prompt // 2)
                    known = step._replace(prefill_pairs=0)
                    rows.append(Measurement(known, steps.seconds(step)))
    return measured.fit(rows, with_prefill_constant=False)
