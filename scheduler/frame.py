"""The frame manager: what runs next, decided from what it has been told.

The engine adapter and the simulator use it alike: report arrivals, steps, progress and ends;
call ``tick`` before each step; carry out the plan it returns, if any, and confirm each move.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence

import numpy as np

from core.slo import ReasoningSlo, RequestTerms, is_final
from scheduler.config import SchedulerConfig
from scheduler.earnings import Earnings
from scheduler.estimates import Estimates, FrameContext
from scheduler.fairness import FairFunction, least_service_first
from scheduler.lengths import (
    AverageRequest,
    LengthEstimates,
    OnlineClassLengths,
    equal_mass_points,
    refresh,
)
from scheduler.lifecycle import ENDED, RequestState
from scheduler.objective import GoodputObjective, objective_of
from scheduler.patience import (
    REASON_DEADLINE,
    REASON_WAITING_TIME,
    is_cancelled_late,
    patience,
)
from scheduler.plan import (
    Decision,
    Ending,
    EngineCapacity,
    FramePlan,
    Move,
    PlanKind,
    Reason,
    turn_ledger,
)
from scheduler.planner import Draft, Planner
from scheduler.policies import POLICIES, Policy
from scheduler.policies.base import PrefillRule, best_first
from scheduler.programs import ProgramOutlook, Programs
from scheduler.request import Request
from scheduler.step_time import StepObservation, StepTimeModel
from scheduler.table import (
    BEST_EFFORT,
    COMPOUND,
    LATENCY,
    MAX_FRAMES,
    PARKED,
    RUNNING,
    SLO_TYPES,
    Floats,
    Ints,
    Points,
    RequestTable,
    passed,
)
from scheduler.tenants import Tenants

RELAXED_PAUSE_FACTOR = 20.0
MAX_NEW_CALLS = 1024
EARLY_MOVES_FRACTION = 0.5
"""Of the moves that a frame has left, how many an early boundary may make."""

LOOKS_PER_FRAME = 5
"""How often in a frame it is looked whether somebody cannot wait for its end."""


class FrameManager:
    """Owns every live request's record and plans frame by frame."""

    def __init__(
        self,
        config: SchedulerConfig,
        lengths: LengthEstimates | None = None,
        *,
        objective: GoodputObjective | None = None,
        fair: FairFunction = least_service_first,
        step_time: StepTimeModel | None = None,
    ) -> None:
        """Make a manager.

        Args:
            objective: what is maximised; needed where ``config.goodput`` is a dotted path.
            fair: who should be served next; counts with ``config.fairness``.
            step_time: a model to start from; by default one that knows nothing yet.

        Raises:
            ValueError: ``config.goodput`` is no name of ours and no objective is given.
        """
        self.config = config
        self.lengths: LengthEstimates = lengths or OnlineClassLengths()
        self.step_time = step_time or StepTimeModel()
        self._objective = objective_of(config.goodput, objective)
        self.num_arrived = 0
        self.num_ended: dict[RequestState, int] = dict.fromkeys(sorted(ENDED), 0)
        self.num_parks = 0
        self.num_preemptions = 0
        self.last_plan: FramePlan | None = None
        self.last_frame_plan: FramePlan | None = None
        self.table = RequestTable()
        self.programs = Programs(timeout_s=config.program_timeout_s)
        self.tenants = Tenants()
        self._average = AverageRequest()
        self._fair = fair
        self._live: dict[str, Request] = {}
        self._timers: list[tuple[float, int, str]] = []
        """A heap of when to drop or to cancel; an entry that no longer holds is skipped."""
        self._due_s: dict[str, float] = {}
        self._overdue: dict[str, None] = {}
        self._frame = 0
        self._frame_start_s = -math.inf
        self._steps_in_frame = 0
        self._next_turn_step = self._next_early_step = 0
        self._moves_in_frame = 0
        self._was_idle = True
        self._has_news = False
        self._now_s = -math.inf
        self._prefilling_since_s: float | None = None
        self._lengths_version = -1
        self._news: list[Request] = []
        """Arrived or preempted since the last frame boundary: not in its ranking."""
        self._new_streams: list[tuple[float, int, Request]] = []
        """A heap of the streams among them by when their first token is due."""
        self._new_calls: list[Request] = []
        """The calls of programs among them, up to ``MAX_NEW_CALLS``."""
        self._reserve: list[Request] = []
        """The best of the last frame that were not chosen, best first."""
        self._line: list[Request] = []
        self._size = 1
        """How many run together: the current frame's decision."""
        self._is_limited = False
        self._was_contended = False
        self.use_policy(config.policy)

    # Reports from the engine.

    def arrive(
        self,
        request_id: str,
        terms: RequestTerms,
        *,
        input_tokens: int,
        max_output_tokens: int,
        is_pinned: bool = False,
        is_urgent: bool = False,
        priority: int = 0,
        known_output_tokens: int | None = None,
    ) -> Request:
        """A new request is ready to be scheduled. Raises ValueError on an id that is live."""
        if request_id in self._live:
            raise ValueError(f"request {request_id!r} is already live")
        request = Request(
            request_id,
            self.num_arrived,
            terms,
            input_tokens=input_tokens,
            max_output_tokens=max_output_tokens,
            is_pinned=is_pinned,
            is_urgent=is_urgent,
            priority=priority,
            known_output_tokens=known_output_tokens,
        )
        self.num_arrived += 1
        self._live[request_id] = request
        row = self.table.add(
            request,
            # Without a token to answer it only fills a cache, or is read: no call of anything.
            program=self.programs.enter(terms) if max_output_tokens > 0 else -1,
            tenant=self.tenants.join(terms.tenant),
        )
        self.table.points[row] = self.lengths.points(request.slo_type)
        program = int(self.table.program[row])
        if request.has_slo and (program < 0 or self.programs.is_first_call(program)):
            self._average.begun()
        self._set_timer(request)
        self._news.append(request)
        if request.is_latency:
            entry = (request.next_due_s(), request.serial, request)
            heapq.heappush(self._new_streams, entry)
        elif self.table.kind[row] == COMPOUND and len(self._new_calls) < MAX_NEW_CALLS:
            self._new_calls.append(request)
        self._has_news = True
        return request

    def forecast(self, request_id: str, lengths: Sequence[float] | Points | Floats) -> None:
        """A forecast of a request's output tokens came in, as equal-mass points.

        Unknown ids are ignored: the request may have ended meanwhile. So is a forecast for a
        request that still thinks: what must be in time is its thinking, not the whole.

        Raises:
            ValueError: nothing is in it, or not only finite lengths of 0 or more.
        """
        points = equal_mass_points(lengths)
        request = self._live.get(request_id)
        if request is None:
            return
        table, row = self.table, request.row
        if isinstance(request.terms.slo, ReasoningSlo) and table.kind[row] != LATENCY:
            return
        table.points[row] = points
        table.has_forecast[row] = table.is_stale[row] = True

    def expect(self, tenant: str, program_id: str, outlook: ProgramOutlook | None) -> None:
        """What a pattern match expects of a program's calls still to come; None: nothing fits."""
        self.programs.expect(tenant, program_id, outlook)

    def program_closed(self, tenant: str, program_id: str, *, is_cancelled: bool = False) -> None:
        """Its client has said that no call of it will follow."""
        self.programs.close(tenant, program_id, is_cancelled=is_cancelled)

    def answer_began(self, request_id: str) -> None:
        """A reasoning request has done thinking: from its next token on it is a stream.

        Ignored for requests of other kinds, for a second report, and where its deadline has
        passed: then nothing of it can count any more.
        """
        request = self._live.get(request_id)
        if request is None or not isinstance(request.terms.slo, ReasoningSlo):
            return
        table, row = self.table, request.row
        if table.kind[row] == LATENCY or request.is_expired(self._now_s):
            return
        # What has been learnt of its class is how long the thinking takes.
        self.lengths.learn(request, is_censored=False)
        thinking_tokens = table.generated_tokens[row]
        table.points[row] = self.lengths.points("latency") + np.float32(thinking_tokens)
        table.has_forecast[row] = table.is_stale[row] = True
        table.begin_stream(row, request.terms.slo.target_tbt_s)
        request.deadline_at_s = math.inf
        self._set_timer(request)

    def started(self, request_id: str, now_s: float) -> None:
        """The engine has begun to prefill it (again)."""
        request = self._live[request_id]
        request.move_to(RequestState.RUNNING)
        self.table.frames_blocked[request.row] = 0
        if request.first_scheduled_s is None:
            # Once: what the engine takes away and builds again is not its tenant's service.
            self._serve(request, input_tokens=request.input_tokens)
            request.first_scheduled_s = now_s
            self._set_timer(request)

    def parked(self, request_id: str) -> None:
        self._live[request_id].move_to(RequestState.PARKED)
        self.num_parks += 1

    def resumed(self, request_id: str) -> None:
        self._live[request_id].move_to(RequestState.RUNNING)

    def preempted(self, request_id: str) -> None:
        """Its KV is gone; it keeps its arrival order and waits to be prefilled again."""
        request = self._live[request_id]
        request.move_to(RequestState.PREEMPTED)
        self.num_preemptions += 1
        self._news.append(request)
        self._has_news = True

    def progressed(self, request_id: str, generated_tokens: int) -> None:
        """So many output tokens have been generated in all."""
        request = self._live[request_id]
        table, row = self.table, request.row
        new_tokens = generated_tokens - int(table.generated_tokens[row])
        if new_tokens == 0:
            return
        if new_tokens > 0:
            self._serve(request, output_tokens=new_tokens)
            if table.kind[row] == LATENCY:
                due_s = table.next_due_s(row)
                table.was_late[row] |= due_s < self._now_s
                if self.policy.tuner is not None:
                    self._earnings.stream(due_s, self._now_s, new_tokens)
        table.generated_tokens[row] = min(max(generated_tokens, 0), 1 << 40)
        table.is_stale[row] = True

    def stepped(self, requests: Sequence[Request]) -> None:
        """Each of these live requests has generated one more output token."""
        table = self.table
        rows = np.fromiter((request.row for request in requests), np.int64, len(requests))
        self.tenants.serve_all(table.tenant[rows], output_tokens=1)
        self.programs.serve_all(table.program[rows], 1)
        streams = rows[table.kind[rows] == LATENCY]
        if streams.size:
            due_s = table.next_dues_s(streams)
            table.was_late[streams] |= due_s < self._now_s
            if self.policy.tuner is not None:
                self._earnings.streams(due_s, self._now_s)
        table.generated_tokens[rows] += 1
        table.is_stale[rows] = True

    def ended(self, request_id: str, state: RequestState) -> None:
        """It ended; a second report for the same id is ignored."""
        request = self._live.get(request_id)
        if request is None:
            return
        request.move_to(state)
        is_finished = state is RequestState.FINISHED
        row = request.row
        was_stream = self.table.kind[row] == LATENCY
        is_reasoning = isinstance(request.terms.slo, ReasoningSlo)
        program, tenant = int(self.table.program[row]), int(self.table.tenant[row])
        if is_finished and request.has_slo:
            self._average.add(0 if was_stream else request.input_tokens, request.generated_tokens)
        if is_finished and self._is_answer_in_time(request):
            self._earnings.answer(request.input_tokens, request.generated_tokens)
        if program >= 0:
            self.programs.leave(
                program,
                input_tokens=request.input_tokens if is_finished else 0,
                output_tokens=request.generated_tokens if is_finished else 0,
                now_s=self._now_s,
                is_undone=is_final(request.terms) and not is_finished,
            )
        self.tenants.leave(tenant)
        self.table.remove(row, state)
        del self._live[request_id]
        self._due_s.pop(request_id, None)
        self._overdue.pop(request_id, None)
        self.num_ended[state] += 1
        if not request.is_urgent and not (is_reasoning and was_stream):
            # A health check's one token is nobody's answer.
            self.lengths.learn(request, is_censored=not is_finished)
        self._has_news = True

    def _is_answer_in_time(self, request: Request) -> bool:
        """Whether it earned something that counts whole, where somebody asks."""
        if self.policy.tuner is None or not request.has_slo:
            return False
        is_stream = self.table.kind[request.row] == LATENCY
        return not is_stream and self._now_s <= request.deadline_at_s

    def observe_step(self, step: StepObservation) -> None:
        """A step ran; prefill steps count for the time model, decode steps for the frame."""
        self.step_time.observe(step)
        if step.num_decodes:
            self._steps_in_frame += 1

    def _serve(self, request: Request, *, input_tokens: int = 0, output_tokens: int = 0) -> None:
        row = request.row
        tenant, program = int(self.table.tenant[row]), int(self.table.program[row])
        self.tenants.serve(tenant, input_tokens=input_tokens, output_tokens=output_tokens)
        if program >= 0:
            self.programs.serve(program, input_tokens + output_tokens)

    # Questions from the engine.

    def use_policy(self, name: str) -> None:
        """Go on under another policy; whoever runs stays until the next frame boundary."""
        policy = POLICIES[name]()
        self.policy: Policy = policy
        self.policy_name = name
        self._planner = Planner(self.table, self.config, policy, self._fair)
        self._earnings = Earnings(self._objective)
        self._is_limited = False
        self._line = []
        for request in self._live.values():
            self._set_timer(request)

    def get(self, request_id: str) -> Request | None:
        return self._live.get(request_id)

    def explain(self, request_id: str) -> Decision | None:
        """Why a live request is treated as it is now; None for one that is not live."""
        if request_id not in self._live:
            return None
        for plan in (self.last_plan, self.last_frame_plan):
            decision = None if plan is None else plan.explain(request_id)
            if decision is not None:
                return decision
        return Decision(request_id, Move.WAIT, Reason.NOT_LOOKED_AT, None)

    def live(self) -> Iterator[Request]:
        return iter(self._live.values())

    @property
    def num_running(self) -> int:
        """Requests in the batch."""
        return self.table.count[RUNNING]

    @property
    def mean_context_tokens(self) -> float:
        """Of the requests in the batch; 0 where nothing runs."""
        table = self.table
        running = table.in_state(RUNNING)
        if not running.size:
            return 0.0
        return float((table.input_tokens[running] + table.generated_tokens[running]).mean())

    def count(self, state: RequestState) -> int:
        """Live requests in a state."""
        return self.table.num_in(state)

    def may_prefill(self, now_s: float, num_decoding: int, *, was_prefill: bool) -> bool:
        """Whether this step may be a prefill, given that ``num_decoding`` requests could decode.

        Prefill goes first, as in every continuous-batching engine, but after
        ``max_decode_pause_s`` of it the running requests get a step: steady long prompts
        must not starve them. Where none of them has an objective the pause may be
        ``RELAXED_PAUSE_FACTOR`` times as long, since a step before the batch is full is
        a slow one. A stall-free policy (Sarathi) decodes after every chunk.
        """
        if num_decoding == 0:
            self._prefilling_since_s = None
            return True
        if not was_prefill:
            self._prefilling_since_s = now_s
            return True
        if self.policy.traits.prefill is PrefillRule.STALL_FREE:
            return False
        if self._prefilling_since_s is None or now_s < self._prefilling_since_s:
            self._prefilling_since_s = now_s
        running = self.table.in_state(RUNNING)
        has_slo = bool((self.table.kind[running] != BEST_EFFORT).any())
        factor = 1.0 if has_slo else RELAXED_PAUSE_FACTOR
        return now_s - self._prefilling_since_s < factor * self.config.max_decode_pause_s

    def victims(self, now_s: float, capacity: EngineCapacity) -> list[str]:
        """Requests that hold KV, in the order in which to give it up under pressure.

        Parked before running, pinned last, then the worst score first and the latest
        arrival first among equals.
        """
        table = self.table
        holders = table.in_state(RUNNING, PARKED)
        if not holders.size:
            return []
        self._refresh_lengths(holders)
        context = self._context(now_s, capacity, holders, is_whole=False)
        estimates = Estimates(table.rows(holders), context, self.policy.traits.information)
        scores = np.nan_to_num(self.policy.assess(estimates).scores)
        order = np.lexsort(
            (
                -table.serial[holders],
                scores,
                table.state[holders] == RUNNING,
                table.is_pinned[holders],
                table.is_urgent[holders],
            )
        )
        return [table.ids[row] for row in holders[order].tolist()]

    def tick(self, now_s: float, capacity: EngineCapacity) -> FramePlan | None:
        """The plan to carry out before the next step, or None where nothing changes.

        A clock that jumps back only delays the next frame boundary by one frame.
        """
        if now_s < self._now_s:
            self._frame_start_s = min(self._frame_start_s, now_s)
        self._now_s = now_s
        if not self._live:
            self._was_idle = True
            return None
        is_boundary = (
            self._steps_in_frame >= self.config.frame_steps
            or now_s - self._frame_start_s >= self.config.frame_s
        )
        limit = self._limit(capacity)
        has_room = self._has_news and self.table.count[RUNNING] < limit
        is_timer_due = self._is_timer_due(now_s)
        if is_boundary:
            plan = self._plan_frame(now_s, capacity, is_early=False)
        elif self._steps_in_frame >= self._next_early_step and self._is_newcomer_at_risk(now_s):
            plan = self._plan_frame(now_s, capacity, is_early=True)
        elif has_room or is_timer_due:
            plan = self._plan_backfill(now_s, capacity, limit)
        elif self._line and self._steps_in_frame >= self._next_turn_step:
            return self._plan_turn(capacity)
        else:
            return None
        self._has_news = False
        self.last_plan = plan
        return plan

    # Planning.

    def _limit(self, capacity: EngineCapacity) -> int:
        """How many may run together inside the current frame."""
        return min(self._size, capacity.max_batch) if self._is_limited else capacity.max_batch

    def _plan_frame(self, now_s: float, capacity: EngineCapacity, *, is_early: bool) -> FramePlan:
        """A boundary; an early one lets a newcomer in that cannot wait for the frame to end.

        An early one moves few, and the frame goes on: neither waiting nor the cutoff is
        counted by it, or quick little streams would make the frames short for everybody.
        """
        self._frame += 1
        if not is_early:
            self._end_frame(now_s)
        kind = PlanKind.EARLY if is_early else PlanKind.FRAME
        moves_left = self._moves_left(capacity)
        if is_early:
            moves_left = min(moves_left, max(1, int(moves_left * EARLY_MOVES_FRACTION)))
        draft = self._draft(kind, now_s, capacity, None, capacity.max_batch, moves_left)
        table = self.table
        if not is_early:
            # Kept while it runs: an equal that waited less must not displace it.
            waited = table.frames_waited[draft.passed_over]
            table.frames_waited[draft.passed_over] = np.minimum(waited + 1, MAX_FRAMES)
            table.frames_blocked[draft.blocked] += 1
        table.frame_from[: len(table)] = table.generated_tokens[: len(table)]
        table.frame_quota[: len(table)] = 0
        plan = draft.plan
        self._moves_in_frame += len(plan.park) + len(plan.preempt)
        self._next_early_step = self._next_turn_step = self._steps_in_frame + self._turn_steps(plan)
        for request_id, tokens in plan.tokens.items():
            table.frame_quota[self._live[request_id].row] = tokens
        self._news.clear()
        self._new_streams.clear()
        self._new_calls.clear()
        keep = 2 * capacity.max_batch + 64
        self._reserve = [table.requests[row] for row in draft.reserve[:keep].tolist()]
        self._line = [self._live[request_id] for request_id in plan.line]
        self._size = plan.num_run
        self._is_limited = draft.is_limited
        self._was_contended = draft.is_contended
        self.last_frame_plan = plan
        return plan

    def _end_frame(self, now_s: float) -> None:
        elapsed_s = now_s - self._frame_start_s
        self._frame_start_s = now_s
        self._steps_in_frame = self._moves_in_frame = 0
        if self.policy.tuner is not None:
            earned = self._earnings.take(self.lengths.average_tokens)
            is_contended = self._was_contended and not self._was_idle
            self.policy.tuner.frame(earned, elapsed_s, is_contended=is_contended)
        self._was_idle = False
        self.programs.expire(now_s)
        if self.last_frame_plan is not None:
            self._note_refused(self.last_frame_plan.admit)

    def _note_refused(self, admitted: tuple[str, ...]) -> None:
        """Whom the engine did not take though the plan did: it waited, and for KV."""
        for request_id in admitted:
            request = self._live.get(request_id)
            if request is not None and not request.holds_kv:
                self.table.frames_waited[request.row] += 1
                self.table.frames_blocked[request.row] += 1

    def _plan_backfill(self, now_s: float, capacity: EngineCapacity, limit: int) -> FramePlan:
        """Free places go to those in line, then to the best of the frame and to newcomers."""
        table = self.table
        near = {request.row for request in (*self._line, *self._reserve, *self._news)}
        near.discard(-1)
        held = table.in_state(RUNNING, PARKED).tolist()
        index = np.array(sorted({*held, *near}), dtype=np.int64)
        num_idle = len(table) - len(held)
        free = limit - table.count[RUNNING]
        outside = num_idle - (len(index) - len(held))
        if outside > 0 and len(index) - table.count[RUNNING] < free:
            index = np.arange(len(table))
        return self._draft(PlanKind.BACKFILL, now_s, capacity, index, limit, 0).plan

    def _draft(
        self,
        kind: PlanKind,
        now_s: float,
        capacity: EngineCapacity,
        index: Ints | None,
        limit: int,
        max_moves: int,
    ) -> Draft:
        table = self.table
        rows = np.arange(len(table)) if index is None else index
        endings = self._endings(now_s)
        if any(endings):
            gone = [self._live[item.request_id].row for part in endings for item in part]
            rows = rows[~np.isin(rows, gone)]
        self._refresh_lengths(rows)
        is_whole = kind in (PlanKind.FRAME, PlanKind.EARLY)
        context = self._context(now_s, capacity, rows, is_whole=is_whole)
        return self._planner.draft(
            kind, self._frame, context, capacity, rows, endings, limit, max_moves
        )

    def _plan_turn(self, capacity: EngineCapacity) -> FramePlan | None:
        """Who has the tokens that it needs in this frame gives way to who is in line."""
        if self.last_frame_plan is None:
            return None
        self._next_turn_step = self._steps_in_frame + self._turn_steps(self.last_frame_plan)
        table = self.table
        line = self._still_in_line(capacity)
        running = table.in_state(RUNNING)
        got = table.generated_tokens[running] - table.frame_from[running]
        is_done = (got >= table.frame_quota[running]) & (table.frame_quota[running] > 0)
        is_done &= ~(table.is_pinned[running] | table.is_urgent[running])
        # Who has got the most beyond its need goes first.
        beyond = np.where(is_done, got - table.frame_quota[running], -1.0)
        done = running[best_first(beyond, table.serial[running], len(line), is_done)]
        swaps = min(len(line), done.size, self._moves_left(capacity))
        self._line = line[swaps:]
        if not swaps:
            return None
        park = tuple(table.ids[row] for row in done[:swaps].tolist())
        self._moves_in_frame += swaps
        self.last_plan = self._turn(
            line[:swaps],
            park,
            min(self.last_frame_plan.num_run, capacity.max_batch),
            self.last_frame_plan.frame_tokens,
        )
        return self.last_plan

    def _moves_left(self, capacity: EngineCapacity) -> int:
        """Parks and preemptions that this frame may still make: no churn."""
        most = max(1, int(capacity.max_batch * self.config.max_moves_fraction))
        return max(most - self._moves_in_frame, 0)

    def _turn_steps(self, plan: FramePlan) -> int:
        """Steps between two chances to change places inside a frame of that many tokens."""
        return max(1, plan.frame_tokens // (self.config.turns_per_frame or LOOKS_PER_FRAME))

    def _still_in_line(self, capacity: EngineCapacity) -> list[Request]:
        """Who is still there, has no place yet, and whose KV still fits."""
        admitted = set() if self.last_plan is None else set(self.last_plan.admit)
        kv_tokens, slots = capacity.free_kv_tokens, capacity.free_slots
        line = []
        for request in self._line:
            if request.row < 0 or request.state is RequestState.RUNNING:
                continue
            if not request.holds_kv:
                need = request.context_tokens + 1
                if request.request_id in admitted or slots < 1 or need > kv_tokens:
                    continue
                kv_tokens -= need
                slots -= 1
            line.append(request)
        return line

    def _turn(
        self, enter: list[Request], park: tuple[str, ...], num_run: int, frame_tokens: int
    ) -> FramePlan:
        plan = self.last_plan
        admitted = () if plan is None else plan.admit
        pending = [
            request_id
            for request_id in admitted
            if (request := self._live.get(request_id)) and not request.holds_kv
        ]
        parked = [request.request_id for request in enter if request.holds_kv]
        fresh = [request.request_id for request in enter if not request.holds_kv]
        leaving = set(park)
        ids = self.table.ids
        stay = [
            ids[row] for row in self.table.in_state(RUNNING).tolist() if ids[row] not in leaving
        ]
        return FramePlan(
            frame=self._frame,
            kind=PlanKind.TURN,
            num_run=num_run,
            frame_tokens=frame_tokens,
            run=tuple(stay),
            park=park,
            preempt=(),
            resume=tuple(parked),
            admit=(*fresh, *(name for name in pending if name not in fresh)),
            line=tuple(request.request_id for request in self._line),
            drop=(),
            cancel=(),
            tokens={},
            ledger=turn_ledger(stay, park, parked, fresh),
        )

    def _refresh_lengths(self, rows: Ints) -> None:
        """Bring the length estimates of ``rows`` up to date."""
        table = self.table
        if self.lengths.version != self._lengths_version:
            self._lengths_version = self.lengths.version
            size = len(table)
            follows = ~table.has_forecast[:size]
            for code, slo_type in enumerate(SLO_TYPES):
                of_class = np.flatnonzero(follows & (table.length_class[:size] == code))
                if of_class.size:
                    table.points[of_class] = self.lengths.points(slo_type)
                    table.is_stale[of_class] = True
        refresh(table, rows[table.is_stale[rows]], self.config.length_quantile)

    def _context(
        self, now_s: float, capacity: EngineCapacity, rows: Ints, *, is_whole: bool
    ) -> FrameContext:
        table = self.table
        held = table.in_state(RUNNING, PARKED)
        near = held if held.size else rows
        contexts = table.input_tokens[near] + table.generated_tokens[near]
        frame_end_s = now_s + self.config.frame_s
        num_rows = self._num_contending(now_s, rows, capacity.max_batch)
        return FrameContext(
            now_s=now_s,
            step_time=self.step_time,
            objective=self._objective,
            programs=self.programs,
            batch_size=max(1, min(self._limit(capacity), num_rows)),
            mean_context_tokens=float(contexts.mean()) if near.size else 0.0,
            frame_steps=self.config.frame_steps,
            frame_s=self.config.frame_s,
            average_tokens=max(self.lengths.average_tokens, 1.0),
            average_request=(self._average.input_tokens, self._average.output_tokens),
            foreseen_kv_tokens=self.programs.foreseen_tokens(now_s, frame_end_s),
            is_whole=is_whole,
            tenant_service=self.tenants.service(),
        )

    def _num_contending(self, now_s: float, rows: Ints, max_batch: int) -> int:
        """Of ``rows`` those that may run beside each other."""
        table = self.table
        kind = table.kind[rows]
        is_late = passed(kind, table.deadline_s[rows], now_s)
        num_late = int(is_late.sum())
        num_in_time = int(((kind != BEST_EFFORT) & ~is_late).sum())
        places = self.policy.traits.places_for_late(max_batch, num_in_time)
        return len(rows) - max(num_late - places, 0)

    # Endings and timers.

    def _set_timer(self, request: Request) -> None:
        limit = patience(
            request.terms,
            deadline_at_s=request.deadline_at_s,
            has_started=request.first_scheduled_s is not None,
            cancels_expired=self.policy.traits.cancels_expired,
        )
        request_id = request.request_id
        self._overdue.pop(request_id, None)
        if limit is not None:
            self._due_s[request_id] = limit[0]
            heapq.heappush(self._timers, (limit[0], request.serial, request_id))
            if len(self._timers) > 2 * len(self._due_s) + 1024:
                self._timers = [
                    (due_s, self._live[name].serial, name) for name, due_s in self._due_s.items()
                ]
                heapq.heapify(self._timers)
        else:
            self._due_s.pop(request_id, None)

    def _is_cancelled_late(self, request: Request) -> bool:
        cancels_expired = self.policy.traits.cancels_expired
        return is_cancelled_late(request.terms, cancels_expired=cancels_expired)

    def _is_timer_due(self, now_s: float) -> bool:
        timers = self._timers
        for request_id in [name for name in self._overdue if self._due_s[name] >= now_s]:
            # The clock has jumped back.
            del self._overdue[request_id]
            entry = (self._due_s[request_id], self._live[request_id].serial, request_id)
            heapq.heappush(timers, entry)
        while timers and timers[0][0] < now_s:
            due_s, _, request_id = heapq.heappop(timers)
            if self._due_s.get(request_id) == due_s:
                self._overdue[request_id] = None
        return bool(self._overdue)

    def _endings(self, now_s: float) -> tuple[tuple[Ending, ...], tuple[Ending, ...]]:
        """Whom to drop and whom to cancel. They stay overdue until the engine reports the end."""
        drop, cancel = [], []
        for request_id in self._overdue:
            request = self._live[request_id]
            is_missed = self._is_cancelled_late(request) and request.is_expired(now_s)
            if request.first_scheduled_s is None:
                reason = REASON_DEADLINE if is_missed else REASON_WAITING_TIME
                drop.append(Ending(request_id, reason))
            elif is_missed:
                cancel.append(Ending(request_id, REASON_DEADLINE))
        return tuple(drop), tuple(cancel)

    def _is_newcomer_at_risk(self, now_s: float) -> bool:
        """Something has arrived that would be late if it waited for the frame to end."""
        return self._is_first_token_at_risk(now_s) or self._is_stage_at_risk(now_s)

    def _is_stage_at_risk(self, now_s: float) -> bool:
        """A waiting call could not end any more by when its stage is due, but can now.

        A program of many stages would otherwise lose half a frame with each of them.
        """
        self._new_calls = [
            request for request in self._new_calls if request.state is RequestState.WAITING
        ]
        rows = np.array([request.row for request in self._new_calls], dtype=np.int64)
        if not rows.size:
            return False
        self._refresh_lengths(rows)
        table = self.table
        due_s = self.programs.column("stage_due_s")[table.program[rows]]
        due_s = np.minimum(due_s, table.deadline_s[rows])
        prefill_s = self._prompt_token_s() * table.input_tokens[rows]
        pace_s = self.step_time.pace_s(max(table.count[RUNNING], 1), 0.0)
        latest_s = due_s - prefill_s - table.bound_tokens[rows] * pace_s
        end_s = self._frame_start_s + self.config.frame_s
        return bool(((latest_s >= now_s) & (latest_s < end_s)).any())

    def _prompt_token_s(self) -> float:
        """Seconds per prompt token until the first token of a newcomer."""
        running = max(self.table.count[RUNNING], 1)
        step_s = self.step_time.step_s(running, running * self.mean_context_tokens)
        return self.step_time.prompt_token_s(step_s)

    def _is_first_token_at_risk(self, now_s: float) -> bool:
        """A waiting stream would miss its first token if it waited for the frame to end."""
        streams = self._new_streams
        while streams:
            due_s, _, request = streams[0]
            if request.state is RequestState.WAITING and now_s < due_s:
                end_s = self._frame_start_s + self.config.frame_s
                return due_s - self._prompt_token_s() * request.prefill_tokens < end_s
            heapq.heappop(streams)
        return False
