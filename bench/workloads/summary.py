"""What a workload consists of, in numbers."""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from core.slo import slo_type
from engine.simulator.workload import SimProgram, Workload, num_calls


class TokenStats(msgspec.Struct, frozen=True):
    """Of a program's tokens, all its calls together."""

    mean: float
    std: float
    p50: float
    p95: float


class Group(msgspec.Struct, frozen=True):
    """Some programs of a workload; calls and stages are means per program."""

    programs: int
    calls: float
    stages: float
    input: TokenStats
    output: TokenStats


def describe(workload: Workload) -> dict[str, Group]:
    """The groups of a workload that are not empty.

    They are "all", the classes ("latency", ...), and "APPLICATION single" and
    "APPLICATION compound".
    """
    keys: tuple[Callable[[SimProgram], str], ...] = (
        lambda program: "all",
        lambda program: slo_type(program.slo),
        lambda program: (
            f"{program.application} "
            f"{'compound' if slo_type(program.slo) == 'compound' else 'single'}"
        ),
    )
    groups: dict[str, list[SimProgram]] = {}
    for key in keys:
        for program in workload.programs:
            groups.setdefault(key(program), []).append(program)
    return {name: group_of(programs) for name, programs in groups.items()}


def group_of(programs: Sequence[SimProgram]) -> Group:
    """One or more programs as a group."""
    return Group(
        len(programs),
        num_calls(programs) / len(programs),
        sum(len(program.stages) for program in programs) / len(programs),
        token_stats([program.input_tokens for program in programs]),
        token_stats([program.output_tokens for program in programs]),
    )


def token_stats(tokens: Sequence[int]) -> TokenStats:
    """Of one or more counts."""
    values = np.array(tokens, dtype=np.float64)
    p50, p95 = np.percentile(values, [50, 95]).tolist()
    return TokenStats(float(values.mean()), float(values.std()), p50, p95)
