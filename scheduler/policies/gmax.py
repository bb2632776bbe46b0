"""GMAX: the length-homogeneous group of requests with the most margin goodput.

Algorithm 1 of the paper (section SLO-aware Scheduler with GMAX) in these readings, each
measured before it was taken:

* priority = expected goodput / remaining *engine seconds*: prefill takes the engine whole,
  a decode step is shared by the batch;
* tokens that can no longer be on time are worth nothing;
* a deadline counts with the probability that the answer fits, not all or nothing;
* divided by (1 + slack / 10 s): of equals, the one with less room goes first. A stream ahead
  of its timeline rests that way, and costs nothing while others take the steps;
* best-effort and expired work is worth little but never nothing, and rises a little in every
  frame it waits (delta of the paper), so nothing starves.
"""

from collections.abc import Sequence

from core.slo import LatencySlo
from scheduler.policies.base import PolicyContext
from scheduler.request import Request

SLACK_SCALE_S = 10.0
BEST_EFFORT_WEIGHT = 0.05
"""Value of a best-effort token against one that counts towards an SLO."""
EXPIRED_WEIGHT = 0.02
"""Value of a token of expired work: it is served, after everything that can make it."""
STARVATION_PER_FRAME = 0.002
"""Delta: rise of the score, in shares of a plain stream's, per frame waited."""
CUTOFF = 0.95
"""p: a candidate's score must reach this share of the last chosen one's."""
MAX_SCORE = 1e12


class Gmax:
    """Grouped margin goodput maximisation."""

    may_displace = True

    def scores(self, requests: Sequence[Request], context: PolicyContext) -> list[float]:
        unit = context.batch_size / context.step_s
        return [self._score(request, context, unit) for request in requests]

    def choose(
        self, ranked: Sequence[tuple[float, Request]], slots: int
    ) -> list[tuple[float, Request]]:
        """Of the requests near or above the last score that fits, the best window by length.

        Sorting by input length and sliding a window over it makes a group homogeneous
        (paper, Grouped Margin Goodput Maximization); ``CUTOFF`` bounds what that may cost.
        """
        if len(ranked) <= slots or slots <= 0:
            return list(ranked[: max(slots, 0)])
        floor = ranked[slots - 1][0] * CUTOFF
        candidates = [item for item in ranked if item[0] >= floor]
        if len(candidates) <= slots:
            return candidates[:slots]
        by_length = sorted(candidates, key=lambda item: (item[1].input_tokens, item[1].serial))
        window = sum(score for score, _ in by_length[:slots])
        best, best_start = window, 0
        for start in range(1, len(by_length) - slots + 1):
            window += by_length[start + slots - 1][0] - by_length[start - 1][0]
            if window > best * (1 + 1e-9):
                best, best_start = window, start
        group = by_length[best_start : best_start + slots]
        return sorted(group, key=lambda item: (-item[0], item[1].serial))

    def _score(self, request: Request, context: PolicyContext, unit: float) -> float:
        remaining = context.lengths.remaining_mean(request)
        prefill_s = context.step_time.prefill_s(request.prefill_tokens)
        engine_s = prefill_s + remaining / unit
        if request.is_expired(context.now_s):
            score = EXPIRED_WEIGHT * remaining / engine_s
        elif isinstance(request.terms.slo, LatencySlo):
            score = self._latency_value(request, request.terms.slo, context, remaining, prefill_s)
            score /= engine_s
        elif request.has_slo:
            score = self._deadline_value(request, context, remaining, prefill_s) / engine_s
        else:
            score = BEST_EFFORT_WEIGHT * remaining / engine_s
        score += STARVATION_PER_FRAME * request.frames_waited * unit
        return min(max(score, 0.0), MAX_SCORE)

    @staticmethod
    def _latency_value(
        request: Request,
        slo: LatencySlo,
        context: PolicyContext,
        remaining: float,
        prefill_s: float,
    ) -> float:
        """Expected tokens on time if it runs now, discounted by its slack."""
        step_s = context.step_s
        slack_s = request.next_due_s() - context.now_s - prefill_s - step_s
        if slack_s >= 0:
            return remaining / (1 + slack_s / SLACK_SCALE_S)
        gain_s = slo.target_tbt_s - step_s
        # Each token generated faster than its target wins back the difference.
        lost = -slack_s / gain_s if gain_s > 0 else remaining
        on_time = max(remaining - lost, 0.0)
        return max(on_time, EXPIRED_WEIGHT * remaining)

    @staticmethod
    def _deadline_value(
        request: Request, context: PolicyContext, remaining: float, prefill_s: float
    ) -> float:
        """(Input + output tokens) x P(complete in time), discounted by the slack."""
        budget_s = request.deadline_at_s - context.now_s - prefill_s
        fits = context.lengths.fits_fraction(request, budget_s / context.step_s)
        slack_s = max(budget_s - remaining * context.step_s, 0.0)
        tokens = request.context_tokens + remaining
        value = tokens * fits / (1 + slack_s / SLACK_SCALE_S)
        return max(value, EXPIRED_WEIGHT * remaining)
