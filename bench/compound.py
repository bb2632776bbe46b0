"""Programs of the load: two or three stages of one or two parallel chat calls each.

A call of a later stage quotes the answers before it, so its prompt is known only then. All
calls share a deadline; the server is told of the program by the fields of its calls.
"""

import asyncio
from collections.abc import Mapping, Sequence

import httpx
import msgspec

from bench.answers import Answer, Ask, Session


class Role(msgspec.Struct, frozen=True):
    """One call of a stage; ``{task}`` and ``{before}``, the answers of the stage before."""

    name: str
    template: str


Stages = tuple[tuple[Role, ...], ...]

APPLICATIONS: Mapping[str, Stages] = {
    "refine": (
        (Role("draft", "{task}"),),
        (Role("revise", "{task} Improve this answer: {before}"),),
    ),
    "two_views": (
        (Role("one", "{task}"), Role("other", "{task} Take an unusual view.")),
        (Role("merge", "{task} Merge these two answers into one: {before}"),),
    ),
    "plan": (
        (Role("plan", "{task} First make a plan in a few words."),),
        (
            Role("begin", "{task} Begin it by this plan: {before}"),
            Role("end", "{task} Write how it ends by this plan: {before}"),
        ),
        (Role("title", "{task} Give a title to this: {before}"),),
    ),
}
NAMES = tuple(APPLICATIONS)


class Task(msgspec.Struct, frozen=True):
    """An instance of an application."""

    program_id: str
    application: str
    prompt: str
    max_tokens: int
    """Of each call."""


def num_calls(stages: Stages) -> int:
    """Of a whole program."""
    return sum(len(stage) for stage in stages)


async def run(
    session: Session, task: Task, deadline_s: float, until_s: float
) -> tuple[Answer, ...]:
    """The calls that were made; none follows one that failed."""
    stages = APPLICATIONS[task.application]
    done: list[Answer] = []
    before, parents = "", tuple[str, ...]()
    for index, stage in enumerate(stages):
        shared = {
            "program_id": task.program_id,
            "application": task.application,
            "parents": list(parents),
            **({"deadline": deadline_s} if index == 0 else {}),
        }
        # Only of a single last call it is known that no other follows.
        is_final = index == len(stages) - 1 and len(stage) == 1
        asks = [
            Ask(
                role.template.format(task=task.prompt, before=before),
                task.max_tokens,
                {**shared, "node": role.name, **({"final": True} if is_final else {})},
                node=role.name,
                stage=index,
            )
            for role in stage
        ]
        answers = await asyncio.gather(*(session.ask(ask, until_s) for ask in asks))
        done += [answer for answer, _ in answers]
        if any(answer.ending != "finished" for answer, _ in answers):
            await _close(session, task, "cancel")
            return tuple(done)
        before = " / ".join(text for _, text in answers)
        parents = tuple(role.name for role in stage)
    await _close(session, task, "end")
    return tuple(done)


async def _close(session: Session, task: Task, how: str) -> None:
    """Tell the server that no call follows. One that knows no programs says so, and is right."""
    try:
        await session.http.post(f"/slo/programs/{how}", json={"program_id": task.program_id})
    except httpx.HTTPError:
        return


def judge(calls: Sequence[Answer], num_planned: int, due_s: float) -> tuple[bool, int]:
    """Whether the program met its deadline, and its goodput in tokens.

    All tokens of all its calls count, input and output, if the last is complete by ``due_s``.
    """
    is_complete = len(calls) == num_planned and all(call.ending == "finished" for call in calls)
    met = is_complete and max(call.end_s for call in calls) <= due_s
    tokens = sum(call.input_tokens + call.output_tokens for call in calls)
    return met, tokens if met else 0
