"""The most that any schedule could have had of a workload, as a task of its own."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from bench.bound import upper_bound
from bench.simulations.cell import Cell, Engine, steps_of
from bench.workloads import WorkloadSpec, build
from engine.simulator.steps import LinearSteps

BIN_S = ((1200.0, 20.0), (math.inf, 40.0))
"""Windows up to so long have such bins. Over half an hour of 1.5x load bins of 40 s gave a bound
less than a millionth above that of 20 s bins, in a fifth of the time."""


class BoundQuestion(msgspec.Struct, frozen=True, kw_only=True, tag="bound"):
    """Of a workload on an engine; see ``bench.bound``."""

    workload: WorkloadSpec
    seed: int
    engine: Engine
    what: Literal["token", "request"]
    replicas: int = 1
    bin_s: float


class BoundFigure(msgspec.Struct, frozen=True, kw_only=True):
    """No schedule has more than so much goodput per second of the window."""

    per_s: float
    status: str


def question_of(cell: Cell, what: Literal["token", "request"]) -> BoundQuestion:
    """Of a cell's workload and engine, whatever its policy."""
    shape = msgspec.structs.replace(cell.engine.shape, mixes_chunks=True)
    engine = msgspec.structs.replace(cell.engine, shape=shape)
    return BoundQuestion(
        workload=cell.workload,
        seed=cell.seed,
        engine=engine,
        what=what,
        replicas=cell.replicas,
        bin_s=next(bin_s for most_s, bin_s in BIN_S if cell.workload.window_s <= most_s),
    )


def bound_of(question: BoundQuestion) -> BoundFigure:
    """Solve it. Raises ValueError for an engine whose step times are not linear."""
    steps, shape = steps_of(question.engine.steps), question.engine.shape
    if not isinstance(steps, LinearSteps):
        raise ValueError(f"no bound for {question.engine.steps}: its step times are not linear")
    bound = upper_bound(
        build(question.workload, question.seed),
        steps,
        max_batch=shape.max_batch,
        chunk_tokens=shape.chunk_tokens,
        swap_token_s=shape.swap_token_s,
        num_replicas=question.replicas,
        bin_s=question.bin_s,
        what=question.what,
    )
    return BoundFigure(per_s=bound.per_s, status=bound.status)
