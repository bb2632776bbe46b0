"""One run of a comparison, as data: what names it, caches it and can be sent to a process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.workloads import WorkloadSpec
from engine.simulator import measured, profiles
from engine.simulator.shape import EngineShape
from engine.simulator.steps import A100_LLAMA_8B, StepTime
from scheduler.config import SchedulerConfig
from scheduler.policies import CANCEL_SUFFIX, CHOICES, ORACLES, POLICIES

Value = bool | int | float | str
Settings = tuple[tuple[str, Value], ...]

STUDY_STEPS = "a100-llama-8b"
"""``engine.simulator.steps.A100_LLAMA_8B``; other engines are MODEL@HARDWARE or MODEL@HARDWARExN
of ``engine.simulator.profiles``, or the path of a CSV of measured steps."""
DEFAULT_ANALYST = "noisy:0.6"
KNOWN = "known"
CUTOFF = "cutoff"
"""Setting of a fixed cutoff p, which is no field of ``SchedulerConfig``."""
CONSTANT = "gmax."
"""In front of a constant of ``scheduler.policies.gmax``: for studies only."""
PROMPTS_FIRST = ("fcfs",)
"""Policies whose engine does not mix prompts into decodes: vLLM as the paper had it."""


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """A simulated engine: its sizes, and the name of its speed."""

    shape: EngineShape = EngineShape()
    steps: str = STUDY_STEPS


class Cell(msgspec.Struct, frozen=True, kw_only=True, tag="cell"):
    """One policy on one workload.

    Attributes:
        analyst: noisy:SIGMA, known, none or real; see ``bench.simulations.analysts``.
        settings: fields of ``SchedulerConfig``, ``cutoff``, or ``gmax.CONSTANT``.
        dispatch: with more than one replica; see ``bench.simulations.play.DISPATCH``.
        goodput: targets of ``--goodput``, in milliseconds.
    """

    policy: str
    workload: WorkloadSpec
    seed: int
    engine: Engine = Engine()
    analyst: str = DEFAULT_ANALYST
    settings: Settings = ()
    replicas: int = 1
    dispatch: str = "only"
    goodput: tuple[tuple[str, float], ...] = ()

    @property
    def config(self) -> SchedulerConfig:
        """Of the scheduler; ValueError for a setting that it has not."""
        own = {key: value for key, value in self.settings if not _is_ours(key)}
        return msgspec.convert({**own, "policy": self.policy}, SchedulerConfig, strict=False)


def _is_ours(key: str) -> bool:
    return key == CUTOFF or key.startswith(CONSTANT)


def base_policy(policy: str) -> str:
    """The name of a policy without ``+cancel``."""
    return policy.removesuffix(CANCEL_SUFFIX)


def split_label(label: str) -> tuple[str, Settings]:
    """A policy and its settings, of a label such as ``gmax:frame_steps=25:goodput=request``.

    Raises ValueError that says what is wrong.
    """
    policy, *pairs = label.split(":")
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {CHOICES}, got {policy!r}")
    settings = parse_settings(pairs)
    own = {key: value for key, value in settings if not _is_ours(key)}
    try:
        msgspec.convert({**own, "policy": policy}, SchedulerConfig, strict=False)
    except ValueError as error:
        raise ValueError(f"{label}: {error}") from error
    return policy, settings


def parse_settings(pairs: Sequence[str]) -> Settings:
    """KEY=VALUE pairs; ValueError that names the first that is none."""
    settings: dict[str, Value] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        is_field = key in SchedulerConfig.__struct_fields__ and key != "policy"
        if not equals or not (is_field or _is_ours(key)):
            raise ValueError(f"a setting is FIELD=VALUE of SchedulerConfig, got {pair!r}")
        settings[key] = text if is_field and key.startswith(("goodput", "fair")) else _value(text)
    return tuple(sorted(settings.items()))


def _value(text: str) -> Value:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def cell_of(
    label: str, workload: WorkloadSpec, seed: int, engine: Engine, analyst: str, **more: Any
) -> Cell:
    """A cell of a policy's label, as the evaluation wants it.

    Oracles know lengths and programs; a policy of ``PROMPTS_FIRST`` computes prompts first.
    """
    policy, settings = split_label(label)
    base = base_policy(policy)
    if base in PROMPTS_FIRST:
        shape = msgspec.structs.replace(engine.shape, mixes_chunks=False)
        engine = msgspec.structs.replace(engine, shape=shape)
    settings = tuple(sorted({**dict(more.pop("settings", ())), **dict(settings)}.items()))
    return Cell(
        policy=policy,
        workload=workload,
        seed=seed,
        engine=engine,
        analyst=KNOWN if base in ORACLES else analyst,
        settings=settings,
        **more,
    )


def steps_of(name: str) -> StepTime:
    """Step times by name. Raises OSError or ValueError that says what a name may be."""
    if name == STUDY_STEPS:
        return A100_LLAMA_8B
    if name.endswith(".csv"):
        return measured.fit(measured.read(Path(name)))
    model, at, hardware = name.partition("@")
    if not at:
        raise ValueError(f"engine must be {STUDY_STEPS}, MODEL@HARDWARE or a CSV, got {name!r}")
    hardware, _, parallel = hardware.partition("x")
    return profiles.named(model, hardware, int(parallel) if parallel else 1)
