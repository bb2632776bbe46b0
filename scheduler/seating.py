"""Who gets a place in the batch, within slots, KV and the bound on moves.

A ranking says whom to run; here it meets what the engine has. Requests are indices into the
rows of a frame. Pure: nothing but the arguments decides.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from scheduler.config import SchedulerConfig
from scheduler.estimates import Estimates
from scheduler.plan import EngineCapacity, Reason
from scheduler.policies.base import DisplaceRule, Traits, best_first
from scheduler.table import BEST_EFFORT, PARKED, RUNNING, Bools, Floats, Ints

MAX_FAILURES = 8
"""So many better requests for whom no KV could be taken, and a frame stops trying."""


MAX_FORESEEN_FRACTION = 0.25
"""Of all KV, for calls that are only expected."""

LINE_SPARE_FRACTION = 0.4
"""Of all KV, what stays free where one without KV stands in line: else who takes turns with it
loses KV that was computed, and streams or deadlines alone lose up to a tenth of their tokens."""


class Room:
    """KV tokens and request slots left while a plan is being made."""

    __slots__ = ("kv_tokens", "slots")

    def __init__(self, kv_tokens: int, slots: int) -> None:
        self.kv_tokens = kv_tokens
        self.slots = slots

    def fits(self, kv_tokens: int, extra_tokens: int = 0, extra_slots: int = 0) -> bool:
        return self.slots + extra_slots >= 1 and self.kv_tokens + extra_tokens >= kv_tokens

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


@dataclass
class Seating:
    """Who runs, who leaves, and why. Indices."""

    chosen: list[int] = field(default_factory=list)
    park: list[int] = field(default_factory=list)
    preempt: list[int] = field(default_factory=list)
    line: list[int] = field(default_factory=list)
    no_kv: list[int] = field(default_factory=list)
    """Chosen, but its KV did not fit."""
    reasons: dict[int, Reason] = field(default_factory=dict)


@dataclass(frozen=True)
class Candidates:
    """The ranking of a frame and what seating needs to know of each request."""

    estimates: Estimates
    scores: Floats
    """Finite but for ``inf`` of those that must run; running ones with their margin."""
    values: Floats
    ranked: Ints
    """The best of those that are not barred, best first."""
    is_pinned: Bools
    frames_blocked: Floats
    must_run: dict[int, Reason]
    barred: Bools
    """Who may run only where nobody else can."""
    margin: float
    """Share by which a request must be better to take another's place or KV."""


class Seater:
    """Seats one frame."""

    def __init__(
        self,
        candidates: Candidates,
        capacity: EngineCapacity,
        config: SchedulerConfig,
        traits: Traits,
        max_moves: int,
    ) -> None:
        self._candidates = candidates
        self._scores = candidates.scores
        self._state = candidates.estimates.rows.state
        self._context = candidates.estimates.rows.context_tokens
        most = int(capacity.total_kv_tokens * MAX_FORESEEN_FRACTION)
        foreseen = candidates.estimates.context.foreseen_kv_tokens
        self._foreseen_tokens = int(min(foreseen, most)) if traits.foresees else 0
        self._capacity = capacity
        self._config = config
        self._traits = traits
        self._moves_left = max_moves
        self._room = Room(capacity.free_kv_tokens - self._growth_tokens(), capacity.free_slots)
        self._holders: list[int] | None = None
        blocked = candidates.frames_blocked
        self._is_anyone_blocked_long = bool((blocked >= config.reserve_after_frames).any())
        self._preempted: set[int] = set()
        self._failures = 0
        self._result = Seating()

    def additions(self, slots: int) -> Seating:
        """Everyone running stays; free places go to the best of the rest, as far as KV goes."""
        result, ranked = self._result, self._candidates.ranked.tolist()
        result.chosen = self._worst_first(np.flatnonzero(self._state == RUNNING))[::-1]
        free = slots - len(result.chosen)
        is_blocked = False
        for index in result.chosen:
            result.reasons[index] = Reason.NOBODY_BETTER
        for index in self._blocked_first(ranked):
            if free <= 0:
                break
            if self._is_running(index):
                continue
            if self._leaves_room(index):
                continue
            if self._holds_kv(index) or (not is_blocked and self._room.take(self._kv_need(index))):
                result.chosen.append(index)
                free -= 1
            else:
                result.no_kv.append(index)
                # Nobody will make room for it later: it holds its place.
                is_blocked |= not self._traits.may_displace or self._is_blocked_long(index)
        return self._never_idle(slots)

    def frame(self, group: Ints, size: int) -> Seating:
        """The policy's group in up to ``size`` places."""
        result = self._result
        must = list(self._candidates.must_run)[:size]
        taken = set(must)
        group_list = (
            must + [index for index in group.tolist() if index not in taken][: size - len(must)]
        )
        for index in self._blocked_first(group_list):
            if index not in self._preempted:
                self._seat(index)
        # One that comes first for having been blocked long may have taken a better one's KV.
        result.chosen = [index for index in result.chosen if index not in self._preempted]
        self._displace(size)
        self._fill(size)
        return self._never_idle(size)

    def add_line(self, size: int, wanted: Floats, slack_s: Floats | None) -> None:
        """Whom a part of the frame is left for, behind those that need only a part of it.

        Only requests that would fall behind before the frame ends, and only as far as KV,
        the frame's tokens and the bound on moves go. Who has no KV yet only where there is plenty.

        Args:
            wanted: tokens that each needs in the frame, shape (n,).
        """
        estimates, result = self._candidates.estimates, self._result
        context = estimates.context
        budget = size * context.frame_tokens - int(wanted[result.chosen].sum())
        spare = int(LINE_SPARE_FRACTION * self._capacity.total_kv_tokens)
        is_next = estimates.has_slo & ~estimates.is_expired
        is_next[[*result.chosen, *result.preempt, *result.no_kv]] = False
        if slack_s is not None:
            is_next &= np.abs(slack_s) < context.frame_s
        ranked = self._candidates.ranked
        for index in ranked[is_next[ranked]].tolist():
            if len(result.line) >= self._moves_left or budget <= 0:
                return
            if wanted[index] > budget:
                continue
            need = self._kv_need(index)
            if self._holds_kv(index) or (self._room.fits(need + spare) and self._room.take(need)):
                result.line.append(index)
                budget -= int(wanted[index])

    def _seat(self, index: int) -> None:
        if self._holds_kv(index):
            self._result.chosen.append(index)
            return
        if self._leaves_room(index):
            return
        need = self._kv_need(index)
        if not self._room.fits(need) and self._failures < MAX_FAILURES:
            self._make_room(index, need)
        if self._room.take(need):
            self._result.chosen.append(index)
            return
        self._result.no_kv.append(index)
        if self._is_blocked_long(index):
            # What comes free from here on is kept for it.
            self._room.close()

    def _displace(self, size: int) -> None:
        """Whoever runs and has no place in the group gives way where its place is taken."""
        result = self._result
        chosen = set(result.chosen)
        running = np.flatnonzero(self._state == RUNNING)
        outside = [
            index
            for index in self._worst_first(running)
            if index not in chosen and index not in self._preempted
        ]
        excess = max(len(result.chosen) + len(outside) - size, 0)
        # For nobody they need not leave.
        num_barred = int(self._candidates.barred[outside].sum()) if result.chosen else 0
        most = min(max(excess, num_barred), len(outside), max(self._moves_left, 0))
        if self._traits.displace is DisplaceRule.BETTER_VALUE:
            leaving = self._outvalued(outside, most)
        else:
            leaving = outside[:most]
        self._moves_left -= len(leaving)
        newcomers = sum(not self._is_running(index) for index in result.chosen)
        for place, index in enumerate(leaving):
            replaced = place < newcomers
            result.reasons[index] = Reason.GIVES_PLACE if replaced else Reason.FEWER_EARN_MORE
        result.park = leaving
        gone = set(leaving)
        kept = [index for index in outside if index not in gone]
        result.chosen += kept
        for index in kept:
            result.reasons[index] = Reason.NOBODY_BETTER
        if len(result.chosen) > size:
            self._shed(size)

    def _outvalued(self, outside: list[int], most: int) -> list[int]:
        """Those of ``outside`` that a newcomer's goodput exceeds by the threshold delta."""
        values = self._candidates.values
        leaving: list[int] = []
        newcomers = [index for index in self._result.chosen if not self._is_running(index)]
        remaining = list(outside)
        for newcomer in newcomers:
            threshold = values[newcomer] / (1 + self._config.displace_margin)
            worse = next(
                (
                    index
                    for index in remaining
                    if values[index] < threshold or newcomer in self._candidates.must_run
                ),
                None,
            )
            if worse is not None and len(leaving) < most:
                remaining.remove(worse)
                leaving.append(worse)
        return leaving

    def _shed(self, size: int) -> None:
        """Out of moves: newcomers wait, worst first, until the batch is within its size."""
        chosen = self._result.chosen
        running = [index for index in chosen if self._is_running(index)]
        newcomers = [index for index in chosen if not self._is_running(index)]
        newcomers.sort(key=self._rank_key)
        self._result.chosen = running + newcomers[: max(size - len(running), 0)]

    def _fill(self, size: int) -> None:
        """Give the places that are left to the best of the rest."""
        result = self._result
        taken = {*result.chosen, *result.park, *result.preempt, *result.no_kv}
        ranked = self._candidates.ranked
        for index in ranked.tolist():
            if len(result.chosen) >= size:
                return
            if index not in taken:
                self._try(index)
        rows = self._candidates.estimates.rows
        barred = self._candidates.barred
        is_all = len(ranked) + int(barred.sum()) == rows.size
        if is_all or self._room.kv_tokens <= 0 or self._room.slots <= 0:
            return
        # The best of all did not fit or were too few: whoever fits, however far behind.
        is_left = (self._context + 1 <= self._room.kv_tokens) & ~rows.holds_kv & ~barred
        is_left[ranked] = False
        more = best_first(self._scores, rows.serial, size - len(result.chosen), is_left)
        for index in more.tolist():
            self._try(index)

    def _try(self, index: int) -> None:
        if self._leaves_room(index):
            return
        # Skip, not stop: one that does not fit must not starve those that do.
        if self._holds_kv(index) or self._room.take(self._kv_need(index)):
            self._result.chosen.append(index)
        else:
            self._result.no_kv.append(index)

    def _make_room(self, challenger: int, need: int) -> None:
        """Preempt the worst KV holders, clearly worse than ``challenger``, for it.

        The cost gate of the paper: the stall (bringing the victims' KV back) times the batch's
        token speed must stay below what the challenger still has to give, in tokens.
        """
        estimates = self._candidates.estimates
        rows, context = estimates.rows, estimates.context
        gain = float(estimates.mean_tokens[challenger])
        if rows.tbt_s[challenger] == 0:
            gain += float(rows.input_tokens[challenger])
        speed = context.batch_size / context.step_s
        victims: list[int] = []
        loss, freed = 0.0, 0
        for victim in self._movable_holders():
            if victim in self._preempted or victim in self._candidates.must_run:
                continue
            if not self._is_clearly_worse(victim, challenger):
                if self._traits.displace is DisplaceRule.BETTER_VALUE:
                    continue
                break
            tokens = int(self._context[victim])
            loss += self._stall_s(tokens) * speed
            if loss >= gain or len(victims) >= self._moves_left:
                break
            victims.append(victim)
            freed += tokens
            if self._room.fits(need, freed, len(victims)):
                self._take_kv(victims)
                return
        self._failures += 1

    def _take_kv(self, victims: list[int]) -> None:
        for victim in victims:
            self._room.give(int(self._context[victim]))
            self._result.preempt.append(victim)
            self._preempted.add(victim)
        self._moves_left -= len(victims)

    def _movable_holders(self) -> list[int]:
        """KV holders, the worst first; sorted once a frame."""
        if self._holders is None:
            held = self._candidates.estimates.rows.holds_kv & ~self._candidates.is_pinned
            self._holders = self._worst_first(np.flatnonzero(held))
        return self._holders

    def _is_clearly_worse(self, victim: int, challenger: int) -> bool:
        margin = self._candidates.margin
        worth = float(self._scores[victim])
        if self._traits.displace is DisplaceRule.BETTER_VALUE:
            values = self._candidates.values
            if values[victim] * (1 + self._config.displace_margin) >= values[challenger]:
                return False
            margin = 0.0
        return bool(worth + abs(worth) * margin < self._scores[challenger])

    def _stall_s(self, kv_tokens: int) -> float:
        """How long the engine stands still to bring back so much KV: the cheaper way."""
        recompute_s = self._candidates.estimates.context.step_time.prefill_s(kv_tokens)
        swap_token_s = self._capacity.swap_token_s
        return recompute_s if swap_token_s is None else min(recompute_s, swap_token_s * kv_tokens)

    def _never_idle(self, size: int) -> Seating:
        """Who is barred runs where nobody else can; a prompt that never fits, after them."""
        barred = self._candidates.barred
        if not self._result.chosen and barred.any():
            rows = self._candidates.estimates.rows
            fits = barred & (rows.holds_kv | (self._context + 1 <= self._room.kv_tokens))
            for index in best_first(self._scores, rows.serial, size, fits).tolist():
                self._try(index)
        if not self._result.chosen and self._candidates.ranked.size:
            self._result.chosen = [int(self._candidates.ranked[0])]
        return self._result

    def _leaves_room(self, index: int) -> bool:
        """Best-effort work that would fit, but then calls expected in this frame would not.

        Taking the KV back from it would cost more than the wait. It is not blocked: who comes
        behind it may still enter, and once it has waited long it leaves room for nobody.
        """
        is_patient = self._candidates.estimates.rows.kind[index] == BEST_EFFORT
        if not (self._foreseen_tokens and is_patient) or self._holds_kv(index):
            return False
        if index in self._candidates.must_run or self._is_blocked_long(index):
            return False
        need = self._kv_need(index)
        return self._room.fits(need) and not self._room.fits(need, -self._foreseen_tokens)

    def _kv_need(self, index: int) -> int:
        """KV to have free before admitting: its context and the frame it is about to run."""
        ahead = min(self._frame_tokens, float(self._candidates.estimates.rows.room_tokens[index]))
        return min(int(self._context[index] + ahead), self._capacity.total_kv_tokens)

    @property
    def _frame_tokens(self) -> int:
        return self._candidates.estimates.context.frame_tokens

    def _growth_tokens(self) -> int:
        """KV that those who run will fill before the frame ends."""
        rows = self._candidates.estimates.rows
        left = rows.room_tokens[self._state == RUNNING]
        return int(np.minimum(left, self._frame_tokens).sum())

    def _blocked_first(self, ranked: list[int]) -> list[int]:
        """Those whose KV has not fitted for long come first: smaller ones must not starve them."""
        if not self._is_anyone_blocked_long:
            return ranked
        return sorted(ranked, key=lambda index: not self._is_blocked_long(index))

    def _is_blocked_long(self, index: int) -> bool:
        blocked = self._candidates.frames_blocked[index]
        return bool(blocked >= self._config.reserve_after_frames)

    def _worst_first(self, index: Ints) -> list[int]:
        serial = self._candidates.estimates.rows.serial
        worst: list[int] = index[np.lexsort((-serial[index], self._scores[index]))].tolist()
        return worst

    def _rank_key(self, index: int) -> tuple[float, int]:
        return -float(self._scores[index]), int(self._candidates.estimates.rows.serial[index])

    def _is_running(self, index: int) -> bool:
        return bool(self._state[index] == RUNNING)

    def _holds_kv(self, index: int) -> bool:
        return self._state[index] in (RUNNING, PARKED)
