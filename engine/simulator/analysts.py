"""What a simulated scheduler is told of lengths and programs, and how late it is told.

``Unaware`` tells nothing, ``Oracle`` everything. ``NoisyLengths`` is a forecaster of a chosen
quality: it sees the logarithm of each length through noise and answers with the posterior, so
that it is calibrated whatever the noise. ``ProgramHabits`` foresees of a program what others of
its application did from the same stage on. The project's own forest and matcher are put behind
the same protocols by ``bench``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from core.slo import CompoundSlo
from engine.simulator.job import Job
from engine.simulator.workload import SimProgram, SimStage, check_seconds
from graphs.amortise import Amortisation, stage_due_s
from scheduler.programs import ProgramOutlook
from scheduler.table import NUM_POINTS

Points = NDArray[np.float64]


class Pace(NamedTuple):
    """What work costs in the engine now."""

    step_s: float
    prefill_s: float
    """Per token."""


class LengthAnalyst(Protocol):
    """Forecasts how long answers become."""

    latency_s: float
    """From a call's arrival to its forecast."""
    refine_every_tokens: int
    """0: never asked again."""

    def forecast(self, job: Job, program: SimProgram) -> Points | None:
        """Equal-mass points of the output tokens of a call that arrives; None: no idea."""
        ...

    def refined(self, job: Job, generated_tokens: int) -> Points | None:
        """The same, once so many tokens are there; None: nothing new."""
        ...

    def ended(self, job: Job, *, is_finished: bool) -> None:
        """It became ``job.generated`` tokens long."""
        ...


class ProgramAnalyst(Protocol):
    """Foresees how programs go on."""

    latency_s: float

    def stage_began(
        self, index: int, program: SimProgram, stage: int, now_s: float, pace: Pace
    ) -> ProgramOutlook | None:
        """The calls of a stage have arrived: what comes after them; None: nothing fits."""
        ...

    def stage_ended(
        self, index: int, program: SimProgram, stage: int, now_s: float, pace: Pace
    ) -> ProgramOutlook | None:
        """All calls of a stage have ended, and another follows after its tools."""
        ...

    def ended(self, index: int, program: SimProgram, *, is_complete: bool) -> None:
        """No call of it will follow."""
        ...


class UnawareOfLengths:
    """No forecasts: the scheduler goes by the lengths of each class."""

    latency_s = 0.0
    refine_every_tokens = 0

    def forecast(self, job: Job, program: SimProgram) -> Points | None:
        return None

    def refined(self, job: Job, generated_tokens: int) -> Points | None:
        return None

    def ended(self, job: Job, *, is_finished: bool) -> None:
        pass


class KnownLengths(UnawareOfLengths):
    """The true length of everything."""

    def forecast(self, job: Job, program: SimProgram) -> Points:
        return np.array([float(job.call.output_tokens)])


class NoisyLengths(UnawareOfLengths):
    """log length = what is seen + noise; the posterior over the lengths of its kind.

    A call's kind is its application and role; the mean and spread of its logarithm are learnt
    from calls that ended. ``sigma`` is the standard deviation of the noise in logarithms: 0 is
    an oracle, large values know the kind alone. Conjugate normal prior and likelihood.
    """

    _PRIOR = (math.log(200.0), 1.2)
    """Of a kind of which nothing has ended yet."""
    _PRIOR_COUNT = 4.0

    def __init__(self, sigma: float, seed: int, *, latency_s: float = 0.002) -> None:
        if not (math.isfinite(sigma) and sigma >= 0):
            raise ValueError(f"sigma must be a number, 0 or more, got {sigma!r}")
        check_seconds("latency_s", latency_s)
        self._sigma = sigma
        self._rng = np.random.default_rng((seed, 71))
        self.latency_s = latency_s
        self._kinds: dict[tuple[str, str, str], list[float]] = {}
        self._kind_of: dict[int, tuple[str, str, str]] = {}

    def forecast(self, job: Job, program: SimProgram) -> Points:
        kind = (program.application, job.call.role, type(program.slo).__name__)
        self._kind_of[job.serial] = kind
        mean, spread = self._moments(kind)
        seen = math.log(job.call.output_tokens) + self._sigma * float(self._rng.normal())
        trust = spread**2 / max(spread**2 + self._sigma**2, 1e-12)
        middle = mean + trust * (seen - mean)
        width = math.sqrt(max(spread**2 * (1 - trust), 0.0))
        points: Points = np.exp(middle + width * _NORMAL_POINTS)
        return np.clip(points, 1.0, float(job.call.max_output_tokens))

    def ended(self, job: Job, *, is_finished: bool) -> None:
        kind = self._kind_of.pop(job.serial, None)
        if kind is None or not is_finished:
            return
        moments = self._kinds.setdefault(kind, [0.0, 0.0, 0.0])
        length = math.log(max(job.generated, 1))
        moments[0] += 1
        moments[1] += length
        moments[2] += length**2

    def _moments(self, kind: tuple[str, str, str]) -> tuple[float, float]:
        count, total, squares = self._kinds.get(kind, (0.0, 0.0, 0.0))
        prior_mean, prior_spread = self._PRIOR
        weight = self._PRIOR_COUNT
        mean = (total + weight * prior_mean) / (count + weight)
        second = (squares + weight * (prior_spread**2 + prior_mean**2)) / (count + weight)
        return mean, math.sqrt(max(second - mean**2, 1e-4))


_LEVELS = (np.arange(NUM_POINTS) + 0.5) / NUM_POINTS
_NORMAL_POINTS: Points = np.array([NormalDist().inv_cdf(level) for level in _LEVELS.tolist()])


class UnawareOfPrograms:
    """Nothing is foreseen."""

    latency_s = 0.0

    def stage_began(
        self, index: int, program: SimProgram, stage: int, now_s: float, pace: Pace
    ) -> None:
        return None

    def stage_ended(
        self, index: int, program: SimProgram, stage: int, now_s: float, pace: Pace
    ) -> None:
        return None

    def ended(self, index: int, program: SimProgram, *, is_complete: bool) -> None:
        pass


_ANY_DEADLINE = 1 << 30


class Ahead(NamedTuple):
    """What is still to come of a program after a stage."""

    stages: float
    input_tokens: float
    new_tokens: float
    output_tokens: float
    stage_tokens: float
    tool_s: float
    next_tool_s: float
    next_input_tokens: float
    spread_tokens: float = 0.0
    """Standard deviation of ``stage_tokens``."""


class KnownPrograms:
    """The true rest of every program."""

    latency_s = 0.0

    def stage_began(
        self, index: int, program: SimProgram, stage: int, now_s: float, pace: Pace
    ) -> ProgramOutlook:
        ahead, live = ahead_of(program.stages[stage + 1 :]), program.stages[stage]
        longest = float(max(call.output_tokens for call in live.calls))
        return outlook_of(ahead, live, longest, program, now_s, pace)

    def stage_ended(
        self, index: int, program: SimProgram, stage: int, now_s: float, pace: Pace
    ) -> ProgramOutlook:
        return between(ahead_of(program.stages[stage + 1 :]), now_s)

    def ended(self, index: int, program: SimProgram, *, is_complete: bool) -> None:
        pass


class ProgramHabits:
    """What programs like it had still to come after the same stage, on average.

    Like it are those of its application with a deadline of about its own: who gives a program
    more time expects more of it. Where none was, those of its application.
    """

    _RECENT = 64.0
    _PER_OCTAVE = 4.0
    """Deadlines this close count as one."""

    def __init__(self, *, latency_s: float = 0.001) -> None:
        check_seconds("latency_s", latency_s)
        self.latency_s = latency_s
        self._known: dict[tuple[str, int, int], NDArray[np.float64]] = {}
        """By application, deadline and stage: a count, then the sums of ``Ahead`` and of the
        longest call of the stage itself."""

    def stage_began(
        self, index: int, program: SimProgram, stage: int, now_s: float, pace: Pace
    ) -> ProgramOutlook | None:
        known = self._means(program, stage)
        if known is None:
            return None
        ahead, longest = known
        return outlook_of(ahead, program.stages[stage], longest, program, now_s, pace)

    def stage_ended(
        self, index: int, program: SimProgram, stage: int, now_s: float, pace: Pace
    ) -> ProgramOutlook | None:
        known = self._means(program, stage)
        return None if known is None else between(known[0], now_s)

    def ended(self, index: int, program: SimProgram, *, is_complete: bool) -> None:
        if not is_complete or not isinstance(program.slo, CompoundSlo):
            return
        for stage, now in enumerate(program.stages):
            longest = max(call.output_tokens for call in now.calls)
            ahead = ahead_of(program.stages[stage + 1 :])
            squared = ahead._replace(spread_tokens=ahead.stage_tokens**2)
            seen = np.array([1.0, *squared, longest])
            for deadline in (self._deadline(program), _ANY_DEADLINE):
                key = (program.application, deadline, stage)
                known = self._known.get(key, np.zeros(len(seen)))
                self._known[key] = known + seen - known / self._RECENT

    def _means(self, program: SimProgram, stage: int) -> tuple[Ahead, float] | None:
        for deadline in (self._deadline(program), _ANY_DEADLINE):
            known = self._known.get((program.application, deadline, stage))
            if known is not None:
                *means, longest = (known[1:] / known[0]).tolist()
                ahead = Ahead(*means)
                variance = max(ahead.spread_tokens - ahead.stage_tokens**2, 0.0)
                return ahead._replace(spread_tokens=math.sqrt(variance)), longest
        return None

    def _deadline(self, program: SimProgram) -> int:
        slo = program.slo
        assert isinstance(slo, CompoundSlo)
        return round(math.log2(max(slo.deadline_s, 1e-3)) * self._PER_OCTAVE)


def _new_tokens(stage: SimStage) -> int:
    """Of its prompts, those that no earlier text is expected to hold."""
    return sum(call.input_tokens - call.prefix_tokens for call in stage.calls)


def ahead_of(stages: Sequence[SimStage]) -> Ahead:
    """What ``stages`` amount to."""
    calls = [call for stage in stages for call in stage.calls]
    following = stages[0] if stages else None
    return Ahead(
        float(len(stages)),
        float(sum(call.input_tokens for call in calls)),
        float(sum(_new_tokens(stage) for stage in stages)),
        float(sum(call.output_tokens for call in calls)),
        float(sum(max(call.output_tokens for call in stage.calls) for stage in stages)),
        sum(stage.tool_s for stage in stages),
        0.0 if following is None else following.tool_s,
        float(sum(call.input_tokens for call in following.calls)) if following else 0.0,
    )


def outlook_of(
    ahead: Ahead,
    live: SimStage,
    longest: float,
    program: SimProgram,
    now_s: float,
    pace: Pace,
) -> ProgramOutlook:
    """In the scheduler's words, with the live stage's share of what is left of the deadline.

    Args:
        live: whose calls have just arrived, so that their prompts are known.
        longest: tokens of the longest answer in it.
    """
    due_s = None
    if isinstance(program.slo, CompoundSlo):
        later_s = ahead.stage_tokens * pace.step_s + ahead.tool_s
        later_s += ahead.new_tokens * pace.prefill_s
        due_s = stage_due_s(
            Amortisation.ACCUMULATED,
            opened_s=program.arrival_s,
            deadline_at_s=program.arrival_s + program.slo.deadline_s,
            started_s=now_s,
            before_s=now_s - program.arrival_s,
            stage_s=longest * pace.step_s + _new_tokens(live) * pace.prefill_s,
            later_s=later_s,
        )
    return ProgramOutlook(
        future_input_tokens=ahead.input_tokens,
        future_output_tokens=ahead.output_tokens,
        future_stage_tokens=ahead.stage_tokens,
        future_spread_tokens=ahead.spread_tokens,
        future_tool_s=ahead.tool_s,
        future_new_tokens=ahead.new_tokens,
        stage_due_s=due_s,
    )


def between(ahead: Ahead, now_s: float) -> ProgramOutlook:
    """While the tools before the next stage run."""
    return ProgramOutlook(
        future_input_tokens=ahead.input_tokens,
        future_output_tokens=ahead.output_tokens,
        future_stage_tokens=ahead.stage_tokens,
        future_spread_tokens=ahead.spread_tokens,
        future_tool_s=ahead.tool_s - ahead.next_tool_s,
        future_new_tokens=ahead.new_tokens,
        next_call_s=now_s + ahead.next_tool_s,
        next_input_tokens=ahead.next_input_tokens,
    )
