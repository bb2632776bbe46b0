"""One simulated engine under a frame manager: the other side of what the SGLang adapter does.

Each pass ticks the manager, carries out its plan, and begins a step; when the step is over its
tokens are reported. Everything that decides is the manager; here is only what an engine does.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from core.clock import Clock
from engine.simulator.job import Job
from engine.simulator.kv import KvPool
from engine.simulator.lanes import Ints, Lanes
from engine.simulator.outcome import EngineCounts
from engine.simulator.shape import EngineShape
from engine.simulator.steps import Step, StepTime
from engine.simulator.workload import SimCall
from scheduler.frame import FrameManager
from scheduler.lifecycle import RequestState
from scheduler.plan import EngineCapacity, FramePlan
from scheduler.step_time import StepObservation

_NOBODY: Ints = np.zeros(0, dtype=np.int64)


class Ended(NamedTuple):
    """A call is over."""

    job: Job
    state: RequestState
    reason: str | None


class Replica:
    """The engine's batch, prompts, KV and counts.

    Args:
        wall: times plans, for figures that are not part of the outcome; None: nobody asks.
    """

    def __init__(
        self,
        index: int,
        shape: EngineShape,
        steps: StepTime,
        frames: FrameManager,
        wall: Clock | None = None,
    ) -> None:
        self.index = index
        self.frames = frames
        self._shape = shape
        self._steps = steps
        self._wall = wall
        self.plan_s: list[float] = []
        self.lanes = Lanes()
        self._pool = KvPool(shape.kv_tokens, has_cache=shape.has_prefix_cache)
        self._jobs: dict[str, Job] = {}
        self._decoding: dict[str, Job] = {}
        """In the batch, with a token to generate in each step."""
        self._prompts: deque[Job] = deque()
        """Admitted, their prompts not computed yet; the first may be partly."""
        self._parked: dict[str, Job] = {}
        self._admissions: tuple[str, ...] = ()
        self._num_run = shape.max_batch
        self._batch: Ints | None = None
        """Lanes of ``_decoding``; None: to be made again."""
        self._was_prefill = False
        self._step: _Running | None = None
        self._began_s = 0.0
        """When ``_step`` did."""
        self._counts = dict.fromkeys(_COUNTED, 0)
        self._busy_s = 0.0

    # From outside.

    @property
    def is_busy(self) -> bool:
        """A step is under way."""
        return self._step is not None

    @property
    def num_live(self) -> int:
        return len(self._jobs)

    @property
    def num_decoding(self) -> int:
        return len(self._decoding)

    def can_hold(self, call: SimCall) -> bool:
        """Whether a call fits where it is alone."""
        return call.input_tokens + call.output_tokens <= self._shape.kv_tokens

    def arrive(self, job: Job) -> None:
        """A call is here."""
        job.replica = self.index
        self._jobs[job.key] = job
        job.request = self.frames.arrive(
            job.key,
            job.terms,
            input_tokens=job.call.input_tokens,
            max_output_tokens=job.call.max_output_tokens,
            known_output_tokens=job.call.output_tokens,
        )

    def capacity(self) -> EngineCapacity:
        """What is left, as the manager asks for it."""
        held = len(self._decoding) + len(self._prompts) + len(self._parked)
        return EngineCapacity(
            max_batch=self._shape.max_batch,
            free_kv_tokens=self._pool.available_tokens,
            total_kv_tokens=self._shape.kv_tokens,
            free_slots=self._shape.num_slots - held,
            swap_token_s=self._shape.swap_token_s,
        )

    def begin(self, now_s: float, ended: list[Ended]) -> float | None:
        """Plan and begin a step; when it will be over. None: nothing can run.

        Args:
            ended: whom the plan ended is appended.
        """
        began_s = 0.0 if self._wall is None else self._wall.now_s()
        plan = self.frames.tick(now_s, self.capacity())
        if plan is not None:
            self._counts["plans"] += 1
            if self._wall is not None:
                self.plan_s.append(self._wall.now_s() - began_s)
            self._carry_out(plan, ended)
        step = self._next_step(now_s)
        if step is None and self._resume_best(now_s):
            step = self._next_step(now_s)
        if step is None:
            return None
        self._step, self._began_s = step, now_s
        return now_s + step.duration_s

    def finish(self, now_s: float, ended: list[Ended]) -> None:
        """The step is over: report what it gave."""
        running, self._step = self._step, None
        assert running is not None, "no step is under way"
        self._busy_s += running.duration_s
        self._counts["steps"] += 1
        self._counts["prefill_tokens"] += running.step.prefill_tokens
        self._observe(running)
        emitted = list(running.decoded)
        done: list[Job] = []
        if running.lanes.size:
            finished = self.lanes.step(running.lanes, now_s)
            done = [job for lane in finished.tolist() if (job := self.lanes.jobs[lane])]
            self._counts["decode_tokens"] += len(emitted)
            self._counts["decode_steps"] += 1
        for job in running.computed:
            if self._first_token(job, now_s):
                done.append(job)
            emitted.append(job)
        self.frames.stepped([job.request for job in emitted if job.request is not None])
        for job in done:
            self._end(job, RequestState.FINISHED, None, ended)

    def counts(self) -> EngineCounts:
        """What it has done so far, in steps that are over."""
        counts = self._counts
        return EngineCounts(
            steps=counts["steps"],
            busy_s=self._busy_s,
            decode_tokens=counts["decode_tokens"],
            prefill_tokens=counts["prefill_tokens"],
            cached_tokens=counts["cached_tokens"],
            preemptions=self.frames.num_preemptions,
            parks=self.frames.num_parks,
            plans=counts["plans"],
            mean_running=counts["decode_tokens"] / max(counts["decode_steps"], 1),
        )

    def places(self) -> int:
        """How many more calls would find a place in the batch."""
        return max(self._shape.max_batch - len(self._jobs), 0)

    def progress(self) -> list[tuple[Job, int]]:
        """Calls that decode and the tokens that each has."""
        jobs = list(self._decoding.values())
        return list(zip(jobs, self.lanes.generated[self._lanes()].tolist(), strict=True))

    def close(self, now_s: float) -> list[Job]:
        """The simulation is over: the calls that have not ended, with their figures.

        Final: nothing can run here afterwards. Of a step under way only its time up to now
        counts.
        """
        if self._step is not None:
            # At most what there was: a sum of durations is not exact.
            self._busy_s = min(self._busy_s + now_s - self._began_s, now_s)
        for job in self._jobs.values():
            if job.lane >= 0:
                self.lanes.leave(job)
        return list(self._jobs.values())

    # The plan, carried out.

    def _carry_out(self, plan: FramePlan, ended: list[Ended]) -> None:
        for drop in plan.drop:
            self._end(self._jobs[drop.request_id], RequestState.DROPPED, drop.reason, ended)
        for cancel in plan.cancel:
            self._end(self._jobs[cancel.request_id], RequestState.ABORTED, cancel.reason, ended)
        for key in plan.preempt:
            self._preempt(self._jobs[key])
        for key in plan.park:
            self._park(key)
        for key in plan.resume[: max(plan.num_run - self._num_in_batch, 0)]:
            self._resume(key)
        self._admissions, self._num_run = plan.admit, plan.num_run

    @property
    def _num_in_batch(self) -> int:
        return len(self._decoding) + len(self._prompts)

    def _park(self, key: str) -> None:
        """One whose prompt is being computed goes on with it: there is nothing to rest."""
        job = self._decoding.pop(key, None)
        if job is not None:
            self._parked[key], self._batch = job, None
            self.frames.parked(key)
            job.num_parks += 1

    def _resume(self, key: str) -> None:
        job = self._parked.pop(key, None)
        if job is not None:
            self._decoding[key], self._batch = job, None
            self.frames.resumed(key)

    def _resume_best(self, now_s: float) -> bool:
        """What was to run cannot start now; who rests must not wait for it."""
        if not self._parked:
            return False
        order = [key for key in self.frames.victims(now_s, self.capacity()) if key in self._parked]
        for key in reversed(order[-self._num_run :]):
            self._resume(key)
        return True

    def _preempt(self, job: Job) -> None:
        """It loses its KV and waits again."""
        cached = job.hit_tokens
        held = self._let_go(job)
        job.is_swapped = job.generated > 0 and self._is_swap_cheaper(held, cached)
        job.computed_tokens = 0
        job.num_preemptions += 1
        self.frames.preempted(job.key)

    def _is_swap_cheaper(self, held: int, cached: int) -> bool:
        """Whether a context comes back sooner from host memory than by computing it.

        Both take a step: one computes all but what is cached, the other the last token alone.
        """
        swap_s = self._shape.swap_token_s
        if swap_s is None:
            return False
        whole = Step(0, 0, 0, held - cached, _pairs(held - cached, cached))
        last = Step(0, 0, 0, 1, _pairs(1, held - 1))
        swapped_s = self._steps.seconds(last) + (held - 1 - cached) * swap_s
        return swapped_s < self._steps.seconds(whole)

    def _let_go(self, job: Job) -> int:
        """Take its KV and its place; the tokens that it held."""
        is_prompt = job.lane < 0
        if job.lane >= 0:
            self.lanes.leave(job)
        self._decoding.pop(job.key, None)
        self._parked.pop(job.key, None)
        self._batch = None
        if is_prompt:
            self._prompts.remove(job)
        self._pool.give_up(job.call, job.hit_tokens, job.context_tokens)
        job.hit_tokens = 0
        return job.context_tokens

    def _end(self, job: Job, state: RequestState, reason: str | None, ended: list[Ended]) -> None:
        if state is RequestState.FINISHED:
            self.lanes.leave(job)
            self._decoding.pop(job.key, None)
            self._batch = None
            self._pool.end(job.call, job.hit_tokens, job.context_tokens)
        elif job.request is not None and job.request.holds_kv:
            self._let_go(job)
        del self._jobs[job.key]
        self.frames.ended(job.key, state)
        ended.append(Ended(job, state, reason))

    # Steps.

    def _next_step(self, now_s: float) -> _Running | None:
        """What the engine does next; None: nothing."""
        self._admit(now_s)
        num_decoding = len(self._decoding)
        is_prompt = bool(self._prompts)
        if is_prompt and not self._shape.mixes_chunks:
            is_prompt = self.frames.may_prefill(now_s, num_decoding, was_prefill=self._was_prefill)
        self._was_prefill = is_prompt
        mixes = self._shape.mixes_chunks or not is_prompt
        if num_decoding or is_prompt:
            self._relieve_pressure(now_s, decodes=mixes and num_decoding > 0)
        lanes = self._lanes() if mixes else _NOBODY
        if not (is_prompt and self._prompts) and not lanes.size:
            return None
        return self._compose(lanes, is_prompt=is_prompt)

    def _admit(self, now_s: float) -> None:
        """Take in what the plan admits, in its order, until one does not fit.

        No more than the next step can compute: who comes later may be more urgent.
        """
        shape, limit = self._shape, min(self._num_run, self._shape.max_batch)
        waiting = self._admissions
        pending = sum(job.context_tokens - job.computed_tokens for job in self._prompts)
        for place, key in enumerate(waiting):
            if pending >= shape.chunk_tokens:
                self._admissions = waiting[place:]
                return
            job = self._jobs.get(key)
            if job is None or job.request is None or job.request.holds_kv:
                continue
            held = self._num_in_batch + len(self._parked)
            if self._num_in_batch >= limit or held >= shape.num_slots or not self._take(job):
                self._admissions = waiting[place:]
                return
            self._prompts.append(job)
            pending += job.context_tokens - job.computed_tokens
            self.frames.started(key, now_s)
            if job.first_scheduled_s is None:
                job.first_scheduled_s = now_s
        self._admissions = ()

    def _take(self, job: Job) -> bool:
        """KV for its whole context, and for the frame that it is about to run."""
        ahead = min(job.call.max_output_tokens - job.generated, self.frames.config.frame_steps)
        tokens, uses_cache = job.context_tokens, True
        if not self._pool.fits(job.call, tokens + ahead):
            if not self._is_alone():
                return False
            # Alone it may have what there is: it ends, or gives way, when it is used up. Should
            # a text of which it uses only a part leave no room, it does without that text.
            uses_cache = self._pool.fits(job.call, tokens + 1)
        job.hit_tokens = self._pool.begin(job.call, tokens, uses_cache=uses_cache)
        job.computed_tokens = job.hit_tokens
        self._counts["cached_tokens"] += job.hit_tokens
        return True

    def _is_alone(self) -> bool:
        return not (self._decoding or self._prompts or self._parked)

    def _relieve_pressure(self, now_s: float, *, decodes: bool) -> None:
        """Before a step that does not fit give up the KV that the policy values least.

        Args:
            decodes: whether it has decodes in it; else it is of prompts alone.
        """
        if self._pool.available_tokens >= self._step_tokens(decodes=decodes):
            return
        last = None
        for key in self.frames.victims(now_s, self.capacity()):
            if self._pool.available_tokens >= self._step_tokens(decodes=decodes):
                return
            job = self._jobs[key]
            runs = key in self._decoding if decodes else job in self._prompts
            if runs and len(self._decoding if decodes else self._prompts) == 1:
                # Somebody must go on, and the others, wherever they come, give way to it.
                last = job
            else:
                self._preempt(job)
        if last is not None and last.hit_tokens and not self._pool.available_tokens:
            # All the rest is gone: what is left of the pool is a text longer than its prefix.
            self._pool.detach(last.call, last.hit_tokens)
            last.hit_tokens = 0

    def _step_tokens(self, *, decodes: bool) -> int:
        """KV that the next step takes at most: a token for each decode and each prompt."""
        return len(self._prompts) + (len(self._decoding) if decodes else 0)

    def _lanes(self) -> Ints:
        if self._batch is None:
            self._batch = self.lanes.at(list(self._decoding.values()))
        return self._batch

    def _compose(self, lanes: Ints, *, is_prompt: bool) -> _Running:
        contexts = self.lanes.context[lanes]
        context_tokens = int(contexts.sum())
        longest = int(contexts.max()) if lanes.size else 0
        padding = longest * int(lanes.size) - context_tokens
        tokens, pairs, swap_s, computed = self._chunk() if is_prompt else (0, 0, 0.0, [])
        step = Step(int(lanes.size), context_tokens, padding, tokens, pairs)
        decoded = list(self._decoding.values()) if lanes.size else []
        # Each of these will have one token more.
        self._pool.grow(len(decoded) + len(computed))
        return _Running(step, self._steps.seconds(step) + swap_s, lanes, decoded, computed)

    def _chunk(self) -> tuple[int, int, float, list[Job]]:
        """The prompt tokens of a step: their number, pairs, swapping, and whose are done."""
        left, pairs, swap_s = self._shape.chunk_tokens, 0, 0.0
        computed: list[Job] = []
        while self._prompts and left > 0:
            job = self._prompts[0]
            total, done = job.context_tokens, job.computed_tokens
            if job.is_swapped:
                swap_s += (total - 1 - done) * (self._shape.swap_token_s or 0.0)
                done, job.is_swapped = total - 1, False
            tokens = min(total - done, left)
            pairs += _pairs(tokens, done)
            left -= tokens
            job.computed_tokens = done + tokens
            if job.computed_tokens < total:
                break
            computed.append(self._prompts.popleft())
        return self._shape.chunk_tokens - left, pairs, swap_s, computed

    def _first_token(self, job: Job, now_s: float) -> bool:
        """Its prompt is computed: it decodes from now on. Whether it is done with it."""
        job.hit_tokens = self._pool.share(job.call, job.hit_tokens)
        is_done = self.lanes.first_token(job, now_s)
        self.lanes.enter(job)
        self._decoding[job.key], self._batch = job, None
        return is_done

    def _observe(self, running: _Running) -> None:
        step = running.step
        self.frames.observe_step(
            StepObservation(
                running.duration_s,
                step.num_decodes,
                step.context_tokens,
                step.prefill_tokens,
                step.padding_tokens,
            )
        )


def _pairs(tokens: int, before: int) -> int:
    """Of so many prompt tokens after others: with each token that each attends to."""
    return tokens * before + tokens * (tokens + 1) // 2


class _Running(NamedTuple):
    """A step under way."""

    step: Step
    duration_s: float
    lanes: Ints
    decoded: list[Job]
    computed: list[Job]
    """Whose prompts it completes."""


_COUNTED = (
    "steps",
    "decode_steps",
    "decode_tokens",
    "prefill_tokens",
    "cached_tokens",
    "plans",
)
