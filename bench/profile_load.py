"""A measured load replayed on step times: continuous batching, first come, first served."""

import csv
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from engine.simulator.steps import Step, StepTime

MAX_REQUESTS = 128
MAX_TOKENS = 2048
"""Of a batch, as those runs were configured: meta.json beside them in casys-kaist/
LLMServingSim, bench/examples."""


class Asked(NamedTuple):
    """A request of a measured load, and how it fared."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    ttft_s: float
    e2e_s: float

    @property
    def tpot_s(self) -> float:
        """Mean seconds between its tokens."""
        return (self.e2e_s - self.ttft_s) / max(self.output_tokens - 1, 1)


class _Running(msgspec.Struct):
    asked: Asked
    prefilled: int = 0
    generated: int = 0
    first_s: float | None = None

    @property
    def context(self) -> int:
        return self.asked.input_tokens + self.generated

    @property
    def decodes(self) -> bool:
        # After a preemption its answer so far is prompt, too.
        return self.generated > 0 and self.prefilled >= self.context - 1


def read(path: Path, run: str) -> list[Asked]:
    """The requests of one run; ValueError with file and line, or if there is no such run."""
    asked = []
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        for row in reader:
            try:
                if row["run"] == run:
                    lengths = int(row["input_tokens"]), int(row["output_tokens"])
                    times = float(row["ttft_s"]), float(row["e2e_s"])
                    asked.append(Asked(float(row["arrival_s"]), *lengths, *times))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}:{reader.line_num}: {error!r}") from error
    if not asked:
        raise ValueError(f"{path}: no rows of the run {run}")
    return sorted(asked)


def replay(load: Sequence[Asked], steps: StepTime, kv_tokens: int) -> list[Asked]:
    """The same requests, with the times that they would have had; in order of arrival."""
    waiting = deque(_Running(asked) for asked in load)
    running: list[_Running] = []
    done: list[Asked] = []
    now_s = 0.0
    while waiting or running:
        if not running:
            now_s = max(now_s, waiting[0].asked.arrival_s)
        _make_room(running, waiting, kv_tokens)
        step, prefills = _plan(running, waiting, now_s, kv_tokens)
        now_s += steps.seconds(step)
        decoded = [request for request in running if request.decodes]
        for request, tokens in prefills:
            request.prefilled += tokens
            if request.prefilled >= request.context:
                decoded.append(request)
        for request in decoded:
            request.prefilled = request.context
            request.generated += 1
            request.first_s = now_s if request.first_s is None else request.first_s
            if request.generated >= request.asked.output_tokens:
                running.remove(request)
                done.append(_fared(request, now_s))
    return sorted(done)


def _plan(
    running: list[_Running], waiting: deque[_Running], now_s: float, kv_tokens: int
) -> tuple[Step, list[tuple[_Running, int]]]:
    """Decodes first, then prompts in order of arrival, in chunks of what the budget leaves."""
    decoding = [request for request in running if request.decodes]
    prompts = [request for request in running if not request.decodes]
    left = MAX_TOKENS - len(decoding)
    used = sum(request.context for request in running)
    chunks: list[tuple[_Running, int]] = []
    pairs = 0
    while left > 0:
        if prompts:
            request = prompts.pop(0)
        elif (
            waiting
            and waiting[0].asked.arrival_s <= now_s
            and len(running) < MAX_REQUESTS
            and used + waiting[0].context <= kv_tokens
        ):
            request = waiting.popleft()
            running.append(request)
            used += request.context
        else:
            break
        tokens = min(left, request.context - request.prefilled)
        chunks.append((request, tokens))
        pairs += tokens * request.prefilled + tokens * (tokens + 1) // 2
        left -= tokens
    contexts = sum(request.context for request in decoding)
    return Step(len(decoding), contexts, 0, sum(n for _, n in chunks), pairs), chunks


def _make_room(running: list[_Running], waiting: deque[_Running], kv_tokens: int) -> None:
    """The latest start again, as in vLLM, when the next tokens would not fit."""
    while len(running) > 1 and sum(request.context + 1 for request in running) > kv_tokens:
        request = running.pop()
        request.prefilled = 0
        waiting.appendleft(request)


def _fared(request: _Running, now_s: float) -> Asked:
    asked = request.asked
    first_s = now_s if request.first_s is None else request.first_s
    return asked._replace(ttft_s=first_s - asked.arrival_s, e2e_s=now_s - asked.arrival_s)
