"""A real graphs process and a real client of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from program_shapes import PACE, Part, call, life
from service_child import PAUSE_S, ServiceChild, asked_status, command_of

from core.clock import MonotonicClock
from graphs.client import GraphsClient, GraphsProbe
from graphs.protocol import Arrived, Closed, Event, Finished

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from graphs.protocol import Outlook, Status

THREE = [Part((100,)), Part((300, 200)), Part((50,))]


def command(address: str, *options: str) -> list[str]:
    return command_of("graphs", address, *options)


def status_of(address: str, is_running: Callable[[], bool] = lambda: True) -> Status:
    """The status of the process there, as soon as one answers."""
    status: Status = asked_status(GraphsProbe(address), is_running)
    return status


class GraphsChild(ServiceChild):
    """One graphs process."""

    service = "graphs"

    def status(self) -> Status:
        return status_of(self.address, self.is_running)


class Scheduler:
    """A client as the scheduler has one, and all that it has heard."""

    def __init__(self, address: str) -> None:
        self.clock = MonotonicClock()
        self.client = GraphsClient(address, self.clock, timeout_s=600.0)
        self.outlooks: dict[int, list[Outlook]] = {}

    def poll(self) -> None:
        for outlook in self.client.poll(PACE):
            self.outlooks.setdefault(outlook.program, []).append(outlook)

    def until(self, condition: Callable[[], Any]) -> None:
        """Poll as the scheduler does in every pass."""
        while not condition():
            self.poll()
            self.client.wait(PAUSE_S)

    def send(self) -> None:
        """Until all that has happened has been told."""
        self.poll()
        self.until(lambda: self.client.counters()["unsent"] == 0)

    def last(self, program: int) -> Outlook:
        return self.outlooks[program][-1]

    def tell(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case Arrived():
                    self.client.arrived(
                        event.program,
                        event.call,
                        opened_s=event.opened_s,
                        deadline_at_s=event.deadline_at_s,
                        application=event.application,
                        is_final=event.is_final,
                    )
                case Finished():
                    self.client.finished(
                        event.program,
                        event.node,
                        event.output_tokens,
                        at_s=event.at_s,
                        has_failed=event.has_failed,
                    )
                case Closed():
                    self.client.closed(event.program, is_cancelled=event.is_cancelled)

    def open(self, *programs: int) -> None:
        """The first call of each."""
        now_s = self.clock.now_s()
        for program in programs:
            self.client.arrived(program, call(1, now_s), opened_s=now_s, deadline_at_s=now_s + 60)

    def known(self, *programs: int) -> None:
        """Open them, and wait for the first that is said of each."""
        self.open(*programs)
        self.until(lambda: all(program in self.outlooks for program in programs))

    def stages(self, program: int, parts: Sequence[Part] = THREE) -> list[list[Event]]:
        """What happens in each stage of a program that begins now."""
        groups: list[list[Event]] = []
        for event in life(program, parts, opened_s=self.clock.now_s()):
            if isinstance(event, Arrived) and (not groups or isinstance(groups[-1][-1], Finished)):
                groups.append([])
            groups[-1].append(event)
        return groups

    def teach(self, programs: Iterable[int], parts: Sequence[Part] = THREE) -> None:
        """Programs from their beginning to their end."""
        for program in programs:
            self.tell(life(program, parts, opened_s=self.clock.now_s()))
        self.send()

    def close(self) -> None:
        self.client.close()
