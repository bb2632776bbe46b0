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
        self._step = step
        self._busy_s += step.duration_s
        self._counts["steps"] += 1
        return now_s + step.duration_s

    def finish(self, now_s: float, ended: list[Ended]) -> None:
        """The step is over: report what it gave."""
        running, self._step = self._step, None
        assert running is not None, "no step is under way"
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
        """What it has done so far."""
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

    def live(self) -> list[Job]:
        """Calls that have not ended, with their figures."""
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
        held = self._let_go(job)
        swap_s = self._shape.swap_token_s
        recompute_s = self._steps.seconds(Step(0, 0, 0, held, 0)) / max(held, 1)
        job.is_swapped = swap_s is not None and job.generated > 0 and swap_s < recompute_s
        job.computed_tokens = 0
        job.num_preemptions += 1
        self.frames.preempted(job.key)

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
        if mixes and num_decoding:
            self._relieve_pressure(now_s)
        lanes = self._lanes() if mixes else _NOBODY
        if not (is_prompt and self._prompts) and not lanes.size:
            return None
        return self._compose(lanes, is_prompt=is_prompt)

    def _admit(self, now_s: float) -> None:
        """Take in what the plan admits, in its order, until one does not fit."""
        shape, limit = self._shape, min(self._num_run, self._shape.max_batch)
        waiting = self._admissions
        for place, key in enumerate(waiting):
            job = self._jobs.get(key)
            if job is None or job.request is None or job.request.holds_kv:
                continue
            held = self._num_in_batch + len(self._parked)
            if self._num_in_batch >= limit or held >= shape.num_slots or not self._take(job):
                self._admissions = waiting[place:]
                return
            self._prompts.append(job)
            self.frames.started(key, now_s)
            if job.first_scheduled_s is None:
                job.first_scheduled_s = now_s
        self._admissions = ()

    def _take(self, job: Job) -> bool:
        """KV for its whole context, and for the frame that it is about to run."""
        ahead = min(job.call.max_output_tokens - job.generated, self.frames.config.frame_steps)
        need = job.context_tokens - self._pool.cached(job.call)
        room = self._pool.available_tokens
        # Alone it may have what there is: it ends, or gives way, when it is used up.
        if need + ahead > room and not (self._is_alone() and need < room):
            return False
        job.hit_tokens = self._pool.begin(job.call, job.context_tokens)
        job.computed_tokens = job.hit_tokens
        self._counts["cached_tokens"] += job.hit_tokens
        return True

    def _is_alone(self) -> bool:
        return not (self._decoding or self._prompts or self._parked)

    def _relieve_pressure(self, now_s: float) -> None:
        """Before a step that does not fit give up the KV that the policy values least."""
        if self._pool.available_tokens >= len(self._decoding) + len(self._prompts):
            return
        for key in self.frames.victims(now_s, self.capacity()):
            need = len(self._decoding) + len(self._prompts)
            is_last = len(self._decoding) == 1 and key in self._decoding
            if is_last or self._pool.available_tokens >= need:
                return
            self._preempt(self._jobs[key])

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
        self._counts["prefill_tokens"] += tokens
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
            pairs += tokens * done + tokens * (tokens + 1) // 2
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
