"""Programs for the tests of ``graphs``: stages in plain numbers, and their lives as events."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from graphs.patterns import PatternPack
from graphs.protocol import Arrived, Closed, Event, Finished
from graphs.shape import Call, Pace, ProgramShape, StageShape, set_hash

if TYPE_CHECKING:
    from collections.abc import Sequence

MODEL = 7
PACE = Pace(prefill_s=1e-4, step_s=0.01, token_s=0.001)
CODE_ERROR = 0.036
"""How far a number in a pack may be from the truth."""


class Part(NamedTuple):
    """One stage of a program as its author thinks of it."""

    outputs: tuple[int, ...] = (100,)
    """Tokens that each of its calls answers."""
    input_tokens: int = 200
    """Of each call."""
    tool_s: float = 0.0
    tools: tuple[int, ...] = ()
    model: int = MODEL
    role: int = 0

    def shape(self) -> StageShape:
        return StageShape(
            identity=self.model,
            role=self.role,
            num_calls=len(self.outputs),
            input_tokens=float(self.input_tokens * len(self.outputs)),
            output_tokens=float(sum(self.outputs)),
            longest_tokens=float(max(self.outputs)),
            tool_s=self.tool_s,
            tools=set_hash(self.tools),
        )


def shape_of(*parts: Part, application: int = 0) -> ProgramShape:
    return ProgramShape(application, tuple(part.shape() for part in parts))


def chain(*outputs: int, application: int = 0, **of_each: int) -> ProgramShape:
    """One call after the other."""
    parts = [Part((output,), **of_each) for output in outputs]
    return shape_of(*parts, application=application)


def packed(*shapes: ProgramShape) -> PatternPack:
    """A pack of patterns that were each seen once."""
    return PatternPack(shapes, [1.0] * len(shapes))


def seconds_of(shape: StageShape, pace: Pace = PACE) -> float:
    """Execution time, as the paper has it and as ``Pace`` puts it into seconds."""
    steps_s = shape.longest_tokens * pace.step_s + shape.output_tokens * pace.token_s
    return shape.tool_s + shape.input_tokens * pace.prefill_s + steps_s


def call(node: int, at_s: float = 0.0, **changes: object) -> Call:
    fields: dict[str, object] = {
        "role": 0,
        "model": MODEL,
        "parents": (),
        "tools": (),
        "input_tokens": 200,
    }
    return Call(node=node, at_s=at_s, **{**fields, **changes})  # type: ignore[arg-type]


def at_s(event: Event) -> float | None:
    """When an event happened; None where it does not say so."""
    match event:
        case Arrived():
            return event.call.at_s
        case Finished():
            return event.at_s
        case Closed():
            return None


def life(
    program: int,
    parts: Sequence[Part],
    *,
    opened_s: float = 0.0,
    deadline_s: float = 60.0,
    application: int = 0,
    is_final: bool = True,
    stage_s: float = 1.0,
) -> list[Event]:
    """A program from its first call to the end of its last; each stage takes ``stage_s``."""
    events: list[Event] = []
    now_s, node = opened_s, 0
    for number, part in enumerate(parts):
        now_s += part.tool_s
        first = node
        for _ in part.outputs:
            arrived = Arrived(
                program=program,
                application=application,
                place=node,
                call=call(
                    node + 1,
                    now_s,
                    role=part.role,
                    model=part.model,
                    tools=part.tools,
                    input_tokens=part.input_tokens,
                ),
                opened_s=opened_s,
                deadline_at_s=opened_s + deadline_s,
                is_final=is_final and number == len(parts) - 1,
            )
            events.append(arrived)
            node += 1
        now_s += stage_s
        for index, tokens in enumerate(part.outputs):
            events.append(Finished(program, first + index + 1, tokens, now_s, has_failed=False))
    return events
