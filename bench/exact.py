"""The best that any schedule can do on a small instance, and what a policy does on it.

The model is that of the paper's appendix: identical slots, requests with an arrival, a
computing time, a deadline and a goodput that is earned whole or not at all; a request may be
interrupted and moved for free. Times are whole steps.
"""

import itertools
import random
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_flow

from core.slo import DeadlineSlo, RequestTerms
from scheduler.config import SchedulerConfig
from scheduler.frame import FrameManager
from scheduler.lifecycle import RequestState
from scheduler.plan import EngineCapacity
from scheduler.step_time import StepObservation, StepTimeModel

STEP_S = 1.0


@dataclass(frozen=True)
class Job:
    """One request of an instance."""

    arrival: int
    steps: int
    """Output tokens: steps of computing."""
    due: int
    """It counts if its last step ends by then."""
    input_tokens: int

    @property
    def value(self) -> int:
        """Its goodput in tokens if it is in time."""
        return self.input_tokens + self.steps


@dataclass(frozen=True)
class Instance:
    """Some requests and the slots to serve them in."""

    slots: int
    jobs: tuple[Job, ...]


def random_instance(rng: random.Random, max_jobs: int = 8, max_slots: int = 3) -> Instance:
    """Up to eight requests on one to three slots, from loose to hopeless, values far apart."""
    slots = rng.randint(1, max_slots)
    spread = rng.choice((3, 8, 16))
    jobs = []
    for _ in range(rng.randint(2, max_jobs)):
        arrival = rng.randint(0, spread)
        steps = rng.randint(1, 8)
        slack = rng.choice((0, 0, 1, 2, 4, 8))
        value = rng.choice((0, rng.randint(0, 10), rng.randint(0, 100), rng.randint(0, 1000)))
        jobs.append(Job(arrival, steps, arrival + steps + slack, value))
    return Instance(slots, tuple(jobs))


def optimum(instance: Instance) -> int:
    """The most goodput of any offline schedule: the best subset that can all be in time."""
    jobs = [job for job in instance.jobs if job.due - job.arrival >= job.steps]
    subsets = sorted(
        (
            (sum(jobs[index].value for index in subset), subset)
            for size in range(len(jobs) + 1)
            for subset in itertools.combinations(range(len(jobs)), size)
        ),
        reverse=True,
    )
    for value, subset in subsets:
        if _fits([jobs[index] for index in subset], instance.slots):
            return value
    return 0


def _fits(jobs: list[Job], slots: int) -> bool:
    """Whether all can be in time: first what is necessary, then a flow of steps into slots."""
    for start in {job.arrival for job in jobs}:
        for end in {job.due for job in jobs}:
            inside = [job.steps for job in jobs if job.arrival >= start and job.due <= end]
            if sum(inside) > slots * max(end - start, 0):
                return False
    if len(jobs) <= slots:
        return True
    first = min(job.arrival for job in jobs)
    num_times = max(job.due for job in jobs) - first
    source, sink = 0, 1 + len(jobs) + num_times
    graph = np.zeros((sink + 1, sink + 1), dtype=np.int32)
    for place, job in enumerate(jobs, start=1):
        graph[source, place] = job.steps
        times = 1 + len(jobs) - first
        graph[place, times + job.arrival : times + job.due] = 1
    graph[1 + len(jobs) : sink, sink] = slots
    flow = maximum_flow(csr_matrix(graph), source, sink).flow_value
    return bool(flow == sum(job.steps for job in jobs))


def achieved(instance: Instance, policy: str) -> int:
    """The goodput of the real frame manager under ``policy``, told lengths and step time."""
    config = SchedulerConfig(policy=policy, frame_steps=1, max_moves_fraction=1.0)
    frames = FrameManager(config, step_time=StepTimeModel.known(STEP_S))
    left = {f"j{index}": job for index, job in enumerate(instance.jobs)}
    running: dict[str, int] = {}
    parked: dict[str, int] = {}
    goodput = 0
    now = 0
    last = max(job.due for job in instance.jobs)
    while now < last:
        for name, job in left.items():
            if job.arrival == now:
                _arrive(frames, name, job)
        held = len(running) + len(parked)
        capacity = EngineCapacity(instance.slots, 10**9, 10**9, 10**6 - held)
        plan = frames.tick(float(now), capacity)
        if plan is not None:
            for ending in (*plan.drop, *plan.cancel):
                running.pop(ending.request_id, None)
                parked.pop(ending.request_id, None)
                frames.ended(ending.request_id, RequestState.ABORTED)
            for name in plan.park:
                parked[name] = running.pop(name)
                frames.parked(name)
            for name in plan.resume:
                running[name] = parked.pop(name)
                frames.resumed(name)
            for name in plan.admit:
                running[name] = 0
                frames.started(name, float(now))
        now += 1
        frames.observe_step(StepObservation(STEP_S, max(len(running), 1), 0, 0))
        for name in list(running):
            running[name] += 1
            frames.progressed(name, running[name])
            if running[name] == left[name].steps:
                goodput += left[name].value if now <= left[name].due else 0
                del running[name]
                frames.ended(name, RequestState.FINISHED)
    return goodput


def _arrive(frames: FrameManager, name: str, job: Job) -> None:
    slo = DeadlineSlo(float(job.due - job.arrival))
    frames.arrive(
        name,
        RequestTerms(float(job.arrival), slo),
        input_tokens=job.input_tokens,
        max_output_tokens=job.steps,
        known_output_tokens=job.steps,
    )
    frames.forecast(name, [float(job.steps)])
