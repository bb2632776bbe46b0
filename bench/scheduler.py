"""``python -m bench scheduler``: how long the decision core takes to plan a frame.

No server: a frame manager with as many live requests as asked for, in the states that a busy
server has them in, and real frames on it: requests progress, some end and others arrive
between two of them, so that estimates are refreshed as they would be.
"""

import argparse
import gc
import math
import random
import statistics
import tracemalloc
from pathlib import Path
from typing import Any

from bench import report
from core.clock import MonotonicClock
from core.slo import BestEffortSlo, CompoundSlo, DeadlineSlo, LatencySlo, RequestTerms, Slo
from scheduler.config import SchedulerConfig
from scheduler.frame import FrameManager
from scheduler.lifecycle import RequestState
from scheduler.plan import EngineCapacity, PlanKind
from scheduler.policies import CANCEL_SUFFIX, POLICIES
from scheduler.step_time import StepTimeModel

MAX_BATCH = 256
CAPACITY_KV_TOKENS = 2_000_000
ENGINE = StepTimeModel.known(9.5e-3, 40e-6, 65.5e-9, 93.6e-6, 1e-9)
"""An 8B model on one A100."""


class Population:
    """A frame manager under load, and the engine's part played to it."""

    def __init__(self, policy: str, size: int, seed: int) -> None:
        self._rng = random.Random(seed)
        config = SchedulerConfig(policy=policy)
        self.frames = FrameManager(config, step_time=ENGINE)
        self.now_s = 1000.0
        self._num_made = 0
        for _ in range(size):
            self._arrive(self._rng.uniform(0.0, 30.0))

    def _arrive(self, age_s: float) -> None:
        rng = self._rng
        slo: Slo = rng.choice(
            (
                LatencySlo(2.0, 0.1),
                DeadlineSlo(20.0 + age_s),
                CompoundSlo(60.0, f"p{self._num_made // 3}"),
                BestEffortSlo(600.0),
            )
        )
        terms = RequestTerms(self.now_s - age_s, slo, tenant=f"t{rng.randrange(50)}")
        name = f"r{self._num_made}"
        self._num_made += 1
        inputs = min(int(rng.lognormvariate(5.5, 1.2)) + 1, 16_000)
        self.frames.arrive(name, terms, input_tokens=inputs, max_output_tokens=2048)
        length = rng.lognormvariate(5.5, 0.8)
        self.frames.forecast(name, [length * math.exp(rng.gauss(0, 0.5)) for _ in range(32)])

    def capacity(self) -> EngineCapacity:
        """What an engine with these residents has left."""
        held = [request for request in self.frames.live() if request.holds_kv]
        used = sum(request.context_tokens for request in held)
        return EngineCapacity(
            MAX_BATCH, CAPACITY_KV_TOKENS - used, CAPACITY_KV_TOKENS, 4 * MAX_BATCH - len(held)
        )

    def frame(self, clock: MonotonicClock) -> float:
        """Plan a frame, carry it out and let it pass; milliseconds of planning."""
        frames = self.frames
        self.now_s += frames.config.frame_s
        capacity = self.capacity()
        began_s = clock.now_s()
        plan = frames.tick(self.now_s, capacity)
        took_s = clock.now_s() - began_s
        if plan is None or plan.kind is not PlanKind.FRAME:
            raise RuntimeError("a frame passed without a plan")
        for name in plan.preempt:
            frames.preempted(name)
        for name in plan.park:
            frames.parked(name)
        for name in plan.resume:
            frames.resumed(name)
        for name in plan.admit:
            frames.started(name, self.now_s)
        for ending in plan.cancel:
            frames.ended(ending.request_id, RequestState.ABORTED)
        for ending in plan.drop:
            frames.ended(ending.request_id, RequestState.DROPPED)
        running = [item for item in frames.live() if item.state is RequestState.RUNNING]
        for request in running:
            frames.progressed(request.request_id, request.generated_tokens + 25)
        ended = running[:4]
        for request in ended:
            frames.ended(request.request_id, RequestState.FINISHED)
        for _ in range(len(ended) + len(plan.cancel) + len(plan.drop)):
            self._arrive(0.0)
        return took_s * 1000


def measure(policy: str, size: int, num_frames: int) -> list[float]:
    """Milliseconds of planning of each of ``num_frames`` frames after some to warm up."""
    population = Population(policy, size, seed=size)
    clock = MonotonicClock()
    for _ in range(3):
        population.frame(clock)
    gc.collect()
    return [population.frame(clock) for _ in range(num_frames)]


def bytes_per_request(size: int) -> float:
    """Memory that a live request costs in the core, its terms included."""
    gc.collect()
    tracemalloc.start()
    population = Population("gmax", size, seed=1)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del population
    return used / size


def slope(points: dict[int, float]) -> float:
    """Least-squares slope of log time over log size: 1 is linear."""
    logs = [(math.log(size), math.log(value)) for size, value in points.items()]
    mean_x = statistics.fmean(x for x, _ in logs)
    mean_y = statistics.fmean(y for _, y in logs)
    over = sum((x - mean_x) * (y - mean_y) for x, y in logs)
    return over / sum((x - mean_x) ** 2 for x, _ in logs)


def main(argv: list[str]) -> int:
    """Measure, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(prog="python -m bench scheduler", description=__doc__)
    parser.add_argument("--sizes", default="100,1000,10000,50000", help="live requests")
    parser.add_argument("--frames", type=int, default=15, help="frames measured per size")
    parser.add_argument("--policies", default="", help="comma-separated; default: all but +cancel")
    parser.add_argument("--json", type=Path, default=None, metavar="PATH")
    args = parser.parse_args(argv)
    sizes = [int(size) for size in args.sizes.split(",")]
    plain = [name for name in POLICIES if not name.endswith(CANCEL_SUFFIX)]
    names = args.policies.split(",") if args.policies else plain
    rows: list[list[Any]] = []
    raw: dict[str, dict[int, list[float]]] = {}
    for name in names:
        raw[name] = {size: measure(name, size, args.frames) for size in sizes}
        medians = {size: statistics.median(values) for size, values in raw[name].items()}
        over = {size: value for size, value in medians.items() if size >= 1000}
        rows.append([name, *medians.values(), slope(over) if len(over) > 1 else None])
        print(f"{name}: {', '.join(f'{value:.2f} ms' for value in medians.values())}", flush=True)
    memory = bytes_per_request(10_000)
    headers = ["policy", *(f"p50 ms at {size}" for size in sizes), "slope from 1000"]
    print(report.table(headers, rows))
    print(f"memory: {memory:.0f} bytes per live request")
    first = raw[names[0]]
    summary: dict[str, float] = {
        f"plan_ms_p50_{size}": statistics.median(values) for size, values in first.items()
    }
    slopes = {size: statistics.median(v) for size, v in first.items() if size >= 1000}
    if len(slopes) > 1:
        summary["slope"] = slope(slopes)
    summary["bytes_per_request"] = memory
    report.write(args.json, "scheduler", summary, {"policy": names[0], "frames_ms": raw})
    return 0
