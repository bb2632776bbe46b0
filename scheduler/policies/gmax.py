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
from scheduler.table import BEST_EFFORT, LATENCY, RUNNING, Bools, Floats, Ints

CHANCE_POWER = 2.0
"""The chance of being in time is that of running from now on without a pause, and whoever is
doubtful is paused more: it counts squared. 1 loses a twentieth of tokens and requests alike in
overload, to programs that are begun and not finished; 3 gains requests for tokens."""
BEST_EFFORT_WEIGHT = 0.05
"""Value of best-effort work against a stream of the same length in time."""
REQUEST_WEIGHT = 1.0
"""What a request that is met as a whole is worth beside its tokens, in requests of average
size: at 1 tokens and requests count alike. Streams give the fewest tokens per second of the
engine and take next to none of it: at 0 half of them are given up in overload for a twentieth
more tokens."""
LATE_FRACTION = 0.5
"""Work that is late already fills the batch up to here; each of it makes all steps longer."""
FITTING_LOAD = 0.8
"""Who earns most fits while the best together need no more of the engine than this, each evenly
over its time; who fits is served by the time to spare. Below 1, since the needs are forecasts
and more arrives; at 0.6 and at 1 up to 2 % fewer tokens and requests."""
STAYS_CHOSEN = 1.2
"""Who runs fits before another of up to so much more worth: what is chosen stays chosen."""
SLACK_SCALE_S = 10.0
"""Time to spare beyond which more of it changes little: one without any displaces one that has
2.3 s, and one with 10 s one that has 18. At 3 and 1 the same but for 1 to 3 % fewer streams."""
HOPELESS = 0.02
"""A chance below which nobody is served for having little time left."""
EXPIRED_WEIGHT = 0.02
"""Value of work that is late already: it is served, after everything that can make it."""
STARVATION_PER_FRAME = 0.002
"""delta: rise of the score per frame waited, in shares of the best that does not fit: in 500
frames anything is as good. In shares of an average stream's, which is less in an overload, 3 %
of the tokens and requests are lost at twice the capacity."""
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
    """Off: whoever is chosen runs the frame through, and no prompt goes first for its slack."""
    has_adaptive_batch: bool = True


class Gmax:
    """Ours: expected value per engine second, and as many at once as pays.

    Score = (objective value + what a met request is worth) x P(in time)^2 / engine seconds of
    the rest. The best that the engine has time for are served by the time to spare, least first,
    and the others after them by their score. A program counts as a whole: what it got, what runs
    and what is expected of it. What is late already waits while the batch is half full of what
    is not.

    Of the ranked requests the first n run, with n as in ``grouping``; a group
    of more alike contexts replaces them where the step-time model says it earns more.
    """

    source = "JITServe, section SLO-aware Scheduler with GMAX, changed where measured better"
    approximates = (
        "Departs from the paper: engine seconds in place of t_gen, expected value in place of an "
        "upper bound, a met request's own worth, batch size as a decision, and the group by "
        "modelled value per second"
    )

    def __init__(
        self,
        parts: GmaxParts | None = None,
        information: Information = Information.FORECAST,
    ) -> None:
        self._parts = parts or GmaxParts()
        self._batch_size = 0
        self._least_that_fits = 0.0
        self.tuner = CutoffTuner() if self._parts.has_grouping else None
        self.traits = Traits(
            displace=DisplaceRule.BETTER_SCORE,
            information=information,
            is_just_in_time=self._parts.has_jit,
            is_starvation_free=True,
            foresees=True,
            late_fraction=LATE_FRACTION,
            blends_fairness=True,
        )

    def assess(self, estimates: Estimates) -> Assessment:
        step_s = estimates.context.step_s
        plain = _plain_stream_score(estimates)
        bonus = _request_bonus(estimates)
        expected = estimates.pool_programs(estimates.expected(step_s, bonus), bonus)
        value = expected.full_value * expected.in_time_fraction**CHANCE_POWER
        late = estimates.is_expired
        value[late] = 0.0
        best_effort = estimates.rows.kind == BEST_EFFORT
        value[best_effort] *= BEST_EFFORT_WEIGHT
        if self._parts.has_gmax:
            scores = self._score(estimates, value, plain)
            fits = self._fits(estimates, expected, scores)
            scores, unit = _least_slack_first(expected.slack_s, fits, scores, plain)
        else:
            average, unit = estimates.context.average_tokens, plain
            scores = plain * average / np.maximum(estimates.mean_tokens, 1.0)
            scores[late] *= EXPIRED_WEIGHT
        rows = estimates.rows
        ahead = np.where(rows.state == RUNNING, HEAD_START_FRAMES, 0.0)
        waited = np.where(late, EXPIRED_WEIGHT, 1.0) * (rows.frames_waited + ahead)
        scores = scores + STARVATION_PER_FRAME * unit * waited
        return Assessment(scores, value, expected.in_time_fraction, expected.slack_s)

    def _fits(self, estimates: Estimates, expected: Expected, scores: Floats) -> Bools:
        """Who is to be in time: the best by worth that the engine has time for, if they can be."""
        runs = estimates.rows.state == RUNNING
        worth = np.where(runs, STAYS_CHOSEN * scores, scores)
        if estimates.context.is_whole:
            self._least_that_fits = _least_that_fits(estimates, worth)
        can_be = estimates.has_slo & ~estimates.is_expired
        can_be &= expected.in_time_fraction >= HOPELESS
        return can_be & (worth > self._least_that_fits)

    def _score(self, estimates: Estimates, value: Floats, plain: float) -> Floats:
        scores = value / estimates.engine_s
        # Shortest first among what is late, so that most of it ends soon.
        average = estimates.context.average_tokens
        late = EXPIRED_WEIGHT * plain * average / (average + estimates.mean_tokens)
        return np.where(estimates.has_slo, np.maximum(scores, late), scores)

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
        bonus = _request_bonus(estimates)
        beside_tokens = float(estimates.rows.context_tokens[beside].sum())
        weight = np.where(near.has_slo, 1.0, BEST_EFFORT_WEIGHT)
        weight /= near.mean_tokens + near.rows.generated_tokens

        def earned(size: int, step_s: float) -> float:
            """Value that a step of the first ``size`` gives."""
            expected = near.expected(step_s, bonus)
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


def _least_that_fits(estimates: Estimates, worth: Floats) -> float:
    """Worth that is too little to fit beside all that is worth more; 0 if everything fits."""
    order = np.argsort(-worth, kind="stable")
    beyond = np.cumsum(estimates.load_shares[order]) > FITTING_LOAD
    return float(worth[order[np.argmax(beyond)]]) if beyond.any() else 0.0


def _least_slack_first(
    slack_s: Floats, fits: Bools, scores: Floats, plain: float
) -> tuple[Floats, float]:
    """What fits by its time to spare, before what does not by its worth; and the unit of both.

    The unit is the score of the best that does not fit, ``plain`` where nothing is worth anything.
    """
    unit = float(scores[~fits].max(initial=0.0)) or plain
    first = unit * (1.0 + SLACK_SCALE_S / (SLACK_SCALE_S + np.maximum(slack_s, 0.0)))
    return np.where(fits, first, scores), unit


def _request_bonus(estimates: Estimates) -> float:
    """What a request that is met is worth beside its tokens."""
    input_tokens, output_tokens = estimates.context.average_request
    objective = estimates.context.objective
    worth = objective.answer_value(np.array([input_tokens]), np.array([output_tokens]))
    return REQUEST_WEIGHT * float(worth[0])


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
    calls = estimates.calls
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
