"""A real predictor process and a real client of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from service_child import (
    PAUSE_S,
    ServiceChild,
    Stranger,
    asked_status,
    command_of,
    wait_until,
)

from core.clock import MonotonicClock
from predictor.client import PredictorClient, PredictorProbe
from predictor.features import EngineFacts, cues_of, feature_row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from predictor.distribution import Points
    from predictor.protocol import Status

__all__ = [
    "CUES",
    "PAUSE_S",
    "ROW",
    "Child",
    "Serving",
    "Stranger",
    "command",
    "status_of",
    "wait_until",
]

CUES = cues_of({"messages": [{"role": "user", "content": "Write a poem in 50 words."}]})
ROW = feature_row(CUES, EngineFacts(20, 400))


def command(address: str, *options: str) -> list[str]:
    return command_of("predictor", address, *options)


def status_of(address: str, is_running: Callable[[], bool] = lambda: True) -> Status:
    """The status of the predictor there, as soon as one answers."""
    status: Status = asked_status(PredictorProbe(address), is_running)
    return status


class Child(ServiceChild):
    """One predictor."""

    service = "predictor"

    def status(self) -> Status:
        return status_of(self.address, self.is_running)


class Serving:
    """A client as the scheduler has one, and all that it has heard."""

    def __init__(self, address: str) -> None:
        self.client = PredictorClient(address, MonotonicClock(), model="test")
        self.points: dict[str, list[Points]] = {}
        self.num_calibrations = 0

    def poll(self) -> None:
        news = self.client.poll()
        for name, points in news.forecasts:
            self.points.setdefault(name, []).append(points)
        self.num_calibrations += news.factors is not None

    def until(self, condition: Callable[[], Any]) -> None:
        """Poll as the scheduler does in every pass."""
        while not condition():
            self.poll()
            self.client.wait(PAUSE_S)

    def ask(self, names: Iterable[str], **whose: Any) -> None:
        for name in names:
            self.client.ask(name, ROW, words=CUES.words, **whose)

    def forecast(self, names: Iterable[str], **whose: Any) -> None:
        """Ask and wait for all the answers."""
        wanted = list(names)
        self.ask(wanted, **whose)
        self.until(lambda: all(name in self.points for name in wanted))

    def teach(self, names: Iterable[str], tokens: int = 100) -> None:
        """Requests from their beginning to their end."""
        taught = list(names)
        self.forecast(taught)
        for name in taught:
            self.client.ended(name, tokens, is_cut=False)
        self.poll()

    def close(self) -> None:
        self.client.close()
