"""What the scheduler estimates of each request in a frame, all at once.

The names are those of the paper (section SLO-aware Scheduler with GMAX): t_gen is
``generation_s``, t_rem is ``left_s``, v_token is the step time. ``docs/metrics.md`` has the
formulas. Every array is of shape (n,), aligned to the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from scheduler.lengths import Information, Remaining
from scheduler.objective import GoodputObjective
from scheduler.programs import Programs
from scheduler.step_time import StepTimeModel
from scheduler.table import BEST_EFFORT, COMPOUND, LATENCY, Bools, Floats, Ints, Rows, passed

MIN_ENGINE_S = 1e-9
MOST_BONUS = 10.0
"""What a met request is worth beside its tokens is at most so many times theirs."""
MAX_S = 1e12


@dataclass(frozen=True)
class FrameContext:
    """What is the same for all requests of a frame."""

    now_s: float
    step_time: StepTimeModel
    objective: GoodputObjective
    programs: Programs
    batch_size: int
    """Requests expected to run together."""
    mean_context_tokens: float
    """Of the requests that are likely to."""
    frame_steps: int
    frame_s: float
    average_tokens: float = 256.0
    """Mean output tokens of all finished answers."""
    average_request: tuple[float, float] = (0.0, 256.0)
    """Mean input and output tokens that count of a request, all calls of a program together."""
    foreseen_kv_tokens: float = 0.0
    """Input of calls that are expected in this frame and have not arrived."""
    is_whole: bool = True
    """Whether the rows are all that is live, and their load that of the engine."""
    tenant_service: Floats | None = None
    """Attained service by tenant index."""

    @property
    def step_s(self) -> float:
        """Expected seconds between two tokens in the coming frame: v_token of the paper."""
        return self.step_s_at(self.batch_size)

    def step_s_at(self, batch_size: int) -> float:
        """The same with so many requests: a step, and its share of the prompts in between."""
        return self.step_time.pace_s(batch_size, batch_size * self.mean_context_tokens)

    @property
    def frame_tokens(self) -> int:
        """Steps of the coming frame: tokens that a request can get in it."""
        by_time = self.frame_s / self.step_s
        return max(1, min(self.frame_steps, int(min(by_time, 1e6))))


@dataclass(frozen=True)
class Expected:
    """What requests are worth if they run from now on at one step time."""

    full_value: Floats
    """Objective value if all of it is in time."""
    in_time_fraction: Floats
    """Expected share of it: P(complete in time), or the share of a stream's tokens."""
    slack_s: Floats
    """Time to spare before it falls behind; negative: behind already."""
    whole_value: Floats
    """``full_value``; of a program's call that of the whole program."""


def _below(deviations: Floats) -> Floats:
    """P(a standard normal is below), to a hundredth: the logistic curve of that scale."""
    share: Floats = 1.0 / (1.0 + np.exp(np.clip(-1.702 * deviations, -50.0, 50.0)))
    return share


class Estimates:
    """Lengths, times, bandwidths and values of some rows in one frame."""

    def __init__(self, rows: Rows, context: FrameContext, information: Information) -> None:
        self.rows = rows
        self.context = context
        self._information = information
        self._remaining = Remaining(rows, information, context.average_tokens)
        self.mean_tokens: Floats = self._remaining.mean_tokens
        self.bound_tokens: Floats = self._remaining.bound_tokens
        constant_s, decode_s, context_s, prefill_s, _ = context.step_time.coefficients
        self.prefill_s: Floats = np.where(rows.holds_kv, 0.0, rows.context_tokens * prefill_s)
        """Engine seconds before its next token can be decoded."""
        step_s = context.step_time.step_s(
            context.batch_size, context.batch_size * context.mean_context_tokens
        )
        token_s = context.step_time.prompt_token_s(step_s)
        self.wait_s: Floats = np.where(rows.holds_kv, 0.0, rows.context_tokens * token_s)
        """Seconds that pass before its next token can be decoded, if it is admitted now."""
        shared_s = constant_s / max(context.batch_size, 1) + decode_s
        self.token_s: Floats = shared_s + context_s * (rows.context_tokens + self.mean_tokens / 2)
        """Engine seconds of one of its tokens: its own and its share of the step's constant."""
        self.engine_s: Floats = np.clip(
            self.prefill_s + self.mean_tokens * self.token_s, MIN_ENGINE_S, MAX_S
        )
        """Engine seconds that the rest of it takes."""

    @cached_property
    def calls(self) -> Ints:
        """Places of the calls of programs."""
        return np.flatnonzero((self.rows.kind == COMPOUND) & (self.rows.program >= 0))

    @property
    def load(self) -> float:
        """Share of the engine that all of it needs from now on to be in time; above 1: too much.

        Engine seconds of the rest over the time that is left for it, of a program's call with
        its share of what is foreseen of the program. What is late or best effort needs none.
        """
        rows = self.rows
        work_s, calls = self.engine_s.copy(), self.calls
        if calls.size:
            program = rows.program[calls]
            live = np.bincount(program, minlength=self.context.programs.num_indices)
            token_s = float(self.token_s[calls].mean())
            _, _, _, prefill_s, _ = self.context.step_time.coefficients
            column = self.context.programs.column
            rest_s = column("future_out") * token_s + column("future_new") * prefill_s
            work_s[calls] += rest_s[program] / live[program]
        ahead_s = np.where(rows.kind == LATENCY, (self.mean_tokens - 1) * rows.tbt_s, 0.0)
        left_s = rows.due_s + ahead_s - self.context.now_s
        counts = self.has_slo & (left_s > 0)
        return float((work_s[counts] / np.maximum(left_s[counts], work_s[counts])).sum())

    def take(self, index: Ints) -> Estimates:
        """The estimates of the rows at ``index``."""
        return Estimates(self.rows.take(index), self.context, self._information)

    @property
    def has_slo(self) -> Bools:
        has: Bools = self.rows.kind != BEST_EFFORT
        return has

    @property
    def is_expired(self) -> Bools:
        """Its deadline has passed, so nothing of it can count any more."""
        return passed(self.rows.kind, self.rows.due_s, self.context.now_s)

    @property
    def generation_s(self) -> Floats:
        """t_gen: upper bound of the remaining length at the coming step time."""
        return np.minimum(self.bound_tokens * self.context.step_s, MAX_S)

    @property
    def left_s(self) -> Floats:
        """t_rem: until the deadline; of a stream until its last expected token is due."""
        rows = self.rows
        ahead_s = np.where(rows.kind == LATENCY, (self.bound_tokens - 1) * rows.tbt_s, 0.0)
        left_s: Floats = np.clip(rows.due_s + ahead_s - self.context.now_s, -MAX_S, MAX_S)
        return left_s

    @property
    def bandwidth(self) -> Floats:
        """bw: share of one batch slot's tokens that it needs from now on, in 0 to 1.

        t_gen / t_rem; of a stream step time / TBT; nothing for best-effort.
        """
        rows, step_s = self.rows, self.context.step_s
        share = self.generation_s / np.maximum(self._stage_left_s(), MIN_ENGINE_S)
        stream = step_s / np.maximum(rows.tbt_s, MIN_ENGINE_S)
        share = np.where(rows.kind == LATENCY, stream, share)
        needed: Floats = np.where(rows.kind == BEST_EFFORT, 0.0, np.clip(share, 0.0, 1.0))
        return needed

    def _stage_left_s(self) -> Floats:
        """``left_s``; of a program's call until its stage is due, while that is to come."""
        rows, left_s, calls = self.rows, self.left_s, self.calls
        if calls.size:
            due_s = self.context.programs.column("stage_due_s")[rows.program[calls]]
            stage_s = due_s - self.context.now_s
            own_s = left_s[calls]
            left_s[calls] = np.where(stage_s > 0, np.minimum(stage_s, own_s), own_s)
        return left_s

    @property
    def frame_tokens(self) -> Floats:
        """bw_delta: tokens that it must get in this frame to stay in time, at least one.

        A stream needs those that fall due before the frame ends: none of them early.
        """
        rows, most = self.rows, self.context.frame_tokens
        length_s = min(self.context.frame_s, most * self.context.step_s)
        due = (self.context.now_s + length_s - rows.due_s) / np.maximum(rows.tbt_s, MIN_ENGINE_S)
        stream = np.floor(np.clip(due, 0, most)) + 1
        needed = np.where(rows.kind == LATENCY, stream, np.ceil(self.bandwidth * most))
        return np.clip(needed, 1, most)

    def expected(self, step_s: float, bonus: float = 0.0) -> Expected:
        """Value, chance and slack if a decode step takes ``step_s`` from now on.

        Args:
            bonus: value of a request that is met as a whole, beside that of its tokens; at most
                ``MOST_BONUS`` times as much, lest many little ones outweigh all that is large.
        """
        rows, kind = self.rows, self.rows.kind
        full = np.zeros(rows.size)
        fraction = np.ones(rows.size)
        slack_s = np.full(rows.size, MAX_S)
        streams = np.flatnonzero(kind == LATENCY)
        if streams.size:
            self._expect_streams(streams, step_s, bonus, full, fraction, slack_s)
        others = np.flatnonzero((kind != LATENCY) & (kind != BEST_EFFORT))
        if others.size:
            self._expect_answers(others, step_s, full, fraction, slack_s)
            full[others] += np.minimum(full[others] * MOST_BONUS, bonus)
        rest = np.flatnonzero(kind == BEST_EFFORT)
        if rest.size:
            mean = self.mean_tokens[rest]
            full[rest] = self.context.objective.stream_value(mean, mean)
        return Expected(full, fraction, slack_s, full)

    def _expect_streams(
        self,
        index: Ints,
        step_s: float,
        bonus: float,
        full: Floats,
        fraction: Floats,
        slack_s: Floats,
    ) -> None:
        rows, mean = self.rows, self.mean_tokens[index]
        slack = rows.due_s[index] - self.context.now_s - self.wait_s[index] - step_s
        loss_s = step_s - rows.tbt_s[index]
        pace_s = np.maximum(np.abs(loss_s), MIN_ENGINE_S)
        # In time now: until the slack is used up. Behind: from when the lead is won back.
        ahead = np.where(loss_s <= 0, mean, np.minimum(mean, slack / pace_s + 1))
        behind = np.where(loss_s < 0, np.maximum(mean + slack / pace_s, 0.0), 0.0)
        in_time = np.where(slack >= 0, ahead, behind)
        objective = self.context.objective
        is_whole = (in_time >= mean) & ~rows.was_late[index]
        tokens_value = objective.stream_value(mean, mean)
        more = np.minimum(tokens_value * MOST_BONUS, bonus)
        full[index] = tokens_value + more
        # What was late is one more token of all of them: an objective may ask for every one.
        worth = objective.stream_value(in_time, mean + rows.was_late[index])
        worth = worth + np.where(is_whole, more, 0.0)
        fraction[index] = np.where(full[index] > 0, worth / np.maximum(full[index], 1e-300), 0.0)
        slack_s[index] = np.clip(slack, -MAX_S, MAX_S)

    def _expect_answers(
        self, index: Ints, step_s: float, full: Floats, fraction: Floats, slack_s: Floats
    ) -> None:
        rows, mean = self.rows, self.mean_tokens[index]
        programs = self.context.programs
        is_call = rows.program[index] >= 0
        later_s = np.zeros(index.size)
        spread = np.zeros(index.size)
        if is_call.any():
            program = np.maximum(rows.program[index], 0)
            average = self.context.average_tokens
            stages = programs.stages_to_come
            _, _, _, prefill_s, _ = self.context.step_time.coefficients
            later_s = (programs.column("future_stage") + stages * average) * step_s
            later_s = later_s + programs.column("future_new") * prefill_s
            later_s = (later_s + programs.column("future_tool_s"))[program]
            later_s = np.where(is_call, later_s, 0.0)
            spread = np.hypot(programs.column("future_spread"), np.sqrt(stages) * average)
            spread = np.where(is_call, spread[program], 0.0)
        budget = rows.due_s[index] - self.context.now_s - self.wait_s[index] - later_s
        fits = self._remaining.fits_fraction(budget / step_s, index)
        unsure = np.flatnonzero(spread > 0)
        if unsure.size:
            # What is to come after it is no more certain than the call's own length.
            call_spread = self._remaining.spread_tokens[index[unsure]]
            deviation = np.hypot(spread[unsure], call_spread)
            likely = _below((budget[unsure] / step_s - mean[unsure]) / deviation)
            has_time = (budget + later_s)[unsure] >= step_s
            fits[unsure] = np.where(has_time, likely, 0.0)
        fraction[index] = fits
        slack_s[index] = np.clip(budget - mean * step_s, -MAX_S, MAX_S)
        output = rows.generated_tokens[index] + mean
        full[index] = self.context.objective.answer_value(rows.input_tokens[index], output)

    def pool_programs(self, expected: Expected, bonus: float = 0.0) -> Expected:
        """Calls of one program count as one: its whole value over all its engine seconds.

        Completing a single call does not advance the stage, so every live call of a program
        gets the program's value density and the chance of its unlikeliest call. Slack is each
        call's own, up to the program's deadline: a stage's sub-deadline in its place costs
        goodput. What earlier calls gave counts, and what a pattern match still expects; without
        a match, as much for each stage still to come as the stages so far have had on average.
        """
        rows, programs, calls = self.rows, self.context.programs, self.calls
        if not calls.size:
            return expected
        program, size = rows.program[calls], programs.num_indices

        def total(values: Floats) -> Floats:
            sums: Floats = np.bincount(program, weights=values, minlength=size).astype(np.float64)
            return sums

        output = rows.generated_tokens[calls] + self.mean_tokens[calls]
        live_in, live_out = total(rows.input_tokens[calls]), total(output)
        done_in, done_out = programs.column("done_in"), programs.column("done_out")
        to_come = programs.stages_to_come / np.maximum(programs.column("stages"), 1.0)
        future_in = programs.column("future_in") + (live_in + done_in) * to_come
        future_out = programs.column("future_out") + (live_out + done_out) * to_come
        # While nothing tells its end, a program is at best half done: else one that goes on
        # for ever would be worth more than everybody with its every call.
        is_open = programs.column("is_open") > 0
        done_in = np.where(is_open, np.minimum(done_in, live_in + future_in), done_in)
        done_out = np.where(is_open, np.minimum(done_out, live_out + future_out), done_out)
        inputs, outputs = live_in + future_in + done_in, live_out + future_out + done_out
        worth = self.context.objective.answer_value(inputs, outputs)
        worth = worth + np.minimum(worth * MOST_BONUS, bonus)
        _, _, _, prefill_s, _ = self.context.step_time.coefficients
        typical_s = float(self.token_s[calls].mean())
        # What is known of the cache is known of what a match expects alone.
        cached = programs.column("future_in") - programs.column("future_new")
        future_s = np.maximum(future_in - cached, 0.0) * prefill_s + future_out * typical_s
        density = worth / np.maximum(total(self.engine_s[calls]) + future_s, MIN_ENGINE_S)
        chance = np.ones(size)
        np.minimum.at(chance, program, expected.in_time_fraction[calls])
        full, fraction = expected.full_value.copy(), expected.in_time_fraction.copy()
        whole = expected.full_value.copy()
        whole[calls] = worth[program]
        full[calls] = density[program] * self.engine_s[calls]
        fraction[calls] = chance[program]
        return Expected(full, fraction, expected.slack_s, whole)
