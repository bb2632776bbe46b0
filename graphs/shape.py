"""What is kept of a program: its stages in numbers, and how long they take.

A stage is the calls between two barriers together with the tools that ran before them. Its
execution time is reckoned from its tokens at the engine's pace of now and from its tool time:
what an earlier program took on the clock says how busy the engine was then, and how much time
the scheduler gave it.
"""

import hashlib
from collections.abc import Iterable, Sequence

import msgspec

MAX_STAGES = 256
"""Of a longer program the rest counts into its last stage."""


class Pace(msgspec.Struct, frozen=True, array_like=True):
    """What work costs now: the step-time model at the expected batch, in seconds.

    Attributes:
        prefill_s: per input token that is not in the prefix cache.
        step_s: per decode step, whoever is in it.
        token_s: more of each step per request in it.
    """

    prefill_s: float = 5e-5
    step_s: float = 0.01
    token_s: float = 2e-4


class Call(msgspec.Struct, frozen=True, array_like=True):
    """A call that has arrived.

    Attributes:
        node: its own id in the program.
        role: hash of what it is for; 0 where it was not told.
        model: hash.
        parents: nodes whose answers it needed; empty where nobody knows.
        tools: hashes of the tools that ran before it, where they were told.
        input_tokens: of its prompt.
        at_s: when it arrived.
    """

    node: int
    role: int
    model: int
    parents: tuple[int, ...]
    tools: tuple[int, ...]
    input_tokens: int
    at_s: float


class StageShape(msgspec.Struct, frozen=True, array_like=True):
    """One stage.

    Attributes:
        identity: of the model called first.
        role: of its first call, by name; 0 where it was not told.
        num_calls: that run side by side.
        input_tokens, output_tokens: of all its calls together.
        longest_tokens: output of the longest call.
        tool_s: from the end of the stage before to its first call.
        tools: of the set of tools that ran then; 0 where none was told.
        new_tokens: input that was not in the prefix cache; below 0: all of it.
    """

    identity: int
    role: int
    num_calls: int
    input_tokens: float
    output_tokens: float
    longest_tokens: float
    tool_s: float
    tools: int = 0
    new_tokens: float = -1.0

    @property
    def filled_tokens(self) -> float:
        """Input tokens that had to be computed."""
        return self.input_tokens if self.new_tokens < 0 else self.new_tokens

    def time_s(self, pace: Pace) -> float:
        """Execution time at ``pace``: the tools, the new input, then the longest answer's steps.

        Each other answer makes the steps that it is in longer.
        """
        decode_s = self.longest_tokens * pace.step_s + self.output_tokens * pace.token_s
        return self.tool_s + self.filled_tokens * pace.prefill_s + decode_s


class ProgramShape(msgspec.Struct, frozen=True, array_like=True):
    """A whole program.

    Attributes:
        application: hash of its name; 0 where it was not told.
        tenant: hash of whose it was; 0 for nobody's.
    """

    application: int
    stages: tuple[StageShape, ...]
    tenant: int = 0


def set_hash(names: Iterable[int]) -> int:
    """One number below 2**63 for a set of hashes; 0 for an empty one."""
    digest = hashlib.blake2b(digest_size=8)
    distinct = sorted(set(names))
    for name in distinct:
        digest.update(name.to_bytes(8, "little"))
    return int.from_bytes(digest.digest(), "little") >> 1 if distinct else 0


def cut_to(stages: Sequence[StageShape], most: int) -> tuple[StageShape, ...]:
    """At most ``most`` stages; those beyond are added to the last."""
    if len(stages) <= most:
        return tuple(stages)
    last, rest = stages[most - 1], stages[most:]
    merged = StageShape(
        last.identity,
        last.role,
        last.num_calls + sum(stage.num_calls for stage in rest),
        last.input_tokens + sum(stage.input_tokens for stage in rest),
        last.output_tokens + sum(stage.output_tokens for stage in rest),
        last.longest_tokens + sum(stage.longest_tokens for stage in rest),
        last.tool_s + sum(stage.tool_s for stage in rest),
        last.tools,
        last.filled_tokens + sum(stage.filled_tokens for stage in rest),
    )
    return (*stages[: most - 1], merged)
