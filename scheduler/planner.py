"""One plan: rank what is live, group it, seat it, and write down why."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.config import SchedulerConfig
from scheduler.estimates import Estimates, FrameContext
from scheduler.fairness import FairFunction, blend
from scheduler.patience import REASON_DEADLINE, REASON_WAITING_TIME
from scheduler.plan import (
    MOVE_CODE,
    REASON_CODE,
    Ending,
    EngineCapacity,
    FramePlan,
    Ledger,
    Move,
    PlanKind,
    Reason,
)
from scheduler.policies.base import Assessment, DisplaceRule, Policy, best_first, finite
from scheduler.seating import Candidates, Seater, Seating
from scheduler.table import LATENCY, PARKED, RUNNING, Bools, Floats, Ints, RequestTable

RANKED_PER_SLOT = 8
RANKED_AT_LEAST = 64
STARVED_PART = 64
"""One place in so many, and at least one, is for those passed over for too long: in a lasting
overload there are always more of them than there is room for."""

_ENDINGS = {REASON_WAITING_TIME: Reason.WAITING_TIME, REASON_DEADLINE: Reason.DEADLINE_PASSED}
_NOBODY = Assessment(np.empty(0), np.empty(0))


@dataclass(frozen=True)
class Draft:
    """A plan, and what only the manager needs of it."""

    plan: FramePlan
    passed_over: Ints
    """Table rows that were left out though they could have used a place."""
    blocked: Ints
    """Table rows that were chosen and whose KV did not fit."""
    reserve: Ints
    """Table rows of the best that were not chosen, best first: what backfills the frame."""
    is_contended: bool
    """More could have run than did."""
    is_limited: bool
    """Fewer run than there are places, by choice."""


class Planner:
    """Makes plans of the table under one policy; changes nothing but what the policy learns."""

    def __init__(
        self, table: RequestTable, config: SchedulerConfig, policy: Policy, fair: FairFunction
    ) -> None:
        self._table = table
        self._config = config
        self._policy = policy
        self._fair = fair

    def _rank(
        self, estimates: Estimates, index: Ints, capacity: EngineCapacity
    ) -> tuple[Candidates, Assessment]:
        """Score the rows at table positions ``index`` and rank the best of them."""
        table, traits = self._table, self._policy.traits
        assessment = self._policy.assess(estimates) if index.size else _NOBODY
        scores = finite(assessment.scores)
        if traits.blends_fairness and self._config.fairness > 0:
            fairness = self._fair(estimates)
            scores = finite(blend(scores, fairness, self._config.fairness))
        margin = 0.0 if assessment.is_strict else self._config.displace_margin
        if traits.displace is DisplaceRule.BETTER_SCORE and margin:
            running = estimates.rows.state == RUNNING
            scores = np.where(running, finite(scores + np.abs(scores) * margin), scores)
        must_run = self._must_run(estimates, index, capacity.max_batch)
        if must_run:
            scores[list(must_run)] = np.inf
        most = RANKED_PER_SLOT * capacity.max_batch + RANKED_AT_LEAST
        barred = self._late_beyond(estimates, scores, capacity.max_batch)
        barred[list(must_run)] = False
        candidates = Candidates(
            estimates=estimates,
            scores=scores,
            values=assessment.values,
            ranked=best_first(scores, estimates.rows.serial, most, ~barred),
            is_pinned=table.is_pinned[index],
            frames_blocked=table.frames_blocked[index],
            must_run=must_run,
            barred=barred,
            margin=margin,
        )
        return candidates, assessment

    def draft(
        self,
        kind: PlanKind,
        frame: int,
        context: FrameContext,
        capacity: EngineCapacity,
        index: Ints,
        endings: tuple[tuple[Ending, ...], tuple[Ending, ...]],
        limit: int,
        max_moves: int,
    ) -> Draft:
        """Plan for the rows at table positions ``index``.

        Args:
            endings: whom to drop and whom to cancel; not among ``index``.
            limit: most that may run together; inside a frame what its plan decided.
            max_moves: parks and preemptions that are left in this frame.
        """
        # Ascending and all of them: no copy is needed.
        rows = self._table.rows(None if index.size == len(self._table) else index)
        estimates = Estimates(rows, context, self._policy.traits.information)
        candidates, assessment = self._rank(estimates, index, capacity)
        seater = Seater(candidates, capacity, self._config, self._policy.traits, max_moves)
        size = limit
        is_boundary = kind in (PlanKind.FRAME, PlanKind.EARLY)
        if is_boundary and self._policy.traits.may_displace:
            group, size = self._group(candidates, capacity)
            seating = seater.frame(group, size)
        else:
            seating = seater.additions(limit)
        tokens: dict[int, int] = {}
        if is_boundary:
            wanted = estimates.frame_tokens
            if self._policy.traits.is_just_in_time and self._config.turns_per_frame:
                seater.add_line(size, wanted, assessment.slack_s)
            places = [*seating.chosen, *seating.line]
            tokens = dict(zip(places, wanted[places].astype(np.int64).tolist(), strict=True))
        return self._write(
            kind, frame, candidates, assessment, seating, tokens, size, endings, index, capacity
        )

    def _group(self, candidates: Candidates, capacity: EngineCapacity) -> tuple[Ints, int]:
        """The policy's group beside those that must run, and how many run in all."""
        num_must = len(candidates.must_run)
        slots = capacity.max_batch - num_must
        ranked = candidates.ranked[num_must:]
        if slots <= 0 or not ranked.size:
            return ranked[:0], capacity.max_batch
        beside = np.array(list(candidates.must_run), dtype=np.int64)
        group = self._policy.group(ranked, candidates.scores, candidates.estimates, slots, beside)
        is_all = len(group) == min(slots, len(ranked))
        return group, capacity.max_batch if is_all else num_must + len(group)

    def _late_beyond(self, estimates: Estimates, scores: Floats, max_batch: int) -> Bools:
        """Of what is late those beyond their share, while anything can still be in time.

        Each of them makes every step longer for those that can.
        """
        barred = np.zeros(estimates.rows.size, dtype=np.bool_)
        is_late = estimates.is_expired
        late = np.flatnonzero(is_late)
        num_in_time = int((estimates.has_slo & ~is_late).sum())
        most = self._policy.traits.places_for_late(max_batch, num_in_time)
        if late.size > most:
            order = best_first(scores[late], estimates.rows.serial[late], late.size)
            barred[late[order[most:]]] = True
        return barred

    def _urgent_first(self, admitted: list[int], assessment: Assessment) -> list[int]:
        """All of them begin within the frame: the order is by who has the least time to spare."""
        slack_s = assessment.slack_s
        if slack_s is None or not self._policy.traits.is_just_in_time:
            return admitted
        return sorted(admitted, key=lambda place: max(float(slack_s[place]), 0.0))

    def _must_run(self, estimates: Estimates, index: Ints, max_batch: int) -> dict[int, Reason]:
        """Who runs whatever the scores say, in order.

        One urgent newcomer at a time and pinned requests up to ``max_pinned_fraction`` of
        the batch: both are in the senders' hands (a penalty pins, a malformed request is
        urgent). And of those passed over for ``starvation_frames`` a few.
        """
        table, rows = self._table, estimates.rows
        found: dict[int, Reason] = {}
        urgent, pinned = table.is_urgent[index], table.is_pinned[index]
        if urgent.any():
            held = np.flatnonzero(urgent & rows.holds_kv)
            newcomers = np.flatnonzero(urgent & ~rows.holds_kv)
            newcomers = newcomers[np.argsort(rows.serial[newcomers])]
            found |= dict.fromkeys([*held.tolist(), *newcomers[:1].tolist()], Reason.MUST_RUN)
        if pinned.any():
            held = np.flatnonzero(pinned & rows.holds_kv)
            share = min(max_batch, rows.size) * self._config.max_pinned_fraction
            most = max(1, math.ceil(share))
            oldest = held[np.argsort(rows.serial[held])][:most]
            found |= dict.fromkeys(oldest.tolist(), Reason.MUST_RUN)
        if self._policy.traits.is_starvation_free:
            starved = np.flatnonzero(rows.frames_waited >= self._config.starvation_frames)
            if starved.size:
                most = max(1, max_batch // STARVED_PART)
                oldest = starved[np.argsort(rows.serial[starved])][:most]
                for place in oldest.tolist():
                    found.setdefault(place, Reason.STARVED)
        return found

    def _write(
        self,
        kind: PlanKind,
        frame: int,
        candidates: Candidates,
        assessment: Assessment,
        seating: Seating,
        tokens: dict[int, int],
        size: int,
        endings: tuple[tuple[Ending, ...], tuple[Ending, ...]],
        index: Ints,
        capacity: EngineCapacity,
    ) -> Draft:
        book = _Book(self._table, candidates, seating, index, is_limited=size < capacity.max_batch)
        drop, cancel = endings
        plan = FramePlan(
            frame=frame,
            kind=kind,
            num_run=min(max(size, len(seating.chosen)), max(capacity.max_batch, 1)),
            frame_tokens=candidates.estimates.context.frame_tokens,
            run=book.ids(Move.RUN),
            park=book.names(seating.park),
            preempt=book.names(seating.preempt),
            resume=book.ids(Move.RESUME),
            admit=book.names(self._urgent_first(book.places(Move.ADMIT), assessment)),
            line=book.names(seating.line),
            drop=drop,
            cancel=cancel,
            tokens={book.name(place): count for place, count in tokens.items()},
            ledger=book.ledger(assessment, endings),
        )
        out = ~book.is_seated & ~book.rests
        out[seating.line] = False
        waiting = candidates.ranked[~book.is_seated[candidates.ranked]]
        return Draft(
            plan=plan,
            passed_over=index[out],
            blocked=index[np.array(seating.no_kv, dtype=np.int64)],
            reserve=index[waiting],
            is_contended=bool(waiting.size or candidates.barred.any()),
            is_limited=size < capacity.max_batch,
        )


class _Book:
    """Codes and names of a plan, from its seating."""

    def __init__(
        self,
        table: RequestTable,
        candidates: Candidates,
        seating: Seating,
        index: Ints,
        *,
        is_limited: bool,
    ) -> None:
        self._table = table
        self._is_limited = is_limited
        self._index = index
        self._rows = rows = candidates.estimates.rows
        self._scores = candidates.scores
        self.is_seated: Bools = np.zeros(rows.size, dtype=np.bool_)
        self.is_seated[seating.chosen] = True
        self._order = seating.chosen
        moves = np.full(rows.size, MOVE_CODE[Move.WAIT], dtype=np.uint8)
        moves[rows.state == RUNNING] = MOVE_CODE[Move.RUN]
        chosen = np.array(seating.chosen, dtype=np.int64)
        state = rows.state[chosen]
        moves[chosen] = np.where(
            state == RUNNING,
            MOVE_CODE[Move.RUN],
            np.where(state == PARKED, MOVE_CODE[Move.RESUME], MOVE_CODE[Move.ADMIT]),
        )
        moves[seating.park] = MOVE_CODE[Move.PARK]
        moves[seating.preempt] = MOVE_CODE[Move.PREEMPT]
        self._moves = moves
        self._rows_of: list[int] = index.tolist()
        self._order_moves: list[int] = moves[chosen].tolist()
        self.reasons = self._reasons(candidates, seating)

    def _reasons(self, candidates: Candidates, seating: Seating) -> npt.NDArray[np.uint8]:
        rows = self._rows
        code = REASON_CODE
        outside = Reason.FEWER_EARN_MORE if self._is_limited else Reason.OUTRANKED
        reasons = np.full(rows.size, code[outside], dtype=np.uint8)
        now_s = candidates.estimates.context.now_s
        self.rests = (rows.kind == LATENCY) & rows.holds_kv & (rows.due_s > now_s)
        reasons[self.rests] = code[Reason.RESTS]
        reasons[seating.no_kv] = code[Reason.NO_KV]
        reasons[seating.line] = code[Reason.IN_LINE]
        reasons[seating.chosen] = code[Reason.BEST]
        reasons[seating.park] = code[Reason.GIVES_PLACE]
        reasons[seating.preempt] = code[Reason.GIVES_KV]
        for place, reason in (*candidates.must_run.items(), *seating.reasons.items()):
            if self.is_seated[place] or place in seating.reasons:
                reasons[place] = code[reason]
        return reasons

    def name(self, place: int) -> str:
        return self._table.ids[self._rows_of[place]]

    def names(self, places: list[int]) -> tuple[str, ...]:
        ids, rows = self._table.ids, self._rows_of
        return tuple([ids[rows[place]] for place in places])

    def ids(self, move: Move) -> tuple[str, ...]:
        return self.names(self.places(move))

    def places(self, move: Move) -> list[int]:
        code = MOVE_CODE[move]
        moved = zip(self._order, self._order_moves, strict=True)
        return [place for place, move in moved if move == code]

    def ledger(
        self, assessment: Assessment, endings: tuple[tuple[Ending, ...], tuple[Ending, ...]]
    ) -> Ledger:
        table, ended = self._table, [item.request_id for part in endings for item in part]
        is_all = self._index.size == len(table)
        ids = tuple(table.ids) if is_all else tuple([table.ids[row] for row in self._rows_of])
        drop, cancel = endings
        moves = [MOVE_CODE[Move.DROP]] * len(drop) + [MOVE_CODE[Move.CANCEL]] * len(cancel)
        reasons = [REASON_CODE[_ENDINGS[item.reason]] for part in endings for item in part]
        unknown = np.full(len(ended), np.nan)
        return Ledger(
            ids=(*ids, *ended) if ended else ids,
            moves=self._moves.tobytes() + bytes(moves),
            reasons=self.reasons.tobytes() + bytes(reasons),
            scores=np.concatenate([self._scores, unknown]).tobytes(),
            in_time=_packed(assessment.in_time_fraction, unknown),
            slack_s=_packed(assessment.slack_s, unknown),
        )


def _packed(values: Floats | None, more: Floats) -> bytes:
    return b"" if values is None else np.concatenate([values, more]).astype(np.float32).tobytes()
