"""Which replica gets a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec

from core.names import name_hash
from engine.simulator.job import Job
from engine.simulator.replica import Replica
from scheduler.config import SchedulerConfig
from scheduler.replicas import PowerOfK, ReplicaOffer, Sampler


class Dispatcher(Protocol):
    """Routes at once, or keeps a call and binds it when a replica has room."""

    def route(self, job: Job, replicas: Sequence[Replica], now_s: float) -> int | None:
        """The replica of a call that arrives; None: ``assign`` will tell."""
        ...

    def assign(self, replicas: Sequence[Replica], now_s: float) -> list[tuple[Job, int]]:
        """Calls that get a replica now."""
        ...

    def waiting(self) -> list[Job]:
        """Calls without a replica."""
        ...


@runtime_checkable
class Queue(Dispatcher, Protocol):
    """Keeps calls as a server would: their time runs while they wait here.

    A dispatcher without it is a door of the experiment's own (a closed loop), and patience
    begins behind it.
    """

    def withdraw(self, job: Job) -> None:
        """A call that waits here is over."""
        ...


class _AtOnce:
    """Keeps nothing."""

    def assign(self, replicas: Sequence[Replica], now_s: float) -> list[tuple[Job, int]]:
        return []

    def waiting(self) -> list[Job]:
        return []


class OnlyOne(_AtOnce):
    """The first replica."""

    def route(self, job: Job, replicas: Sequence[Replica], now_s: float) -> int:
        return 0


class RoundRobin(_AtOnce):
    """In turn."""

    def __init__(self) -> None:
        self._next = 0

    def route(self, job: Job, replicas: Sequence[Replica], now_s: float) -> int:
        index = self._next % len(replicas)
        self._next += 1
        return index


class LeastLoad(_AtOnce):
    """Where the fewest calls are; of equals the first."""

    def route(self, job: Job, replicas: Sequence[Replica], now_s: float) -> int:
        return min(range(len(replicas)), key=lambda index: replicas[index].num_live)


class ByProgram(_AtOnce):
    """All calls of a program on one replica: its prefixes are there."""

    def route(self, job: Job, replicas: Sequence[Replica], now_s: float) -> int:
        return name_hash(str(job.program)) % len(replicas)


class _AmongFitting:
    """Draws only replicas that have the KV for a call."""

    def __init__(self, rng: Sampler) -> None:
        self._rng = rng
        self.fitting: frozenset[int] = frozenset()

    def sample(self, population: Sequence[int], k: int) -> list[int]:
        among = [index for index in population if index in self.fitting]
        return self._rng.sample(among, min(k, len(among)))


class PowerOfKDispatch:
    """The project's own: dummies on K replicas, bound as late as possible."""

    def __init__(self, num_replicas: int, k: int, config: SchedulerConfig, rng: Sampler) -> None:
        self._sampler = _AmongFitting(rng)
        self._queue = PowerOfK(num_replicas, k, config, self._sampler)
        self._jobs: dict[str, Job] = {}

    def route(self, job: Job, replicas: Sequence[Replica], now_s: float) -> None:
        self._jobs[job.key] = job
        self._sampler.fitting = frozenset(
            replica.index for replica in replicas if replica.can_hold(job.call)
        )
        self._queue.arrive(
            job.key,
            job.terms,
            input_tokens=job.call.input_tokens,
            max_output_tokens=job.call.max_output_tokens,
        )

    def assign(self, replicas: Sequence[Replica], now_s: float) -> list[tuple[Job, int]]:
        if not self._jobs:
            return []
        offers = {}
        for replica in replicas:
            free = replica.places()
            if free:
                offers[replica.index] = ReplicaOffer(
                    capacity=msgspec.structs.replace(replica.capacity(), free_slots=free),
                    step_time=replica.frames.step_time,
                    num_running=replica.frames.num_running,
                    mean_context_tokens=replica.frames.mean_context_tokens,
                )
        if not offers:
            return []
        return [
            (self._jobs.pop(item.request_id), item.replica)
            for item in self._queue.assign(now_s, offers)
        ]

    def waiting(self) -> list[Job]:
        return list(self._jobs.values())

    def withdraw(self, job: Job) -> None:
        del self._jobs[job.key]
        self._queue.withdraw(job.key)
