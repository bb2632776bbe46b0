"""Power-of-K over replicas: a request waits for several and is bound to one as late as possible.

Paper, section JITServe across Design Space. Each request gets K dummies on K of the M
replicas, drawn at random; every replica prices its own dummies with its own step times; the
best dummy of all that fits wins, and the request's other dummies are gone. No request is
bound before a replica has room for it, so a slow or stuck replica holds nothing back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np

from core.slo import RequestTerms
from scheduler.config import SchedulerConfig
from scheduler.estimates import Estimates, FrameContext
from scheduler.lengths import LengthEstimates, OnlineClassLengths, equal_mass_points, refresh
from scheduler.lifecycle import RequestState
from scheduler.objective import GoodputObjective, objective_of
from scheduler.plan import EngineCapacity
from scheduler.policies import POLICIES, Policy
from scheduler.policies.base import best_first, finite
from scheduler.programs import Programs
from scheduler.request import Request
from scheduler.step_time import StepTimeModel
from scheduler.table import Bools, Floats, Ints, Points, RequestTable
from scheduler.tenants import Tenants

LOOK_AHEAD = 16
"""Dummies looked at beyond a replica's free slots: others may take the first ones."""


class Sampler(Protocol):
    """Where the randomness comes from; ``random.Random`` is one."""

    def sample(self, population: Sequence[int], k: int) -> list[int]:
        """``k`` different members."""
        ...


class ReplicaOffer(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica can take now."""

    capacity: EngineCapacity
    """``free_slots`` is how many more requests it takes in this round."""
    step_time: StepTimeModel
    """Its own: replicas may be of different speed."""
    num_running: int = 0
    mean_context_tokens: float = 0.0


class Assignment(msgspec.Struct, frozen=True):
    """A request is bound to a replica."""

    request_id: str
    replica: int
    score: float


class _Queue:
    """One replica's dummies, priced, and the room that it has left."""

    def __init__(
        self, replica: int, rows: Ints, scores: Floats, need: Floats, capacity: EngineCapacity
    ) -> None:
        self.replica = replica
        self.rows = rows
        self.scores = scores
        self._need = need
        self._slots = capacity.free_slots
        self._kv_tokens = capacity.free_kv_tokens

    def head(self, is_free: Bools, serial: Ints, k: int) -> Ints:
        """Places of the best dummies that are still free and fit, a few more than it takes."""
        if self._slots < 1 or not self.scores.size:
            return np.empty(0, dtype=np.int64)
        among = is_free[self.rows] & (self._need <= self._kv_tokens)
        return best_first(self.scores, serial[self.rows], self._slots * k + LOOK_AHEAD, among)

    def take(self, place: int) -> bool:
        """Bind the dummy at ``place`` if it fits."""
        if self._slots < 1 or self._need[place] > self._kv_tokens:
            return False
        self._slots -= 1
        self._kv_tokens -= int(self._need[place])
        return True


class PowerOfK:
    """The shared queue in front of the replicas. Pure: randomness and time are passed in."""

    def __init__(
        self,
        num_replicas: int,
        k: int,
        config: SchedulerConfig,
        rng: Sampler,
        *,
        lengths: LengthEstimates | None = None,
        objective: GoodputObjective | None = None,
    ) -> None:
        """Make an empty queue.

        Args:
            k: dummies per request; ``num_replicas`` covers all of them.

        Raises:
            ValueError: no replica, or ``k`` not between 1 and their number.
        """
        if num_replicas < 1 or not 1 <= k <= num_replicas:
            raise ValueError(f"k must be between 1 and the {num_replicas} replicas, got {k}")
        self._objective = objective_of(config.goodput, objective)
        self._k = k
        self._rng = rng
        self._config = config
        self._lengths: LengthEstimates = lengths or OnlineClassLengths()
        self._policies: list[Policy] = [POLICIES[config.policy]() for _ in range(num_replicas)]
        self._table = RequestTable()
        self._programs = Programs()
        self._tenants = Tenants()
        self._waiting: dict[str, Request] = {}
        self._is_dummy: Bools = np.zeros((num_replicas, 64), dtype=np.bool_)
        """Shape (replicas, rows of the table)."""
        self._num_arrived = 0

    def __len__(self) -> int:
        """Requests not yet bound."""
        return len(self._waiting)

    @property
    def num_replicas(self) -> int:
        return len(self._policies)

    def arrive(
        self,
        request_id: str,
        terms: RequestTerms,
        *,
        input_tokens: int,
        max_output_tokens: int,
        lengths: Floats | Points | None = None,
    ) -> tuple[int, ...]:
        """A request waits from now on; the replicas that have a dummy of it.

        Args:
            lengths: a forecast of its output tokens; without one its class's.

        Raises:
            ValueError: the id is waiting already, or the forecast is no list of lengths.
        """
        if request_id in self._waiting:
            raise ValueError(f"request {request_id!r} is already waiting")
        points = None if lengths is None else equal_mass_points(lengths)
        request = Request(
            request_id,
            self._num_arrived,
            terms,
            input_tokens=input_tokens,
            max_output_tokens=max_output_tokens,
        )
        self._num_arrived += 1
        row = self._table.add(
            request, program=self._programs.enter(terms), tenant=self._tenants.join(terms.tenant)
        )
        self._table.points[row] = (
            self._lengths.points(request.slo_type) if points is None else points
        )
        self._waiting[request_id] = request
        while row >= self._is_dummy.shape[1]:
            self._is_dummy = np.concatenate([self._is_dummy, np.zeros_like(self._is_dummy)], axis=1)
        replicas = tuple(sorted(self._rng.sample(range(self.num_replicas), self._k)))
        self._is_dummy[:, row] = False
        self._is_dummy[list(replicas), row] = True
        return replicas

    def dummies(self, request_id: str) -> tuple[int, ...]:
        """Replicas on which it waits; none once it is bound or gone."""
        request = self._waiting.get(request_id)
        if request is None:
            return ()
        return tuple(np.flatnonzero(self._is_dummy[:, request.row]).tolist())

    def withdraw(self, request_id: str) -> bool:
        """Its sender left, or it was dropped; whether it was still waiting."""
        request = self._waiting.pop(request_id, None)
        if request is None:
            return False
        self._remove(request)
        return True

    def assign(self, now_s: float, offers: Mapping[int, ReplicaOffer]) -> list[Assignment]:
        """Bind as many waiting requests as the replicas of ``offers`` take, the best first.

        Raises:
            IndexError: a replica that there is not.
        """
        for replica in offers:
            if not 0 <= replica < self.num_replicas:
                raise IndexError(f"there is no replica {replica}")
        table = self._table
        stale = np.flatnonzero(table.is_stale[: len(table)])
        refresh(table, stale, self._config.length_quantile)
        queues = [self._price(now_s, replica, offer) for replica, offer in sorted(offers.items())]
        is_free = np.ones(len(table), dtype=np.bool_)
        bound: list[Assignment] = []
        # Rounds: others may have taken what a replica looked at first.
        while round_of := self._bind(queues, is_free):
            bound += round_of
        for assignment in bound:
            self._remove(self._waiting.pop(assignment.request_id))
        return bound

    def _bind(self, queues: list[_Queue], is_free: Bools) -> list[Assignment]:
        """One round: the best of the best dummies of every replica that still has room."""
        table = self._table
        heads = [queue.head(is_free, table.serial, self._k) for queue in queues]
        scores = np.concatenate(
            [queue.scores[head] for queue, head in zip(queues, heads, strict=True)] or [np.empty(0)]
        )
        owner = np.repeat(np.arange(len(queues)), [head.size for head in heads])
        places = np.concatenate([*heads, np.empty(0, dtype=np.int64)])
        rows = np.array(
            [queues[who].rows[place] for who, place in zip(owner, places, strict=True)],
            dtype=np.int64,
        )
        bound: list[Assignment] = []
        # Ties go to whom arrived first, then to the replica with the lower number.
        for at in np.lexsort((owner, table.serial[rows], -scores)).tolist():
            queue, row = queues[owner[at]], int(rows[at])
            if is_free[row] and queue.take(int(places[at])):
                is_free[row] = False
                bound.append(Assignment(table.ids[row], queue.replica, float(scores[at])))
        return bound

    def _price(self, now_s: float, replica: int, offer: ReplicaOffer) -> _Queue:
        """A replica's dummies at its own step times."""
        table = self._table
        mine = np.flatnonzero(self._is_dummy[replica, : len(table)])
        ahead = np.minimum(table.max_output_tokens[mine], self._config.frame_steps)
        need = np.minimum(table.input_tokens[mine] + ahead, offer.capacity.total_kv_tokens)
        scores: Floats = np.empty(0)
        if mine.size and offer.capacity.free_slots >= 1:
            policy = self._policies[replica]
            context = self._context(now_s, offer, int(mine.size))
            estimates = Estimates(table.rows(mine), context, policy.traits.information)
            scores = finite(policy.assess(estimates).scores)
        return _Queue(replica, mine, scores, need, offer.capacity)

    def _context(self, now_s: float, offer: ReplicaOffer, num_dummies: int) -> FrameContext:
        capacity = offer.capacity
        likely = offer.num_running + min(capacity.free_slots, num_dummies)
        return FrameContext(
            now_s=now_s,
            step_time=offer.step_time,
            objective=self._objective,
            programs=self._programs,
            batch_size=max(1, min(likely, capacity.max_batch)),
            mean_context_tokens=offer.mean_context_tokens,
            frame_steps=self._config.frame_steps,
            frame_s=self._config.frame_s,
            average_tokens=max(self._lengths.average_tokens, 1.0),
            tenant_service=self._tenants.service(),
        )

    def _remove(self, request: Request) -> None:
        table, row = self._table, request.row
        program, tenant = int(table.program[row]), int(table.tenant[row])
        if program >= 0:
            self._programs.leave(program, input_tokens=0, output_tokens=0)
        self._tenants.leave(tenant)
        last = len(table) - 1
        self._is_dummy[:, row] = self._is_dummy[:, last]
        table.remove(row, RequestState.RUNNING)
