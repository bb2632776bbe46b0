"""What a simulation is given: programs of calls, each with the length its answer will have.

A request of one call is a program of one stage. Nothing here knows where a workload is from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from core.slo import BestEffortSlo, CompoundSlo, DeadlineSlo, LatencySlo, OnMiss

SimSlo = LatencySlo | DeadlineSlo | CompoundSlo | BestEffortSlo
"""Of a program; a ``CompoundSlo`` here has the deadline from the first call's arrival."""


def check_seconds(name: str, value: float) -> None:
    """Raise ValueError that names the field unless it is a number of seconds, 0 or more."""
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be a number of seconds, 0 or more, got {value!r}")


class SimCall(msgspec.Struct, frozen=True, kw_only=True):
    """One LLM call.

    Attributes:
        input_tokens: at least 1.
        output_tokens: that it will generate, at least 1; the scheduler does not know.
        max_output_tokens: its limit, not below ``output_tokens``.
        prefix: name of the text that its prompt begins with; 0: nothing shared.
        prefix_tokens: how many of its input tokens that text is, at most ``input_tokens``;
            0 without a ``prefix``.
        leaves: name under which its whole context (input and answer) may be the prefix of
            later prompts; 0: of none.
    """

    input_tokens: int
    output_tokens: int
    max_output_tokens: int = 4096
    role: str = ""
    prefix: int = 0
    prefix_tokens: int = 0
    leaves: int = 0

    def __post_init__(self) -> None:
        for name in ("input_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_output_tokens < self.output_tokens:
            raise ValueError(
                f"output_tokens must be at most max_output_tokens ({self.max_output_tokens}), "
                f"got {self.output_tokens}"
            )
        if not 0 <= self.prefix_tokens <= self.input_tokens:
            raise ValueError(
                f"prefix_tokens must be within input_tokens ({self.input_tokens}), "
                f"got {self.prefix_tokens}"
            )
        if self.prefix_tokens and not self.prefix:
            raise ValueError("prefix must name the text that prefix_tokens are of, got 0")


class SimStage(msgspec.Struct, frozen=True, kw_only=True):
    """Calls that run side by side, once all of the stage before have ended.

    Attributes:
        tool_s: seconds that tools take before the calls can be made.
        tools: their names.
    """

    calls: tuple[SimCall, ...]
    tool_s: float = 0.0
    tools: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.calls:
            raise ValueError("calls must be at least one call, got none")
        check_seconds("tool_s", self.tool_s)


class SimProgram(msgspec.Struct, frozen=True, kw_only=True):
    """What one sender wants done: a request, or a program of several calls.

    Attributes:
        arrival_s: of its first stage's calls, from the beginning of the simulation.
        application: what it is an instance of.
        slo: only a ``CompoundSlo`` may have more than one call.
        waiting_time_s: as the request field of that name; None never drops it.
    """

    arrival_s: float
    application: str
    slo: SimSlo
    stages: tuple[SimStage, ...]
    tenant: str = ""
    on_miss: OnMiss = OnMiss.FINISH
    waiting_time_s: float | None = None

    def __post_init__(self) -> None:
        check_seconds("arrival_s", self.arrival_s)
        if not self.stages:
            raise ValueError("stages must be at least one stage, got none")
        if self.num_calls > 1 and not isinstance(self.slo, CompoundSlo):
            raise ValueError("slo must be a CompoundSlo where there are several calls")
        waiting_s = self.waiting_time_s
        # As of the request field of that name.
        if waiting_s is not None and not 0 < waiting_s < math.inf:
            raise ValueError(
                f"waiting_time_s must be a number of seconds above 0, got {waiting_s!r}"
            )

    @property
    def num_calls(self) -> int:
        return sum(len(stage.calls) for stage in self.stages)

    @property
    def input_tokens(self) -> int:
        """Of all its calls."""
        return sum(call.input_tokens for stage in self.stages for call in stage.calls)

    @property
    def output_tokens(self) -> int:
        """Of all its calls."""
        return sum(call.output_tokens for stage in self.stages for call in stage.calls)


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Programs in order of arrival, over a window in which they arrive.

    Attributes:
        window_s: no arrival is after it; rates are per second of it.
        name: says what it is, seed included.
    """

    programs: tuple[SimProgram, ...]
    window_s: float
    name: str = ""

    def __post_init__(self) -> None:
        arrivals = [program.arrival_s for program in self.programs]
        if arrivals != sorted(arrivals):
            raise ValueError("programs must be in order of arrival")
        check_seconds("window_s", self.window_s)
        if arrivals and arrivals[-1] > self.window_s:
            raise ValueError(
                f"window_s must not be before the last arrival at {arrivals[-1]!r}, "
                f"got {self.window_s!r}"
            )


def num_calls(programs: Sequence[SimProgram]) -> int:
    """Calls of all programs together."""
    return sum(program.num_calls for program in programs)
