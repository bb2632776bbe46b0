"""Programs as call graphs of real ones were: stages, calls and tools of ``bench.calls.read``."""

from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec

from bench import calls
from bench.workloads.applications import MAX_OUTPUT, Stages
from engine.simulator.workload import SimCall, SimStage


def from_calls(path: Path, *, sources: Collection[str] = ()) -> list[calls.Program]:
    """The programs of a CSV with the columns of ``compound_calls.csv``.

    Args:
        sources: which of its workloads; none named: all.

    Raises OSError, or ValueError naming the line, or the source that it lacks.
    """
    programs = calls.read(path)
    missing = set(sources) - {program.source for program in programs}
    if missing:
        raise ValueError(f"{path}: no calls of {', '.join(sorted(missing))}")
    return [program for program in programs if not sources or program.source in sources]


def stages_of(program: calls.Program, names: Iterator[int]) -> Stages:
    """A program for the simulator.

    A chain's prompt that has room for the latest context of its role is taken to continue it;
    one that has room for that context's prompt, to continue that. The logs have lengths only:
    this is how agents work, not what was recorded. Lengths of 0 ("not logged") count as 1.
    """
    latest: dict[str, SimCall] = {}
    stages = []
    for stage in program.stages:
        found = [
            _call(stage.role, tokens, output, latest.get(stage.role), next(names))
            for tokens, output in stage.calls
        ]
        if len(found) == 1:
            latest[stage.role] = found[0]
        tools = ("tool",) if stage.has_tools else ()
        stages.append(SimStage(calls=tuple(found), tool_s=stage.tool_s, tools=tools))
    return tuple(stages)


def varied(program: calls.Program, factor: float) -> calls.Program:
    """With every length ``factor`` times as long: one for all, so that contexts still fit."""
    stages = [
        msgspec.structs.replace(
            stage,
            calls=tuple((round(size * factor), round(out * factor)) for size, out in stage.calls),
        )
        for stage in program.stages
    ]
    return msgspec.structs.replace(program, stages=tuple(stages))


ROUNDING = 2
"""Tokens by which a varied prompt may miss the context that it continues."""


def _call(
    role: str, input_tokens: int, output_tokens: int, before: SimCall | None, name: int
) -> SimCall:
    input_tokens, output_tokens = max(input_tokens, 1), max(output_tokens, 1)
    shared = 0
    if before is not None:
        context = before.input_tokens + before.output_tokens
        fits = (size for size in (context, before.input_tokens) if size <= input_tokens + ROUNDING)
        shared = min(next(fits, 0), input_tokens)
    return SimCall(
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        max_output_tokens=max(output_tokens, MAX_OUTPUT),
        role=role,
        prefix=before.leaves if before is not None and shared else 0,
        prefix_tokens=shared,
        leaves=name,
    )
