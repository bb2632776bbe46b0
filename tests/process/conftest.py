"""Real predictor and graphs processes, started for a module or for one test."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# Plain modules beside this file, whatever import mode pytest runs in.
sys.path.insert(0, str(Path(__file__).parent))

from graphs_child import GraphsChild, Scheduler
from predictor_child import Child, Serving, Stranger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="module")
def shared() -> Iterator[Child]:
    """A predictor that runs for the whole module."""
    child = Child()
    child.start_and_wait()
    yield child
    child.close()


@pytest.fixture
def make_child() -> Iterator[Callable[..., Child]]:
    """Predictors of one test, not started yet."""
    made: list[Child] = []

    def make(*options: str) -> Child:
        made.append(Child(*options))
        return made[-1]

    yield make
    for child in made:
        child.close()


@pytest.fixture
def serve() -> Iterator[Callable[[str], Serving]]:
    """Clients of one test."""
    made: list[Serving] = []

    def make(address: str) -> Serving:
        made.append(Serving(address))
        return made[-1]

    yield make
    for serving in made:
        serving.close()


@pytest.fixture
def stranger(shared: Child) -> Iterator[Stranger]:
    made = Stranger(shared.address)
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared_graphs() -> Iterator[GraphsChild]:
    """A graphs process that runs for the whole module."""
    child = GraphsChild()
    child.start_and_wait()
    yield child
    child.close()


@pytest.fixture
def make_graphs() -> Iterator[Callable[..., GraphsChild]]:
    """Graphs processes of one test, not started yet."""
    made: list[GraphsChild] = []

    def make(*options: str) -> GraphsChild:
        made.append(GraphsChild(*options))
        return made[-1]

    yield make
    for child in made:
        child.close()


@pytest.fixture
def schedule() -> Iterator[Callable[[str], Scheduler]]:
    """Clients of one test."""
    made: list[Scheduler] = []

    def make(address: str) -> Scheduler:
        made.append(Scheduler(address))
        return made[-1]

    yield make
    for scheduler in made:
        scheduler.close()


@pytest.fixture
def graphs_stranger(shared_graphs: GraphsChild) -> Iterator[Stranger]:
    made = Stranger(shared_graphs.address)
    yield made
    made.close()
