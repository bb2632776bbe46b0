"""Which programs a workload has: applications, classes and objectives, of a spec and a seed."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from bench import calls
from bench.workloads import arrivals, recorded, traces
from bench.workloads.applications import APPLICATIONS, MAX_OUTPUT, Application, Stages
from bench.workloads.arrivals import ArrivalSpec, AzureLike
from bench.workloads.lengths import pick
from core.slo import BestEffortSlo, CompoundSlo, DeadlineSlo, LatencySlo, OnMiss
from engine.simulator.workload import SimCall, SimProgram, SimSlo, SimStage, Workload

CLASSES = ("latency", "deadline", "compound", "best_effort")
ARRIVALS, REQUESTS = 0, 1
"""Streams of chance of a seed."""
NAMES_PER_PROGRAM = 1 << 20
"""Program i (from 1) names its prefixes from i * NAMES_PER_PROGRAM on; below are shared ones."""
TRACE_NAMES = 1 << 60
"""Names of a trace's texts are above it."""


class ClassShares(msgspec.Struct, frozen=True, kw_only=True):
    """Weights of the request classes, in programs; a program of many calls is one."""

    latency: float = 1.0
    deadline: float = 1.0
    compound: float = 1.0
    best_effort: float = 0.0

    def __post_init__(self) -> None:
        _check_weights(self)


class ApplicationShares(msgspec.Struct, frozen=True, kw_only=True):
    """Weights of the applications, in programs. The paper names none: equal unless told."""

    chatbot: float = 1.0
    deep_research: float = 1.0
    math_reasoning: float = 1.0
    code_generation: float = 1.0

    def __post_init__(self) -> None:
        _check_weights(self)


def _check_weights(shares: ClassShares | ApplicationShares) -> None:
    weights = msgspec.structs.astuple(shares)
    if not all(0 <= weight < math.inf for weight in weights) or sum(weights) <= 0:
        raise ValueError("shares are numbers, 0 or more, not all of them 0")


class Targets(msgspec.Struct, frozen=True, kw_only=True):
    """Objectives in seconds; the paper's, apart from best effort's (the product's default).

    Attributes:
        stage_s: a program's deadline for each of its stages.
    """

    ttft_s: float = 2.0
    tbt_s: float = 0.1
    deadline_s: float = 20.0
    stage_s: float = 20.0
    best_effort_s: float = 600.0


class WorkloadSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that a workload is, but the seed.

    Attributes:
        rate_per_s: programs that arrive in a second; a surge comes on top.
        window_s: in which they arrive.
        tags: "mix": the class is drawn by ``shares``, then the application by
            ``applications`` times the user study's share of that class. "study": the application
            is drawn, then the class by the user study; ``shares.best_effort`` is the part of all
            shares that is best effort, the other shares are not used.
        slo_scale: multiplies all ``targets`` but best effort's.
        requests: path of a trace (Azure, Mooncake, or ServeGen with its ``pool``): single
            requests have its lengths in its order, from the first on and over again, and share
            the prefixes that its own did. Programs of many calls are unaffected.
        pool: of a ServeGen ``requests``.
        calls: path of a log of real call graphs: compound programs are those, each a little
            longer or shorter. Their application is the log's source.
        sources: which of the log's workloads; none named: all.
        on_miss: of all programs.
        waiting_time_s: of all programs.
    """

    rate_per_s: float
    window_s: float = 3600.0
    tags: Literal["mix", "study"] = "mix"
    shares: ClassShares = ClassShares()
    applications: ApplicationShares = ApplicationShares()
    targets: Targets = Targets()
    slo_scale: float = 1.0
    arrivals: ArrivalSpec = AzureLike()
    requests: str = ""
    pool: str = "m-large"
    calls: str = ""
    sources: tuple[str, ...] = ()
    on_miss: OnMiss = OnMiss.FINISH
    waiting_time_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("rate_per_s", "window_s", "slo_scale"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is a number above 0")


def paper_spec(rate_per_s: float, window_s: float = 3600.0, **changes: Any) -> WorkloadSpec:
    """The paper's workload: 1:1:1, its targets, arrivals as of the Azure trace.

    ``changes`` are fields of ``WorkloadSpec``, such as ``arrivals=Poisson()``.
    """
    return WorkloadSpec(rate_per_s=rate_per_s, window_s=window_s, **changes)


def build(spec: WorkloadSpec, seed: int) -> Workload:
    """The workload of a spec, the same to the byte for a seed.

    Program i of a seed is the same whatever arrival process, rate or window: those are drawn
    apart. Raises OSError or ValueError for a trace or log that cannot be read.
    """
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(ARRIVALS,)))
    times = arrivals.draw(spec.arrivals, spec.rate_per_s, spec.window_s, rng)
    programs = tuple(_programs(spec, seed, times.tolist()))
    name = f"{type(spec.arrivals).__name__} {spec.rate_per_s:g}/s {spec.tags} seed {seed}"
    return Workload(programs=programs, window_s=spec.window_s, name=name)


def _programs(spec: WorkloadSpec, seed: int, times: list[float]) -> Iterator[SimProgram]:
    singles = _singles(spec)
    logged = recorded.from_calls(Path(spec.calls), sources=spec.sources) if spec.calls else []
    for index, arrival_s in enumerate(times):
        # One generator a program: what a program draws does not move the ones behind it.
        rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(REQUESTS, index)))
        names = itertools.count((index + 1) * NAMES_PER_PROGRAM)
        kind, application = _tagged(spec, rng)
        name = application.name
        if kind == "compound" and logged:
            name, stages = _logged(logged, rng, names)
        elif kind == "compound":
            stages = application.compound(rng, names)
        elif singles is not None:
            name, stages = "trace", (SimStage(calls=(singles(rng),)),)
        else:
            stages = application.single(rng)
        yield SimProgram(
            arrival_s=arrival_s,
            application=name,
            slo=_slo(spec, kind, len(stages), name, index),
            stages=stages,
            on_miss=spec.on_miss,
            waiting_time_s=spec.waiting_time_s,
        )


# Classes and objectives.


def _tagged(spec: WorkloadSpec, rng: np.random.Generator) -> tuple[str, Application]:
    """Class and application of one program."""
    shares = msgspec.structs.astuple(spec.shares)
    at_class, at_application = rng.random(2).tolist()
    weights = [getattr(spec.applications, name) for name in APPLICATIONS]
    applications = list(APPLICATIONS.values())
    if spec.tags == "mix":
        kind = CLASSES[pick(shares, at_class)]
        if kind != "best_effort":
            studied = [getattr(application.study, kind) for application in applications]
            weights = [weight * share for weight, share in zip(weights, studied, strict=True)]
        return kind, applications[pick(weights, at_application)]
    application = applications[pick(weights, at_application)]
    best_effort = spec.shares.best_effort / sum(shares)
    studied = [share * (1 - best_effort) / sum(application.study) for share in application.study]
    return CLASSES[pick((*studied, best_effort), at_class)], application


def _slo(spec: WorkloadSpec, kind: str, num_stages: int, application: str, index: int) -> SimSlo:
    targets, scale = spec.targets, spec.slo_scale
    if kind == "latency":
        return LatencySlo(targets.ttft_s * scale, targets.tbt_s * scale)
    if kind == "deadline":
        return DeadlineSlo(targets.deadline_s * scale)
    if kind == "compound":
        deadline_s = targets.stage_s * num_stages * scale
        return CompoundSlo(deadline_s, f"{application}-{index}", application=application)
    return BestEffortSlo(targets.best_effort_s)


# Lengths from files.


def _logged(
    logged: Sequence[calls.Program], rng: np.random.Generator, names: Iterator[int]
) -> tuple[str, Stages]:
    """One of the log's programs, a little longer or shorter."""
    program = logged[int(rng.integers(len(logged)))]
    factor = float(rng.lognormal(0.0, calls.JITTER))
    return program.source, recorded.stages_of(recorded.varied(program, factor), names)


def _singles(spec: WorkloadSpec) -> Callable[[np.random.Generator], SimCall] | None:
    """What makes the next single request of a trace; None without one."""
    if not spec.requests:
        return None
    path = Path(spec.requests)
    if path.name.endswith((".json", ".json.gz")):
        return _of_clients(traces.read_servegen(path, spec.pool))
    return _in_order(traces.read(path))


def _in_order(trace: traces.Trace) -> Callable[[np.random.Generator], SimCall]:
    places = itertools.count()

    def following(rng: np.random.Generator) -> SimCall:
        # Another round of the trace is other texts: its names are its own.
        begun, place = divmod(next(places), len(trace.requests))
        offset = TRACE_NAMES + begun * len(trace.requests)
        request = trace.requests[place]
        return SimCall(
            input_tokens=max(request.input_tokens, 1),
            output_tokens=max(request.output_tokens, 1),
            max_output_tokens=max(request.output_tokens, MAX_OUTPUT),
            prefix=offset + request.prefix if request.prefix else 0,
            prefix_tokens=request.prefix_tokens,
            leaves=offset + place + 1,
        )

    return following


def _of_clients(clients: Sequence[traces.Client]) -> Callable[[np.random.Generator], SimCall]:
    """Of a client drawn by its requests of the day; input and output apart, as the file is."""
    weights = [client.weight for client in clients]

    def following(rng: np.random.Generator) -> SimCall:
        client = clients[pick(weights, float(rng.random()))]
        tokens = max(round(client.input_tokens[rng.integers(len(client.input_tokens))]), 1)
        output = max(round(client.output_tokens[rng.integers(len(client.output_tokens))]), 1)
        return SimCall(
            input_tokens=tokens,
            output_tokens=output,
            max_output_tokens=max(output, MAX_OUTPUT),
        )

    return following
