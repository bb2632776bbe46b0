"""The cases of each experiment: what differs from the paper's mix on the study's engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.simulations.cell import Engine, Settings
from bench.simulations.grid import OUR_KIND, Case
from bench.simulations.options import Options
from bench.workloads import (
    ArrivalSpec,
    AzureLike,
    ClassShares,
    Gamma,
    Poisson,
    ServeGenArrivals,
    Surge,
    TraceArrivals,
)
from engine.simulator import profiles
from engine.simulator.shape import EngineShape

OPERATING_POINT = 1.5
"""Load of the experiments that have one: that of the figures to reach."""
LOADS = (0.6, 0.9, 1.2, 1.5, 2.0)
QUICK_LOADS = (0.9, OPERATING_POINT)
SURGE_LOAD = 0.8
"""Outside of the surge, which has five times as much for a tenth of the window."""


def _at(options: Options) -> float:
    return options.loads[0] if options.loads else OPERATING_POINT


def by_load(options: Options) -> list[Case]:
    """The paper's mix at each load."""
    wanted = options.loads or (QUICK_LOADS if options.is_quick else LOADS)
    return [options.case(f"{load:g}x", load, load) for load in wanted]


def for_savings(options: Options) -> list[Case]:
    """Higher loads, too: who needs fewer engines puts more on each."""
    quick, full = (0.6, 0.9, 1.5, 2.5), (*LOADS, 2.5, 3.0)
    wanted = options.loads or (quick if options.is_quick else full)
    return [options.case(f"{load:g}x", load, load) for load in wanted]


def one_point(options: Options) -> list[Case]:
    """The paper's mix at the operating point."""
    load = _at(options)
    return [options.case(f"{load:g}x", load, load)]


def by_slo_scale(options: Options) -> list[Case]:
    """All targets longer or shorter."""
    scales = (0.5, 1.0, 2.0) if options.is_quick else (0.5, 0.8, 1.0, 1.5, 2.0)
    return [
        options.case(f"SLO x{scale:g}", scale, _at(options), workload={"slo_scale": scale})
        for scale in scales
    ]


MIXES: Mapping[str, ClassShares] = {
    "1:1:1": ClassShares(),
    "latency only": ClassShares(deadline=0, compound=0),
    "deadline only": ClassShares(latency=0, compound=0),
    "compound only": ClassShares(latency=0, deadline=0),
    "1:2:0": ClassShares(deadline=2, compound=0),
    "1:1:0": ClassShares(compound=0),
    "0:1:1": ClassShares(latency=0),
    "1:0:1": ClassShares(deadline=0),
    "2:1:1": ClassShares(latency=2),
    "1:2:1": ClassShares(deadline=2),
    "1:1:2": ClassShares(compound=2),
    "1:1:1 + 1 best effort": ClassShares(best_effort=1),
}
"""Latency : deadline : compound, in programs."""
QUICK_MIXES = ("1:1:1", "latency only", "deadline only", "compound only", "1:2:0")


def by_mix(options: Options) -> list[Case]:
    """Shares of the classes, each mix at the same multiple of its own capacity."""
    names = QUICK_MIXES if options.is_quick else tuple(MIXES)
    found = [
        options.case(name, place, _at(options), workload={"shares": MIXES[name]})
        for place, name in enumerate(names)
    ]
    if not options.is_quick:
        study = {"tags": "study"}
        found.append(options.case("user study", len(found), _at(options), workload=study))
    return found


def by_arrivals(options: Options) -> list[Case]:
    """Steady and bursty arrivals, a surge, and those of the files that were given."""
    load = _at(options)
    named: dict[str, tuple[ArrivalSpec, float]] = {
        "Poisson": (Poisson(), load),
        "as Azure": (AzureLike(), load),
        "Gamma cv 2": (Gamma(cv=2.0), load),
        "Gamma cv 4": (Gamma(cv=4.0), load),
        "surge x5": (Surge(), SURGE_LOAD),
    }
    if options.is_quick:
        del named["Gamma cv 2"]
    for path in options.traces:
        named[Path(path).name] = (arrivals_of(path), load)
    return [
        options.case(name, place, at, workload={"arrivals": spec})
        for place, (name, (spec, at)) in enumerate(named.items())
    ]


def arrivals_of(path: str) -> ArrivalSpec:
    """Of a trace file: ServeGen's are JSON, Mooncake's JSON lines, Azure's CSV."""
    if path.endswith((".json", ".json.gz")):
        return ServeGenArrivals(path=path)
    return TraceArrivals(path=path)


ANALYSTS = ("known", "noisy:0.15", "noisy:0.3", "noisy:0.6", "noisy:1", "noisy:2", "real", "none")
QUICK_ANALYSTS = ("known", "noisy:0.6", "real", "none")


def by_analyst(options: Options) -> list[Case]:
    """From everything known to nothing."""
    names = QUICK_ANALYSTS if options.is_quick else ANALYSTS
    return [
        options.case(name, place, _at(options), analyst=name) for place, name in enumerate(names)
    ]


def by_frame(options: Options) -> list[Case]:
    """How long a frame is: so many decode steps, or so many hundredths of a second."""
    steps = (10, 50, 200) if options.is_quick else (10, 25, 50, 100, 200, 400)
    return [
        _with(options, f"{num} steps", num, {"frame_steps": num, "frame_s": num / 100})
        for num in steps
    ]


def by_cutoff(options: Options) -> list[Case]:
    """p adapted online, and fixed; of the paper's policy as well."""
    fixed = (0.5, 0.95) if options.is_quick else (0.3, 0.5, 0.8, 0.9, 0.95, 1.0)
    both = (*OUR_KIND, "gmax-paper")
    return [
        _with(options, "adapted", 0.0, {}, settings_of=both),
        *(_with(options, f"p = {p:g}", p, {"cutoff": p}, settings_of=both) for p in fixed),
    ]


def by_delta(options: Options) -> list[Case]:
    """Both deltas: what a frame of waiting is worth, and by how much a better one displaces."""
    waiting = (0.0, 0.01) if options.is_quick else (0.0, 0.0005, 0.005, 0.02, 0.1)
    frames = (150,) if options.is_quick else (75, 150, 300, 1200, 10**9)
    margins = (0.0, 0.5) if options.is_quick else (0.0, 0.05, 0.2, 0.5, 1.0)
    swept: list[tuple[str, dict[str, Any]]] = [("as shipped", {})]
    swept += [(f"waiting +{d:g}", {"gmax.STARVATION_PER_FRAME": d}) for d in waiting]
    swept += [(f"first after {num:g}", {"starvation_frames": num}) for num in frames]
    swept += [(f"displace {m:g}", {"displace_margin": m}) for m in margins]
    return [_with(options, name, place, what) for place, (name, what) in enumerate(swept)]


def _with(options: Options, name: str, x: float, settings: Mapping[str, Any], **more: Any) -> Case:
    given: Settings = tuple(settings.items())
    return options.case(name, x, _at(options), settings=given, **more)


def by_batch(options: Options) -> list[Case]:
    """How many may run together, each engine at the same multiple of its own capacity."""
    sizes = (16, 64, 256) if options.is_quick else (16, 32, 64, 128, 256)
    return [
        options.case(
            f"batch {size}",
            size,
            _at(options),
            engine=Engine(shape=_resized(options, max_batch=size), steps=options.engine.steps),
        )
        for size in sizes
    ]


MODELS: Sequence[tuple[str, str, int]] = (
    ("llama-3.1-8b", "a100", 1),
    ("qwen2.5-14b", "a100", 1),
    ("qwen3-30b-a3b", "a100", 1),
    ("llama-3.1-70b", "a100", 4),
    ("llama-3.1-8b", "h100", 1),
    ("llama-3.1-70b", "h200", 2),
)
"""The paper's four models on its GPU, and two on newer ones."""


def by_model(options: Options) -> list[Case]:
    """Roofline profiles of other models and GPUs, with the KV that their memory has room for."""
    wanted = MODELS[:2] if options.is_quick else MODELS
    found = []
    for place, (model, hardware, parallel) in enumerate(wanted):
        tokens = profiles.kv_tokens(
            profiles.model_named(model), profiles.hardware_named(hardware), parallel
        )
        steps = f"{model}@{hardware}" + (f"x{parallel}" if parallel > 1 else "")
        shape = _resized(options, kv_tokens=tokens)
        found.append(
            options.case(steps, place, _at(options), engine=Engine(shape=shape, steps=steps))
        )
    return found


def _resized(options: Options, **changes: Any) -> EngineShape:
    return msgspec.structs.replace(options.engine.shape, **changes)


DISPATCHES = ("round-robin", "least-load", "program", "power-of-2", "power-of-all")


def by_replicas(options: Options) -> list[Case]:
    """Several engines, the load of each as of one, under each way to share it out."""
    counts = (2,) if options.is_quick else (2, 4)
    names = ("least-load", "power-of-2") if options.is_quick else DISPATCHES
    load = _at(options)
    found = [options.case("1 engine", 1, load)]
    for num in counts:
        found += [
            options.case(f"{num} engines, {name}", num, load, replicas=num, dispatch=name)
            for name in names
        ]
    return found


def by_patience(options: Options) -> list[Case]:
    """Senders who want to be refused rather than wait (``waiting_time``), and those who do not."""
    waits = (2.0,) if options.is_quick else (1.0, 2.0, 5.0)
    load = _at(options)
    found = [options.case("no limit", 0.0, load)]
    for wait_s in waits:
        limited = {"waiting_time_s": wait_s}
        found.append(options.case(f"waits {wait_s:g} s", wait_s, load, workload=limited))
    return found
