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
from scheduler.table import BEST_EFFORT, COMPOUND, LATENCY, Bools, Floats, Ints, Rows, clip, passed

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

    @cached_property
    def step_s(self) -> float:
        """Expected seconds between two tokens in the coming frame: v_token of the paper."""
        return self.step_s_at(self.batch_size)

    def step_s_at(self, batch_size: int) -> float:
        """The same with so many requests: a step, and its share of the prompts in between."""
        return self.step_time.pace_s(batch_size, batch_size * self.mean_context_tokens)

    @cached_property
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


@dataclass(frozen=True)
class _Streams:
    """What of the streams does not depend on the step time. Shapes (streams,)."""

    index: Ints
    left_s: Floats
    """From when its next token could come until it is due."""
    full_value: Floats


@dataclass(frozen=True)
class _Answers:
    """What of the answers that count whole does not depend on the step time. Shapes (answers,).

    Of what comes after a program's call: 0 for all others.
    """

    index: Ints
    left_s: Floats
    """From when its next token could come until all of it is due."""
    stage_tokens: Floats
    """Tokens to generate one after the other, after it."""
    prefill_s: Floats
    """Engine seconds of the prompts after it."""
    tool_s: Floats
    unsure: Ints
    """Places, among these, of those after which something not certain is to come."""
    spread_tokens: Floats
    """Standard deviation of all that is to come, shape (unsure,)."""
    full_value: Floats


def _below(deviations: Floats) -> Floats:
    """P(a standard normal is below), to a hundredth: the logistic curve of that scale."""
    share: Floats = 1.0 / (1.0 + np.exp(clip(-1.702 * deviations, -50.0, 50.0)))
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
        self.engine_s: Floats = clip(
            self.prefill_s + self.mean_tokens * self.token_s, MIN_ENGINE_S, MAX_S
        )
        """Engine seconds that the rest of it takes."""

    @cached_property
    def calls(self) -> Ints:
        """Places of the calls of programs."""
        places: Ints = ((self.rows.kind == COMPOUND) & (self.rows.program >= 0)).nonzero()[0]
        return places

    @cached_property
    def load_shares(self) -> Floats:
        """Share of the engine that each needs from now on to be in time, in 0 to 1.

        Engine seconds of the rest if its answer is as long as its bound, over the time that is
        left for it; of a program's call with its share of what is foreseen of the program. A
        stream's prompt is over the time until its first token. What is late or best effort needs
        none.
        """
        rows, now_s = self.rows, self.context.now_s
        work_s = self.prefill_s + self.bound_tokens * self.token_s + self._foreseen_s
        is_stream = rows.kind == LATENCY
        left_s = rows.due_s - now_s
        first = is_stream & (left_s > self.prefill_s)
        prompt_s = np.where(first, self.prefill_s, 0.0)
        prompt_share = prompt_s / np.where(first, left_s, 1.0)
        left_s = left_s + np.where(is_stream, (self.mean_tokens - 1) * rows.tbt_s, 0.0)
        share = np.minimum((work_s - prompt_s) / np.maximum(left_s, MIN_ENGINE_S), 1.0)
        return np.where(self.has_slo & (left_s > 0), np.minimum(share + prompt_share, 1.0), 0.0)

    @property
    def _foreseen_s(self) -> Floats:
        """Engine seconds of what is to come of a program, shared by its live calls."""
        found, calls = np.zeros(self.rows.size), self.calls
        if calls.size:
            program = self.rows.program[calls]
            live = np.bincount(program, minlength=self.context.programs.num_indices)
            token_s = float(self.token_s[calls].mean())
            _, _, _, prefill_s, _ = self.context.step_time.coefficients
            column = self.context.programs.column
            rest_s = column("future_out") * token_s + column("future_new") * prefill_s
            found[calls] = rest_s[program] / live[program]
        return found

    def take(self, index: Ints) -> Estimates:
        """The estimates of the rows at ``index``."""
        return Estimates(self.rows.take(index), self.context, self._information)

    @cached_property
    def has_slo(self) -> Bools:
        has: Bools = self.rows.kind != BEST_EFFORT
        return has

    @cached_property
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
        return clip(rows.due_s + ahead_s - self.context.now_s, -MAX_S, MAX_S)

    @property
    def bandwidth(self) -> Floats:
        """bw: share of one batch slot's tokens that it needs from now on, in 0 to 1.

        t_gen / t_rem; of a stream step time / TBT; nothing for best-effort.
        """
        rows, step_s = self.rows, self.context.step_s
        share = self.generation_s / np.maximum(self._stage_left_s(), MIN_ENGINE_S)
        stream = step_s / np.maximum(rows.tbt_s, MIN_ENGINE_S)
        share = np.where(rows.kind == LATENCY, stream, share)
        needed: Floats = np.where(rows.kind == BEST_EFFORT, 0.0, clip(share, 0.0, 1.0))
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
        stream = np.floor(clip(due, 0, most)) + 1
        needed = np.where(rows.kind == LATENCY, stream, np.ceil(self.bandwidth * most))
        return clip(needed, 1, most)

    def expected(self, step_s: float, bonus: float = 0.0) -> Expected:
        """Value, chance and slack if a decode step takes ``step_s`` from now on.

        Args:
            bonus: value of a request that is met as a whole, beside that of its tokens; at most
                ``MOST_BONUS`` times as much, lest many little ones outweigh all that is large.
        """
        size = self.rows.size
        out = Expected(full := np.zeros(size), np.ones(size), np.full(size, MAX_S), full)
        if self._streams.index.size:
            self._expect_streams(step_s, bonus, out)
        if self._answers.index.size:
            self._expect_answers(step_s, bonus, out)
        rest = (self.rows.kind == BEST_EFFORT).nonzero()[0]
        if rest.size:
            mean = self.mean_tokens[rest]
            full[rest] = self.context.objective.stream_value(mean, mean)
        return out

    @cached_property
    def _streams(self) -> _Streams:
        rows = self.rows
        index = (rows.kind == LATENCY).nonzero()[0]
        mean = self.mean_tokens[index]
        return _Streams(
            index=index,
            left_s=rows.due_s[index] - self.context.now_s - self.wait_s[index],
            full_value=self.context.objective.stream_value(mean, mean),
        )

    def _expect_streams(self, step_s: float, bonus: float, out: Expected) -> None:
        """Fill in those of the streams."""
        rows, streams = self.rows, self._streams
        index = streams.index
        mean, was_late = self.mean_tokens[index], rows.was_late[index]
        slack = streams.left_s - step_s
        loss_s = step_s - rows.tbt_s[index]
        pace_s = np.maximum(np.abs(loss_s), MIN_ENGINE_S)
        # In time now: until the slack is used up. Behind: from when the lead is won back.
        ahead = np.where(loss_s <= 0, mean, np.minimum(mean, slack / pace_s + 1))
        behind = np.where(loss_s < 0, np.maximum(mean + slack / pace_s, 0.0), 0.0)
        in_time = np.where(slack >= 0, ahead, behind)
        is_whole = (in_time >= mean) & ~was_late
        more = np.minimum(streams.full_value * MOST_BONUS, bonus)
        full = streams.full_value + more
        # What was late is one more token of all of them: an objective may ask for every one.
        worth = self.context.objective.stream_value(in_time, mean + was_late)
        worth = worth + np.where(is_whole, more, 0.0)
        out.full_value[index] = full
        out.in_time_fraction[index] = np.where(full > 0, worth / np.maximum(full, 1e-300), 0.0)
        out.slack_s[index] = clip(slack, -MAX_S, MAX_S)

    @cached_property
    def _answers(self) -> _Answers:
        rows, programs = self.rows, self.context.programs
        index = ((rows.kind != LATENCY) & (rows.kind != BEST_EFFORT)).nonzero()[0]
        mean = self.mean_tokens[index]
        stage_tokens, other_s, tool_s, spread = np.zeros((4, index.size))
        calls = (rows.program[index] >= 0).nonzero()[0]
        if calls.size:
            program = rows.program[index[calls]]
            average = self.context.average_tokens
            stages = programs.stages_to_come[program]
            _, _, _, prefill_s, _ = self.context.step_time.coefficients
            stage_tokens[calls] = programs.column("future_stage")[program] + stages * average
            other_s[calls] = programs.column("future_new")[program] * prefill_s
            tool_s[calls] = programs.column("future_tool_s")[program]
            known = programs.column("future_spread")[program]
            spread[calls] = np.hypot(known, np.sqrt(stages) * average)
        unsure = (spread > 0).nonzero()[0]
        output = rows.generated_tokens[index] + mean
        return _Answers(
            index=index,
            left_s=rows.due_s[index] - self.context.now_s - self.wait_s[index],
            stage_tokens=stage_tokens,
            prefill_s=other_s,
            tool_s=tool_s,
            unsure=unsure,
            # What is to come after it is no more certain than the call's own length.
            spread_tokens=np.hypot(spread[unsure], self._remaining.spread_tokens[index[unsure]]),
            full_value=self.context.objective.answer_value(rows.input_tokens[index], output),
        )

    def _expect_answers(self, step_s: float, bonus: float, out: Expected) -> None:
        """Fill in those of what counts whole."""
        answers = self._answers
        index, unsure = answers.index, answers.unsure
        mean = self.mean_tokens[index]
        later_s = answers.stage_tokens * step_s + answers.prefill_s + answers.tool_s
        budget = answers.left_s - later_s
        fits = self._remaining.fits_fraction(budget / step_s, index)
        if unsure.size:
            left = budget[unsure]
            likely = _below((left / step_s - mean[unsure]) / answers.spread_tokens)
            fits[unsure] = np.where(left + later_s[unsure] >= step_s, likely, 0.0)
        out.in_time_fraction[index] = fits
        out.slack_s[index] = clip(budget - mean * step_s, -MAX_S, MAX_S)
        full = answers.full_value
        out.full_value[index] = full + np.minimum(full * MOST_BONUS, bonus)

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
            sums = np.bincount(program, weights=values, minlength=size)
            return sums.astype(np.float64, copy=False)

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
