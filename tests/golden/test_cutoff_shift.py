"""The adapted cutoff p against every fixed one, on a load that shifts.

Frames of a padded engine: in one phase lengths differ widely and requests are worth about the
same, so a group of like length (small p) earns more; in the other lengths are alike and worths
differ, so taking anything but the best (small p) loses. What a frame earns is the worth
of its group per second of its padded steps.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from scheduler.cutoff import CANDIDATES, CutoffTuner
from scheduler.policies.base import best_first
from scheduler.policies.grouping import best_window
from scheduler.step_time import StepTimeModel

BATCH = 8
QUEUE = 64
FRAME_S = 0.5
PHASE_FRAMES = 1200
ENGINE = StepTimeModel.known(0.01, 0.0005, 0.0, 0.0, 4e-6)


def phase_of_unlike_lengths(rng: random.Random) -> tuple[float, float]:
    return rng.choice((50.0, 200.0, 1000.0, 2000.0)) * rng.uniform(0.9, 1.1), rng.uniform(0.6, 1.4)


def phase_of_unlike_worths(rng: random.Random) -> tuple[float, float]:
    return rng.uniform(290.0, 310.0), rng.choice((0.55, 0.7, 1.0))


PHASES = (phase_of_unlike_lengths, phase_of_unlike_worths)


def earned_in(cutoff: float, phase: int, rng: random.Random) -> float:
    """What one frame earns in a second under ``cutoff``."""
    drawn = np.array([PHASES[phase](rng) for _ in range(QUEUE)])
    lengths, worth, serial = drawn[:, 0], drawn[:, 1], np.arange(QUEUE)
    ranked = best_first(worth, serial, QUEUE)
    group = best_window(ranked, worth, lengths=lengths, serial=serial, size=BATCH, cutoff=cutoff)
    total, longest = float(lengths[group].sum()), float(lengths[group].max())
    step_s = ENGINE.step_s(len(group), total, 0, len(group) * longest - total)
    return float(worth[group].sum()) / step_s


def earned(tuner: CutoffTuner, phases: list[int], seed: int = 3) -> float:
    """Goodput of a whole run."""
    rng = random.Random(seed)
    total = 0.0
    for phase in phases:
        for _ in range(PHASE_FRAMES):
            rate = earned_in(tuner.cutoff, phase, rng)
            tuner.frame(rate * FRAME_S, FRAME_S, is_contended=True)
            total += rate * FRAME_S
    return total


def test_on_a_shifting_load_it_beats_every_fixed_cutoff() -> None:
    phases = [0, 1, 0, 1]
    adapted = earned(CutoffTuner(), phases)
    fixed = {cutoff: earned(CutoffTuner((cutoff,)), phases) for cutoff in CANDIDATES}
    assert adapted > 1.02 * max(fixed.values()), (adapted, fixed)


@pytest.mark.parametrize("phase", range(len(PHASES)), ids=["unlike lengths", "unlike worths"])
def test_on_a_steady_load_it_is_never_far_from_the_best(phase: int) -> None:
    adapted = earned(CutoffTuner(), [phase] * 3)
    fixed = {cutoff: earned(CutoffTuner((cutoff,)), [phase] * 3) for cutoff in CANDIDATES}
    assert adapted > 0.95 * max(fixed.values()), (adapted, fixed)
    assert adapted > 1.08 * min(fixed.values()), (adapted, fixed)
