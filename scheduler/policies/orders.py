"""Baselines: each an order over the queue, on the same interfaces as ours."""

import math

import numpy as np

from scheduler.cutoff import CutoffTuner
from scheduler.estimates import Estimates
from scheduler.policies.base import (
    Assessment,
    DisplaceRule,
    PrefillRule,
    Traits,
    arrival_order,
)
from scheduler.table import Floats, Ints


class _TopOfOrder:
    """Runs the top of its order; nothing is grouped."""

    tuner: CutoffTuner | None = None

    def group(
        self, ranked: Ints, scores: Floats, estimates: Estimates, slots: int, beside: Ints
    ) -> Ints:
        return ranked[:slots]


def _order(scores: Floats, *, is_strict: bool = False) -> Assessment:
    return Assessment(scores, np.zeros_like(scores), is_strict=is_strict)


class FirstComeFirstServed(_TopOfOrder):
    """Arrival order; nobody is displaced."""

    source = "vLLM (Kwon et al., SOSP 2023), FCFS continuous batching"
    approximates = "Prompts may pause decoding for max_decode_pause_s only, not without bound"
    traits = Traits(displace=DisplaceRule.NEVER)

    def assess(self, estimates: Estimates) -> Assessment:
        return _order(arrival_order(estimates.rows.serial))


class Sarathi(FirstComeFirstServed):
    """Arrival order; decoding first, prompts in chunks between decode steps."""

    source = "Sarathi-Serve (Agrawal et al., OSDI 2024), stall-free batching"
    approximates = (
        "A chunk runs between two decode steps, not in the same batch, unless the engine mixes "
        "them (--enable-mixed-chunk)"
    )
    traits = Traits(displace=DisplaceRule.NEVER, prefill=PrefillRule.STALL_FREE)


class EarliestDeadlineFirst(_TopOfOrder):
    """The earliest due time first: the next token's, or the whole answer's."""

    source = "Earliest deadline first (Liu and Layland, 1973); the paper's appendix"
    approximates = "Displaces at frame boundaries only"
    traits = Traits()

    def assess(self, estimates: Estimates) -> Assessment:
        return _order(estimates.context.now_s - estimates.rows.due_s, is_strict=True)


class ShortestJobFirst(_TopOfOrder):
    """The shortest expected remaining answer first. Nobody is displaced."""

    source = "Shortest job first; the paper's appendix"
    approximates = "Job length is the forecast's mean, prefill not counted"
    traits = Traits(displace=DisplaceRule.NEVER)

    def assess(self, estimates: Estimates) -> Assessment:
        return _order(-estimates.mean_tokens)


class Priority(_TopOfOrder):
    """The sender's priority, higher first, as SGLang and vLLM order by it."""

    source = "Priority scheduling of SGLang (higher value first) and vLLM"
    approximates = "Displaces at frame boundaries only; a lower priority starves, as there"
    traits = Traits(displace=DisplaceRule.BETTER_SCORE)

    def assess(self, estimates: Estimates) -> Assessment:
        return _order(estimates.rows.priority.copy(), is_strict=True)


class LearningToRank(_TopOfOrder):
    """Shortest forecast first, and what was passed over for long goes before all."""

    source = "LTR (Fu et al., Efficient LLM Scheduling by Learning to Rank, NeurIPS 2024)"
    approximates = (
        "Ranks by the total length that the shared forecast expects in place of a ranker of its "
        "own; starvation is counted in frames, and a promoted request keeps its promotion"
    )
    traits = Traits()
    PROMOTE_AFTER_FRAMES = 100.0

    def assess(self, estimates: Estimates) -> Assessment:
        rows = estimates.rows
        rank = -(rows.generated_tokens + estimates.mean_tokens)
        promoted = rows.frames_waited >= self.PROMOTE_AFTER_FRAMES
        return _order(np.where(promoted, 1e12 - rows.serial, rank), is_strict=True)


class LeastAttainedService(_TopOfOrder):
    """Programs that have been served least go first, in levels; arrival order within one."""

    source = "Autellix (Luo et al., 2025), PLAS with discretised queues"
    approximates = (
        "Service is counted in tokens (input and output), not in seconds; a request without a "
        "program is a program of its own; a call enters at its program's level and sinks with it"
    )
    traits = Traits()
    FIRST_LEVEL_TOKENS = 256.0
    NUM_LEVELS = 8
    PROMOTE_AFTER_FRAMES = 200.0
    """Anti-starvation: so many frames of waiting, and more than it was served, bring it back to
    the first level."""

    def assess(self, estimates: Estimates) -> Assessment:
        rows = estimates.rows
        own = np.where(rows.state == 0, 0.0, rows.context_tokens)
        service = estimates.context.programs.column("service")
        is_call = rows.program >= 0
        attained = np.where(is_call, service[np.maximum(rows.program, 0)], own)
        level = np.ceil(np.log2(np.maximum(attained / self.FIRST_LEVEL_TOKENS, 1.0)))
        level = np.minimum(level, self.NUM_LEVELS - 1)
        served_frames = attained / estimates.context.frame_steps
        is_starved = rows.frames_waited >= np.maximum(self.PROMOTE_AFTER_FRAMES, served_frames)
        level = np.where(is_starved, 0.0, level)
        return _order(-level * math.ldexp(1, 50) - rows.serial, is_strict=True)


class VirtualTokenCounter(_TopOfOrder):
    """The tenant that has been served least goes first; arrival order within one."""

    source = "VTC (Sheng et al., Fairness in Serving Large Language Models, OSDI 2024)"
    approximates = "Nobody who runs is displaced; counters advance as tokens come"
    traits = Traits(displace=DisplaceRule.NEVER)

    def assess(self, estimates: Estimates) -> Assessment:
        rows, service = estimates.rows, estimates.context.tenant_service
        attained = np.zeros(rows.size) if service is None else service[rows.tenant]
        # Whole tokens, so that arrival order decides between tenants that are level.
        return _order(-np.floor(attained), is_strict=True)
