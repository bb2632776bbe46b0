"""Runs tasks in processes; what is done is kept in a file, so that a broken-off grid goes on."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import msgspec

from bench.simulations.bounds import BoundQuestion
from bench.simulations.capacity import CapacityProbe
from bench.simulations.progress import Progress
from bench.simulations.tasks import Outcome, Task, code_of, key_of, outcome_type, run
from core.clock import MonotonicClock

Raw = dict[str, Any]
BOUND_WEIGHT = 4.0
"""A bound takes about so much longer than a run of the same workload."""


class Line(msgspec.Struct, frozen=True):
    """One line of the file: what was done, by which code, what came of it, and how long it took."""

    key: str
    code: str
    seconds: float
    task: Raw
    outcome: Raw


class Cache:
    """Outcomes by task and code, in JSON lines. A line that cannot be read is skipped.

    Args:
        path: the file; None keeps nothing beyond this object.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lines: dict[str, dict[str, Line]] = {}
        for line in self._read():
            self._keep(line)

    def get(self, task: Task, *, any_code: bool = False) -> Line | None:
        """What is known of a task by the code as it is, or, of no such, by any other.

        Args:
            any_code: an outcome of other code will do; the newest is taken.
        """
        lines = self._lines.get(key_of(task), {})
        found = lines.get(code_of(task))
        return next(reversed(lines.values()), None) if found is None and any_code else found

    def put(self, task: Task, outcome: Outcome, seconds: float) -> None:
        """Keep an outcome, at once and for good."""
        line = Line(
            key_of(task),
            code_of(task),
            round(seconds, 3),
            msgspec.to_builtins(task),
            msgspec.to_builtins(outcome),
        )
        self._keep(line)
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # One write to a file opened for appending: lines of two grids do not mix.
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")

    def _keep(self, line: Line) -> None:
        lines = self._lines.setdefault(line.key, {})
        lines.pop(line.code, None)
        lines[line.code] = line

    def _read(self) -> Iterator[Line]:
        if self._path is None or not self._path.exists():
            return
        decoder = msgspec.json.Decoder(Line)
        with self._path.open("rb") as file:
            for text in file:
                try:
                    yield decoder.decode(text)
                except msgspec.DecodeError:
                    # Broken off in the middle of a line.
                    continue


class Failed(RuntimeError):
    """A task could not be run."""


def run_all(
    tasks: Sequence[Task],
    cache: Cache,
    *,
    jobs: int,
    any_code: Callable[[Task], bool] = lambda task: False,
    progress: Progress | None = None,
) -> dict[Task, Outcome]:
    """Every task's outcome, from the file where it is there.

    Args:
        jobs: processes; 1: here.
        any_code: whether an outcome of other code will do for a task.

    Raises ``Failed`` with the task that could not be run; what was done until then is kept.
    """
    found: dict[Task, Outcome] = {}
    missing: list[Task] = []
    for task in dict.fromkeys(tasks):
        line = cache.get(task, any_code=any_code(task))
        if line is None:
            missing.append(task)
        else:
            found[task] = msgspec.convert(line.outcome, outcome_type(task))
    bar = progress or Progress(None)
    bar.begin(weights_of(missing), num_known=len(found))
    for task, outcome, seconds in _outcomes(missing, jobs):
        cache.put(task, outcome, seconds)
        found[task] = outcome
        bar.done(weight_of(task))
    bar.end()
    return found


def weights_of(tasks: Sequence[Task]) -> float:
    """How much work they are, in no unit."""
    return sum(weight_of(task) for task in tasks)


def weight_of(task: Task) -> float:
    """How much work it is, about: the programs that arrive, or are served."""
    if isinstance(task, CapacityProbe):
        return float(task.programs)
    num = task.workload.rate_per_s * task.workload.window_s
    return BOUND_WEIGHT * num if isinstance(task, BoundQuestion) else num


def _outcomes(tasks: Sequence[Task], jobs: int) -> Iterator[tuple[Task, Outcome, float]]:
    if jobs <= 1 or len(tasks) <= 1:
        for task in tasks:
            outcome, seconds = _timed(task)
            yield task, outcome, seconds
        return
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=context) as pool:
        waiting: dict[Future[tuple[Outcome, float]], Task] = {
            pool.submit(_timed, task): task for task in tasks
        }
        try:
            while waiting:
                done, _ = wait(waiting, return_when=FIRST_COMPLETED)
                for future in done:
                    outcome, seconds = future.result()
                    yield waiting.pop(future), outcome, seconds
        finally:
            pool.shutdown(cancel_futures=True)


def _timed(task: Task) -> tuple[Outcome, float]:
    clock = MonotonicClock()
    begin_s = clock.now_s()
    try:
        outcome = run(task)
    except (OSError, ValueError, RuntimeError) as error:
        raise Failed(f"{describe(task)}: {error}") from error
    return outcome, clock.now_s() - begin_s


def describe(task: Task) -> str:
    """A task in a few words."""
    fields: Mapping[str, Any] = msgspec.structs.asdict(task)
    words = [str(fields[name]) for name in ("policy", "what", "seed") if name in fields]
    return f"{type(task).__name__} {' '.join(words)}"
