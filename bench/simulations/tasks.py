"""Work for the pool: each task names itself, is told apart from every other, and can be run."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import assert_never

import msgspec

from bench.simulations.bounds import BoundFigure, BoundQuestion, bound_of
from bench.simulations.capacity import Capacity, CapacityProbe, measure
from bench.simulations.cell import Cell, steps_of
from bench.simulations.figures import Figures
from bench.simulations.play import play

Task = Cell | CapacityProbe | BoundQuestion
Outcome = Figures | Capacity | BoundFigure

ROOT = Path(__file__).resolve().parents[2]
SIMULATED = (
    "core/slo.py",
    "core/names.py",
    "core/programs.py",
    "scheduler",
    "engine/simulator",
    "graphs/amortise.py",
    "bench/workloads",
    "bench/simulations/analysts.py",
    "bench/simulations/figures.py",
    "bench/simulations/play.py",
    "bench/goodput.py",
)
"""What a cell's figures depend on."""
ANALYSED = ("predictor", "graphs", "bench/simulations/real.py")
"""And with the analyst "real"."""
BOUNDED = ("bench/bound.py", "bench/least_work.py", "bench/simulations/bounds.py")
NOT_OF_IT = ("command.py", "summary.py", "profiles.py", "measured.py")
"""Parts of those folders on which no figure depends; engines' numbers are in each task's key."""


def run(task: Task) -> Outcome:
    """Do it. Raises OSError or ValueError for what it names and is not there."""
    match task:
        case Cell():
            return play(task)
        case CapacityProbe():
            return measure(task)
        case BoundQuestion():
            return bound_of(task)
        case _:
            assert_never(task)


def outcome_type(task: Task) -> type[Outcome]:
    """Of what ``run`` returns for it."""
    match task:
        case Cell():
            return Figures
        case CapacityProbe():
            return Capacity
        case BoundQuestion():
            return BoundFigure
        case _:
            assert_never(task)


def key_of(task: Task) -> str:
    """The same for the same task only, its engine's speed in numbers included."""
    steps = msgspec.to_builtins(steps_of(task.engine.steps))
    encoded = msgspec.json.encode([msgspec.to_builtins(task), steps], order="deterministic")
    return hashlib.blake2b(encoded, digest_size=12).hexdigest()


def code_of(task: Task) -> str:
    """Changes with the code that a task's outcome depends on, not with its comments."""
    match task:
        case Cell(analyst="real"):
            return digest(SIMULATED + ANALYSED)
        case Cell():
            return digest(SIMULATED)
        case CapacityProbe():
            return digest((*SIMULATED, "bench/simulations/capacity.py"))
        case BoundQuestion():
            return digest((*BOUNDED, "engine/simulator/workload.py", "bench/workloads"))
        case _:
            assert_never(task)


@lru_cache
def digest(parts: tuple[str, ...]) -> str:
    """Of what the Python files there say, whether committed or not."""
    found = hashlib.blake2b(digest_size=12)
    for path in _files(parts):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        _drop_docstrings(tree)
        found.update(str(path.relative_to(ROOT)).encode())
        found.update(ast.dump(tree).encode())
    return found.hexdigest()


def _files(parts: tuple[str, ...]) -> Iterator[Path]:
    for part in parts:
        path = ROOT / part
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            if file.name not in NOT_OF_IT and file.exists():
                yield file


def _drop_docstrings(tree: ast.AST) -> None:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [one for one in body if not _is_text(one)]  # type: ignore[attr-defined]


def _is_text(node: ast.AST) -> bool:
    is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_constant and isinstance(node.value.value, str)  # type: ignore[attr-defined]
