"""The frame manager: what runs next, decided from what it has been told.

The engine adapter and the simulator use it alike: report arrivals, steps, progress and ends;
call ``tick`` before each step; carry out the plan it returns, if any, and confirm each move.
"""

import math
from collections.abc import Iterable, Iterator

import msgspec

from core.slo import BestEffortSlo, LatencySlo, OnMiss, RequestTerms
from scheduler.lengths import LengthEstimates, OnlineClassLengths
from scheduler.lifecycle import ENDED, RequestState
from scheduler.plan import Decision, Ending, EngineCapacity, FramePlan, Move, PlanKind
from scheduler.policies import POLICIES, Policy, PolicyContext
from scheduler.request import Request
from scheduler.step_time import StepObservation, StepTimeModel

REASON_WAITING_TIME = "waiting_time_exceeded"
REASON_DEADLINE = "deadline_passed"
RELAXED_PAUSE_FACTOR = 20.0


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the decision core."""

    policy: str = "gmax"
    frame_steps: int = 50
    """Decode steps a frame lasts at most."""
    frame_s: float = 0.5
    """Seconds a frame lasts at most: a slow engine must not decide only every 50 steps."""
    displace_margin: float = 0.1
    """A running request gives way only to one better by this share (paper, appendix)."""
    max_moves_fraction: float = 0.5
    """Parks and preemptions of one frame, as a share of the batch: no churn."""
    max_pinned_fraction: float = 0.5
    """Share of the batch that pinned requests may keep against better ones."""
    length_quantile: float = 0.9
    """Quantile of the answer's length used as its upper bound."""
    reserve_after_frames: int = 40
    """A request chosen in so many frames without its KV fitting gets what comes free next."""
    max_decode_pause_s: float = 0.25
    """Prefill may keep running requests from decoding for about this long at a time."""

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {self.policy!r}")
        if self.frame_steps < 1:
            raise ValueError(f"frame_steps must be at least 1, got {self.frame_steps}")
        for name in ("frame_s", "max_decode_pause_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"{name} must be a number of seconds above 0")
        if not 0 < self.length_quantile < 1:
            raise ValueError("length_quantile must be between 0 and 1")
        if not 0 <= self.displace_margin < math.inf:
            raise ValueError("displace_margin must be a number, 0 or more")
        if not 0 <= self.max_moves_fraction <= 1:
            raise ValueError("max_moves_fraction must be between 0 and 1")


class FrameManager:
    """Owns every live request's record and plans frame by frame."""

    def __init__(self, config: SchedulerConfig, lengths: LengthEstimates | None = None) -> None:
        self.config = config
        self.policy_name = config.policy
        self.policy: Policy = POLICIES[config.policy]()
        self.lengths: LengthEstimates = lengths or OnlineClassLengths(config.length_quantile)
        self.step_time = StepTimeModel()
        self.num_arrived = 0
        self.num_ended: dict[RequestState, int] = dict.fromkeys(sorted(ENDED), 0)
        self.num_parks = 0
        self.num_preemptions = 0
        self.last_plan: FramePlan | None = None
        self._live: dict[str, Request] = {}
        self._timed: dict[str, float] = {}
        """When to drop a waiting request, or to cancel one with on_miss=cancel."""
        self._frame = 0
        self._frame_start_s = -math.inf
        self._steps_in_frame = 0
        self._has_news = False
        self._now_s = -math.inf
        self._prefilling_since_s: float | None = None

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
        )
        self.num_arrived += 1
        self._live[request_id] = request
        due_s = self._next_timer_s(request)
        if due_s is not None:
            self._timed[request_id] = due_s
        self._has_news = True
        return request

    def started(self, request_id: str, now_s: float) -> None:
        """The engine has begun to prefill it (again)."""
        request = self._live[request_id]
        request.move_to(RequestState.RUNNING)
        if request.first_scheduled_s is None:
            request.first_scheduled_s = now_s
        due_s = self._next_timer_s(request)
        if due_s is None:
            self._timed.pop(request_id, None)
        else:
            self._timed[request_id] = due_s

    def parked(self, request_id: str) -> None:
        self._live[request_id].move_to(RequestState.PARKED)
        self.num_parks += 1

    def resumed(self, request_id: str) -> None:
        self._live[request_id].move_to(RequestState.RUNNING)

    def preempted(self, request_id: str) -> None:
        """Its KV is gone; it keeps its arrival order and waits to be prefilled again."""
        self._live[request_id].move_to(RequestState.PREEMPTED)
        self.num_preemptions += 1
        self._has_news = True

    def progressed(self, request_id: str, generated_tokens: int) -> None:
        self._live[request_id].generated_tokens = generated_tokens

    def ended(self, request_id: str, state: RequestState) -> None:
        """It ended; a second report for the same id is ignored."""
        request = self._live.get(request_id)
        if request is None:
            return
        request.move_to(state)
        del self._live[request_id]
        self._timed.pop(request_id, None)
        self.num_ended[state] += 1
        self.lengths.learn(request, is_censored=state is not RequestState.FINISHED)
        self._has_news = True

    def observe_step(self, step: StepObservation) -> None:
        """A step ran; prefill steps count for the time model, decode steps for the frame."""
        self.step_time.observe(step)
        if step.num_decodes:
            self._steps_in_frame += 1

    # Questions from the engine.

    def use_policy(self, name: str) -> None:
        """Go on under another policy; whoever runs stays until the next frame boundary."""
        self.policy = POLICIES[name]()
        self.policy_name = name

    def get(self, request_id: str) -> Request | None:
        return self._live.get(request_id)

    def live(self) -> Iterator[Request]:
        return iter(self._live.values())

    def count(self, state: RequestState) -> int:
        return sum(request.state is state for request in self._live.values())

    def may_prefill(self, now_s: float, num_decoding: int, *, was_prefill: bool) -> bool:
        """Whether this step may be a prefill, given that ``num_decoding`` requests could decode.

        Prefill goes first, as in every continuous-batching engine, but after
        ``max_decode_pause_s`` of it the running requests get a step: steady long prompts
        must not starve them. Where none of them has an objective the pause may be
        ``RELAXED_PAUSE_FACTOR`` times as long, since a step before the batch is full is
        a slow one.
        """
        if num_decoding == 0:
            self._prefilling_since_s = None
            return True
        if not was_prefill:
            self._prefilling_since_s = now_s
            return True
        if self._prefilling_since_s is None or now_s < self._prefilling_since_s:
            self._prefilling_since_s = now_s
        running = (r for r in self._live.values() if r.state is RequestState.RUNNING)
        factor = 1.0 if any(r.has_slo for r in running) else RELAXED_PAUSE_FACTOR
        return now_s - self._prefilling_since_s < factor * self.config.max_decode_pause_s

    def victims(self, now_s: float, capacity: EngineCapacity) -> list[str]:
        """Requests that hold KV, in the order in which to give it up under pressure.

        Parked before running, pinned last, then the worst score first and the latest
        arrival first among equals.
        """
        holders = [request for request in self._live.values() if request.holds_kv]
        scores = dict(
            zip(
                (request.request_id for request in holders),
                self.policy.scores(holders, self._context(now_s, capacity, holders)),
                strict=True,
            )
        )
        holders.sort(
            key=lambda request: (
                request.is_urgent,
                request.is_pinned,
                request.state is RequestState.RUNNING,
                scores[request.request_id],
                -request.serial,
            )
        )
        return [request.request_id for request in holders]

    def tick(self, now_s: float, capacity: EngineCapacity) -> FramePlan | None:
        """The plan to carry out before the next step, or None where nothing changes.

        A clock that jumps back only delays the next frame boundary by one frame.
        """
        if now_s < self._now_s:
            self._frame_start_s = min(self._frame_start_s, now_s)
        self._now_s = now_s
        if not self._live:
            return None
        is_boundary = (
            self._steps_in_frame >= self.config.frame_steps
            or now_s - self._frame_start_s >= self.config.frame_s
        )
        num_running = self.count(RequestState.RUNNING)
        if not is_boundary and self._is_first_token_at_risk(now_s):
            is_boundary = self._steps_in_frame >= min(4, self.config.frame_steps)
        has_room = num_running < capacity.max_batch and self._has_news
        if not (is_boundary or has_room or self._is_timer_due(now_s)):
            return None
        kind = PlanKind.FRAME if is_boundary else PlanKind.BACKFILL
        self._has_news = False
        if is_boundary:
            self._frame += 1
            self._frame_start_s = now_s
            self._steps_in_frame = 0
        self.last_plan = self._plan(kind, now_s, capacity)
        return self.last_plan

    # Planning.

    def _plan(self, kind: PlanKind, now_s: float, capacity: EngineCapacity) -> FramePlan:
        drop, cancel = self._endings(now_s)
        ending = {item.request_id for item in (*drop, *cancel)}
        live = [request for request in self._live.values() if request.request_id not in ending]
        context = self._context(now_s, capacity, live)
        ranked = self._ranked(live, context)
        if kind is PlanKind.FRAME and self.policy.may_displace:
            chosen, park, preempt = self._choose_with_moves(ranked, context, capacity)
        else:
            chosen, park, preempt = self._choose_additions(ranked, capacity), [], []
        chosen_ids = {request.request_id for _, request in chosen}
        if kind is PlanKind.FRAME:
            for request in live:
                if request.request_id not in chosen_ids and not _rests(request, now_s):
                    # Kept while it runs: an equal that waited less must not displace it.
                    request.frames_waited += 1
        moves = self._moves(ranked, chosen_ids, set(park), set(preempt))
        return FramePlan(
            frame=self._frame,
            kind=kind,
            run=_ids(moves, Move.RUN),
            park=tuple(park),
            preempt=tuple(preempt),
            resume=_ids(moves, Move.RESUME),
            admit=_ids(moves, Move.ADMIT),
            drop=tuple(drop),
            cancel=tuple(cancel),
            tokens={
                request.request_id: self._tokens_needed(request, context) for _, request in chosen
            },
            decisions=moves,
        )

    def _context(
        self, now_s: float, capacity: EngineCapacity, requests: Iterable[Request]
    ) -> PolicyContext:
        contexts = [request.context_tokens for request in requests]
        return PolicyContext(
            now_s=now_s,
            lengths=self.lengths,
            step_time=self.step_time,
            batch_size=max(1, min(capacity.max_batch, len(contexts))),
            mean_context_tokens=sum(contexts) / len(contexts) if contexts else 0.0,
        )

    def _ranked(self, live: list[Request], context: PolicyContext) -> list[tuple[float, Request]]:
        """Best first. Running requests get the displacement margin, ties arrival order."""
        margin = self.config.displace_margin
        must_run = self._must_run(live, context.batch_size)
        ranked = []
        for score, request in zip(self.policy.scores(live, context), live, strict=True):
            worth = score if math.isfinite(score) else 0.0
            if request.request_id in must_run:
                worth = math.inf
            elif request.state is RequestState.RUNNING and self.policy.may_displace:
                worth += abs(worth) * margin
            ranked.append((worth, request))
        ranked.sort(key=lambda item: (-item[0], item[1].serial))
        return ranked

    def _must_run(self, live: list[Request], batch_size: int) -> set[str]:
        """Pinned requests that run, and one urgent newcomer at a time.

        Both are in the senders' hands (a penalty pins, a malformed request is urgent), so
        they get a share of the batch and no more: the oldest pinned ones up to
        ``max_pinned_fraction`` of it.
        """
        pinned = [request for request in live if request.is_pinned and request.holds_kv]
        most = max(1, int(batch_size * self.config.max_pinned_fraction))
        oldest = sorted(pinned, key=lambda request: request.serial)[:most]
        urgent = [request for request in live if request.is_urgent]
        running = [request for request in urgent if request.holds_kv]
        newcomers = sorted(
            (request for request in urgent if not request.holds_kv),
            key=lambda request: request.serial,
        )
        return {request.request_id for request in (*oldest, *running, *newcomers[:1])}

    def _choose_additions(
        self, ranked: list[tuple[float, Request]], capacity: EngineCapacity
    ) -> list[tuple[float, Request]]:
        """Everyone running stays; free slots go to the best of the rest, as far as KV goes."""
        chosen = [item for item in ranked if item[1].state is RequestState.RUNNING]
        slots = capacity.max_batch - len(chosen)
        room = _Room(capacity)
        is_blocked = False
        for item in self._blocked_first(ranked):
            request = item[1]
            if slots <= 0:
                break
            if request.state is RequestState.RUNNING:
                continue
            if request.holds_kv or (not is_blocked and room.take(self._kv_need(request, capacity))):
                chosen.append(item)
                slots -= 1
            elif not self.policy.may_displace or self._is_blocked_long(request):
                # Nobody will make room for it later: it holds its place.
                is_blocked = True
        # A prompt that never fits must run when nothing else does.
        return chosen or ranked[:1]

    def _choose_with_moves(
        self,
        ranked: list[tuple[float, Request]],
        context: PolicyContext,
        capacity: EngineCapacity,
    ) -> tuple[list[tuple[float, Request]], list[str], list[str]]:
        """The policy's group, within KV, slots and the bound on moves."""
        # Whoever must run is no matter of choice.
        group = [item for item in ranked if item[0] == math.inf][: capacity.max_batch]
        others = [item for item in ranked if item[0] < math.inf]
        group += self.policy.choose(others, capacity.max_batch - len(group))
        moves_left = max(1, int(capacity.max_batch * self.config.max_moves_fraction))
        room = _Room(capacity)
        chosen: list[tuple[float, Request]] = []
        preempt: list[str] = []
        for item in self._blocked_first(group):
            request = item[1]
            if request.request_id in preempt:
                continue
            if request.holds_kv:
                chosen.append(item)
                continue
            need = self._kv_need(request, capacity)
            if not room.fits(need):
                freed = self._make_room(item, need, room, ranked, preempt, moves_left, context)
                moves_left -= freed
            if room.take(need):
                chosen.append(item)
                continue
            request.frames_blocked += 1
            if self._is_blocked_long(request):
                # What comes free from here on is kept for it.
                room.close()
        # One that comes first for having been blocked long may have taken the KV of a better one.
        chosen = [item for item in chosen if item[1].request_id not in preempt]
        # Whoever runs now and has no place in the group gives way, if a place is taken.
        chosen_ids = {request.request_id for _, request in chosen}
        displaced = [
            item
            for item in reversed(ranked)
            if item[1].state is RequestState.RUNNING
            and item[0] < math.inf
            and item[1].request_id not in chosen_ids
            and item[1].request_id not in preempt
        ]
        num_excess = len(chosen) + len(displaced) - capacity.max_batch
        num_parks = min(len(displaced), max(num_excess, 0), max(moves_left, 0))
        park = [request.request_id for _, request in displaced[:num_parks]]
        chosen += displaced[num_parks:]
        if len(chosen) > capacity.max_batch:
            chosen = self._shed(chosen, capacity.max_batch)
        taken = {request.request_id for _, request in chosen} | set(park) | set(preempt)
        rest = [item for item in ranked if item[1].request_id not in taken]
        self._fill(chosen, rest, room, capacity)
        # A prompt that never fits must run when nothing else does.
        return chosen or ranked[:1], park, preempt

    def _fill(
        self,
        chosen: list[tuple[float, Request]],
        rest: list[tuple[float, Request]],
        room: "_Room",
        capacity: EngineCapacity,
    ) -> None:
        """Give the places that are left to the best of ``rest``."""
        for item in rest:
            if len(chosen) >= capacity.max_batch:
                break
            # Skip, not stop: one that does not fit must not starve those that do.
            if item[1].holds_kv or room.take(self._kv_need(item[1], capacity)):
                chosen.append(item)

    def _is_blocked_long(self, request: Request) -> bool:
        return request.frames_blocked >= self.config.reserve_after_frames

    def _blocked_first(self, ranked: list[tuple[float, Request]]) -> list[tuple[float, Request]]:
        """Those whose KV has not fitted for long come first: smaller ones must not starve them."""
        return sorted(ranked, key=lambda item: not self._is_blocked_long(item[1]))

    @staticmethod
    def _shed(chosen: list[tuple[float, Request]], most: int) -> list[tuple[float, Request]]:
        """Out of moves: newcomers wait, worst first, until the batch is within its cap."""
        running = [item for item in chosen if item[1].state is RequestState.RUNNING]
        newcomers = [item for item in chosen if item[1].state is not RequestState.RUNNING]
        newcomers.sort(key=lambda item: (-item[0], item[1].serial))
        return running + newcomers[: max(most - len(running), 0)]

    def _make_room(
        self,
        challenger: tuple[float, Request],
        need: int,
        room: "_Room",
        ranked: list[tuple[float, Request]],
        preempt: list[str],
        moves_left: int,
        context: PolicyContext,
    ) -> int:
        """Preempt the worst KV holders, clearly worse than ``challenger``, for it; how many.

        Also where the batch has room for all: then it is KV that they compete for.

        The cost gate of the paper: the stall (recomputing the victims' KV) times the batch's
        token speed must stay below the tokens that the challenger still has to give.
        """
        score, request = challenger
        gain = request.input_tokens * (not request.is_latency) + self.lengths.remaining_mean(
            request
        )
        speed = context.batch_size / context.step_s
        victims: list[Request] = []
        loss = 0.0
        freed = _Room.empty()
        for victim_score, victim in reversed(ranked):
            if (
                not victim.holds_kv
                or victim.is_pinned
                or victim.request_id in preempt
                or victim_score + abs(victim_score) * self.config.displace_margin >= score
            ):
                continue
            loss += self.step_time.prefill_s(victim.context_tokens) * speed
            if loss >= gain or len(victims) >= moves_left:
                return 0
            victims.append(victim)
            freed.give(victim.context_tokens)
            if room.fits(need, freed):
                break
        else:
            return 0
        for victim in victims:
            room.give(victim.context_tokens)
            preempt.append(victim.request_id)
        return len(victims)

    def _kv_need(self, request: Request, capacity: EngineCapacity) -> int:
        """KV to have free before admitting: its prompt and the frame it is about to run."""
        ahead = min(self.config.frame_steps, request.max_output_tokens)
        return min(request.context_tokens + ahead, capacity.total_kv_tokens)

    def _tokens_needed(self, request: Request, context: PolicyContext) -> int:
        """bw_delta(r): tokens it must get in this frame to stay in time, at least one.

        A stream needs those that fall due before the frame ends; a deadline needs its
        share t_gen / t_rem of the frame's steps.
        """
        frame_s = min(self.config.frame_s, self.config.frame_steps * context.step_s)
        frame_tokens = max(1, int(frame_s / context.step_s))
        slo = request.terms.slo
        if isinstance(slo, LatencySlo):
            due = (context.now_s + frame_s - request.next_due_s()) / slo.target_tbt_s
            return math.floor(min(max(due, 0), frame_tokens - 1)) + 1
        if isinstance(slo, BestEffortSlo):
            return 1
        left_s = request.deadline_at_s - context.now_s
        needed_s = self.lengths.remaining_bound(request) * context.step_s
        share = needed_s / left_s if left_s > 0 else 1.0
        return max(1, min(frame_tokens, math.ceil(share * frame_tokens)))

    def _moves(
        self,
        ranked: list[tuple[float, Request]],
        chosen: set[str],
        park: set[str],
        preempt: set[str],
    ) -> tuple[Decision, ...]:
        decisions = []
        for score, request in ranked:
            move, reason = _move_of(request, chosen, park, preempt)
            decisions.append(Decision(request.request_id, move, reason, min(score, 1e300)))
        return tuple(decisions)

    # Endings and timers.

    def _next_timer_s(self, request: Request) -> float | None:
        due: list[float] = []
        if request.first_scheduled_s is None and request.terms.waiting_time_s is not None:
            due.append(request.terms.arrival_s + request.terms.waiting_time_s)
        if request.terms.on_miss is OnMiss.CANCEL and request.has_slo:
            due.append(request.deadline_at_s)
        return min(due) if due and math.isfinite(min(due)) else None

    def _is_timer_due(self, now_s: float) -> bool:
        return any(due_s < now_s for due_s in self._timed.values())

    def _endings(self, now_s: float) -> tuple[list[Ending], list[Ending]]:
        drop, cancel = [], []
        for request_id, due_s in self._timed.items():
            if due_s >= now_s:
                continue
            request = self._live[request_id]
            is_missed = request.terms.on_miss is OnMiss.CANCEL and request.is_expired(now_s)
            if request.first_scheduled_s is None:
                reason = REASON_DEADLINE if is_missed else REASON_WAITING_TIME
                drop.append(Ending(request_id, reason))
            elif is_missed:
                cancel.append(Ending(request_id, REASON_DEADLINE))
        return drop, cancel

    def _is_first_token_at_risk(self, now_s: float) -> bool:
        """A waiting stream would miss its first token if it waited for the frame to end."""
        if not self._has_news:
            return False
        end_s = self._frame_start_s + self.config.frame_s
        return any(
            request.is_latency
            and request.state is RequestState.WAITING
            and now_s < request.next_due_s()
            and request.next_due_s() - self.step_time.prefill_s(request.prefill_tokens) < end_s
            for request in self._live.values()
        )


class _Room:
    """KV tokens and request slots left while a plan is being made."""

    __slots__ = ("kv_tokens", "slots")

    def __init__(self, capacity: EngineCapacity) -> None:
        self.kv_tokens = capacity.free_kv_tokens
        self.slots = capacity.free_slots

    @classmethod
    def empty(cls) -> "_Room":
        return cls(EngineCapacity(0, 0, 0, 0))

    def fits(self, kv_tokens: int, extra: "_Room | None" = None) -> bool:
        more_tokens, more_slots = (extra.kv_tokens, extra.slots) if extra else (0, 0)
        return self.slots + more_slots >= 1 and self.kv_tokens + more_tokens >= kv_tokens

    def close(self) -> None:
        """Nothing more fits."""
        self.kv_tokens = -1

    def take(self, kv_tokens: int) -> bool:
        if not self.fits(kv_tokens):
            return False
        self.kv_tokens -= kv_tokens
        self.slots -= 1
        return True

    def give(self, kv_tokens: int) -> None:
        self.kv_tokens += kv_tokens
        self.slots += 1


def _rests(request: Request, now_s: float) -> bool:
    """A stream ahead of its timeline loses nothing by waiting."""
    return request.is_latency and request.holds_kv and request.next_due_s() > now_s


def _ids(decisions: tuple[Decision, ...], move: Move) -> tuple[str, ...]:
    return tuple(decision.request_id for decision in decisions if decision.move is move)


def _move_of(
    request: Request, chosen: set[str], park: set[str], preempt: set[str]
) -> tuple[Move, str]:
    request_id = request.request_id
    if request_id in preempt:
        return Move.PREEMPT, "its KV makes room for a better request"
    if request_id in park:
        return Move.PARK, "a better request takes its place"
    if request_id in chosen:
        match request.state:
            case RequestState.RUNNING:
                return Move.RUN, "among the best of this frame"
            case RequestState.PARKED:
                return Move.RESUME, "among the best of this frame"
            case _:
                return Move.ADMIT, "among the best of this frame"
    if request.state is RequestState.RUNNING:
        return Move.RUN, "nothing takes its place"
    return Move.WAIT, "better requests fill the batch, or it does not fit"
