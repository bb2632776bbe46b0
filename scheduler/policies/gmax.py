"""GMAX: the group of requests that earns the most goodput per second of the engine.

Two policies on the estimates of ``scheduler.estimates``. ``PaperGmax`` is Algorithm 1 of the
paper (section SLO-aware Scheduler with GMAX); ``Gmax`` is ours, the default. The readings of
the paper and what differs from it were each measured: ``docs/decisions/``.
"""

from dataclasses import dataclass

import numpy as np

from scheduler.cutoff import CutoffTuner
from scheduler.estimates import Estimates, Expected
from scheduler.lengths import Information
from scheduler.policies.base import Assessment, DisplaceRule, Traits
from scheduler.policies.grouping import best_batch_size, best_window
from scheduler.table import BEST_EFFORT, COMPOUND, LATENCY, RUNNING, Floats, Ints

SLACK_SCALE_S = 10.0
URGENCY_POWER = 0.25
"""How much slack counts beside value density. 0: not at all, the most tokens in overload; 1: a
fifth more requests in time, a tenth fewer tokens. A quarter gives most of both."""
BEST_EFFORT_WEIGHT = 0.05
"""Value of best-effort work against a stream of the same length in time."""
EXPIRED_WEIGHT = 0.02
"""Value of work that is late already: it is served, after everything that can make it."""
STARVATION_PER_FRAME = 0.002
"""delta: rise of the score per frame waited, in shares of an average stream's."""
HEAD_START_FRAMES = 25.0
"""Who runs counts as having waited so much longer: equals that waited a little less or more
must not take turns, since every turn costs a step."""


@dataclass(frozen=True, kw_only=True)
class GmaxParts:
    """Which parts of ``Gmax`` are on; each can be left out to see what it gives."""

    has_gmax: bool = True
    """Off: shortest expected job first, on the same estimates (the paper's ablation)."""
    has_grouping: bool = True
    has_jit: bool = True
    """Off: slack counts for nothing, and whoever is chosen runs the frame through."""
    has_adaptive_batch: bool = True


class Gmax:
    """Ours: expected value per engine second, urgency, and as many at once as pays.

    Score = objective value x P(in time) / engine seconds of the rest, times a mild urgency,
    (1 + slack / 10 s) ** -1/4, and who has more slack than all the work there is counts less in
    proportion. A program counts as a whole: what it got, what runs and what is
    expected of it. Of the ranked requests the first n run, with n as in ``grouping``; a group
    of more alike contexts replaces them where the step-time model says it earns more.
    """

    source = "JITServe, section SLO-aware Scheduler with GMAX, changed where measured better"
    approximates = (
        "Departs from the paper: engine seconds in place of t_gen, expected value in place of an "
        "upper bound, urgency, batch size as a decision, and the group by modelled value per second"
    )

    def __init__(
        self,
        parts: GmaxParts | None = None,
        information: Information = Information.FORECAST,
    ) -> None:
        self._parts = parts or GmaxParts()
        self._batch_size = 0
        self.tuner = CutoffTuner() if self._parts.has_grouping else None
        self.traits = Traits(
            displace=DisplaceRule.BETTER_SCORE,
            information=information,
            is_just_in_time=self._parts.has_jit,
            is_starvation_free=True,
            foresees=True,
            blends_fairness=True,
        )

    def assess(self, estimates: Estimates) -> Assessment:
        step_s = estimates.context.step_s
        expected = estimates.pool_programs(estimates.expected(step_s))
        plain = _plain_stream_score(estimates)
        value = expected.full_value * expected.in_time_fraction
        late = estimates.is_expired
        value[late] = 0.0
        best_effort = estimates.rows.kind == BEST_EFFORT
        value[best_effort] *= BEST_EFFORT_WEIGHT
        if self._parts.has_gmax:
            scores = self._score(estimates, expected, value, plain)
        else:
            average = estimates.context.average_tokens
            scores = plain * average / np.maximum(estimates.mean_tokens, 1.0)
            scores[late] *= EXPIRED_WEIGHT
        rows = estimates.rows
        ahead = np.where(rows.state == RUNNING, HEAD_START_FRAMES, 0.0)
        scores = scores + STARVATION_PER_FRAME * plain * (rows.frames_waited + ahead)
        return Assessment(scores, value, expected.in_time_fraction, expected.slack_s)

    def _score(
        self, estimates: Estimates, expected: Expected, value: Floats, plain: float
    ) -> Floats:
        scores = value / estimates.engine_s * self._urgency(estimates, expected)
        # Shortest first among what is late, so that most of it ends soon.
        average = estimates.context.average_tokens
        late = EXPIRED_WEIGHT * plain * average / (average + estimates.mean_tokens)
        return np.where(estimates.has_slo, np.maximum(scores, late), scores)

    def _urgency(self, estimates: Estimates, expected: Expected) -> Floats:
        if not self._parts.has_jit:
            return np.ones(estimates.rows.size)
        has_slo = estimates.has_slo
        slack_s = np.where(has_slo, np.maximum(expected.slack_s, 0.0), 0.0)
        urgency: Floats = (1.0 + slack_s / SLACK_SCALE_S) ** -URGENCY_POWER
        # Whoever has more slack than all the work there is would take loses nothing by waiting.
        work_s = float(estimates.engine_s[has_slo & ~estimates.is_expired].sum())
        most_s = max(work_s, SLACK_SCALE_S)
        urgency *= np.minimum(1.0, most_s / np.maximum(slack_s, most_s))
        return urgency

    def group(
        self, ranked: Ints, scores: Floats, estimates: Estimates, slots: int, beside: Ints
    ) -> Ints:
        size = min(slots, len(ranked))
        if self._parts.has_adaptive_batch:
            size = self._choose_size(ranked[:slots], estimates, slots, beside)
        if self.tuner is None:
            return ranked[:size]
        return best_window(
            ranked,
            scores,
            lengths=estimates.rows.context_tokens,
            serial=estimates.rows.serial,
            size=size,
            cutoff=self.tuner.cutoff,
            step_time=estimates.context.step_time,
        )

    def _choose_size(self, top: Ints, estimates: Estimates, slots: int, beside: Ints) -> int:
        near = estimates.take(top)
        beside_tokens = float(estimates.rows.context_tokens[beside].sum())
        weight = np.where(near.has_slo, 1.0, BEST_EFFORT_WEIGHT)
        weight /= near.mean_tokens + near.rows.generated_tokens

        def earned(size: int, step_s: float) -> float:
            """Value that a step of the first ``size`` gives."""
            expected = near.expected(step_s)
            value = expected.full_value * expected.in_time_fraction
            value[near.is_expired] = 0.0
            value = np.maximum(value, EXPIRED_WEIGHT * expected.full_value) * weight
            return float(value[:size].sum())

        self._batch_size = best_batch_size(
            earned,
            near,
            slots=slots,
            current=self._batch_size or len(top),
            beside=(beside.size, beside_tokens),
        )
        return self._batch_size


def _plain_stream_score(estimates: Estimates) -> float:
    """Score of a stream of average length that is exactly in time: the unit of all weights."""
    context = estimates.context
    length = np.array([max(context.average_tokens, 1.0)])
    value = float(context.objective.stream_value(length, length)[0])
    token_s = context.step_s / max(context.batch_size, 1)
    return max(value, 1e-9) / float(length[0] * token_s)


class PaperGmax:
    """Algorithm 1 in its sensible readings: margin goodput over t_gen, grouped by length."""

    source = "JITServe, Algorithm 1 and appendix (indicator, filter and threshold delta = 10 %)"
    approximates = (
        "Where the text leaves it open: a stream's goodput is its tokens that can still be in "
        "time; what cannot make its deadline is put last, not out; a compound's goodput is the "
        "whole program's, its t_gen in the priority that of all live calls of the stage "
        "together and in the feasibility filter that of the longest, since they run side by "
        "side; p is explored as in scheduler/cutoff.py, among the best 8 requests per place"
    )

    def __init__(self, information: Information = Information.FORECAST) -> None:
        self.tuner = CutoffTuner()
        self.traits = Traits(
            displace=DisplaceRule.BETTER_VALUE,
            information=information,
            is_just_in_time=True,
            is_starvation_free=True,
            blends_fairness=True,
        )

    def assess(self, estimates: Estimates) -> Assessment:
        context, rows = estimates.context, estimates.rows
        expected = estimates.pool_programs(estimates.expected(context.step_s))
        generation_s, longest_s = _stage_generation_s(estimates)
        goodput = expected.whole_value * np.where(estimates.has_slo, 1.0, 0.0)
        is_stream = rows.kind == LATENCY
        goodput = np.where(is_stream, goodput * expected.in_time_fraction, goodput)
        unit = np.array([1.0])
        delta = STARVATION_PER_FRAME * context.average_tokens
        delta *= float(context.objective.stream_value(unit, unit)[0])
        infeasible = estimates.has_slo & ~is_stream & (estimates.left_s < longest_s)
        goodput = np.where(infeasible, goodput * EXPIRED_WEIGHT, goodput)
        scores = (goodput + delta * rows.frames_waited) / np.maximum(generation_s, 1e-9)
        return Assessment(scores, goodput, expected.in_time_fraction, expected.slack_s)

    def group(
        self, ranked: Ints, scores: Floats, estimates: Estimates, slots: int, beside: Ints
    ) -> Ints:
        return best_window(
            ranked,
            scores,
            lengths=estimates.rows.input_tokens,
            serial=estimates.rows.serial,
            size=min(slots, len(ranked)),
            cutoff=self.tuner.cutoff,
        )


def _stage_generation_s(estimates: Estimates) -> tuple[Floats, Floats]:
    """t_gen; of a program's call that of all its live calls together, and of the longest."""
    rows, generation_s = estimates.rows, estimates.generation_s
    calls = np.flatnonzero((rows.kind == COMPOUND) & (rows.program >= 0))
    if not calls.size:
        return generation_s, generation_s
    size = estimates.context.programs.num_indices
    program = rows.program[calls]
    longest = np.zeros(size)
    np.maximum.at(longest, program, generation_s[calls])
    total = np.bincount(program, weights=generation_s[calls], minlength=size)
    together, apart = generation_s.copy(), generation_s.copy()
    together[calls], apart[calls] = total[program], longest[program]
    return together, apart
