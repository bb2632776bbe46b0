"""Client and server together, as over a socket that a test may cut: what restarts leave behind."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from program_shapes import PACE, Part, life

from core.clock import ManualClock
from graphs import client as client_module
from graphs.client import GraphsClient
from graphs.protocol import Arrived, Finished, Outlook, server_codec
from graphs.server import GraphsServer
from graphs.store import PatternStore
from graphs.tracker import Tracker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphs.protocol import Event, FromGraphs, ToGraphs

PEER = b"scheduler"
THREE = [Part((100,)), Part((300, 200)), Part((50,), tool_s=5.0)]


class Process:
    """A server that is started again with what was learnt, and without what ran."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self.store = PatternStore(now_s=clock.now_s())
        self.session = 0
        self.inbox: list[tuple[bytes, ToGraphs]] = []
        self.outbox: list[FromGraphs] = []
        self.start()

    def start(self) -> None:
        self.session += 1
        self.tracker = Tracker(self.store)
        self.server = GraphsServer(self.tracker, self._send, self._clock, session=self.session)
        self.inbox.clear()
        self.outbox.clear()

    def _send(self, _peer: bytes, message: FromGraphs) -> bool:
        self.outbox.append(message)
        return True

    def run(self) -> None:
        """One pass of its loop."""
        taken, self.inbox = self.inbox, []
        self.server.handle(taken)
        self.server.tend()


class Line:
    """Stands in for the client's channel; whatever is sent is taken up in the next pass."""

    process: Process
    is_up = True

    def __init__(self, _address: str, codec: Any) -> None:
        self._codec = codec
        self.counters: Counter[str] = Counter()

    def send(self, message: ToGraphs) -> bool:
        if self.is_up:
            self.process.inbox.append((PEER, server_codec().decode(self._codec.encode(message))))
        return self.is_up

    def receive(self, limit: int) -> list[FromGraphs]:
        if not self.is_up:
            return []
        outbox = self.process.outbox
        found, outbox[:] = outbox[:limit], outbox[limit:]
        return found


class World:
    def __init__(self) -> None:
        self.clock = ManualClock(1000.0)
        Line.process = self.process = Process(self.clock)
        Line.is_up = True
        self.client = GraphsClient("ipc:///nowhere", self.clock, timeout_s=600.0)
        self.outlooks: dict[int, Outlook] = {}
        self.pass_time(2)

    def pass_time(self, seconds: float) -> None:
        """The client polls ten times a second, and the process keeps up."""
        for _ in range(round(seconds * 10)):
            self.clock.advance(0.1)
            for outlook in self.client.poll(PACE):
                self.outlooks[outlook.program] = outlook
            if Line.is_up:
                self.process.run()

    def tell(self, *events: Event) -> None:
        for event in events:
            match event:
                case Arrived():
                    self.client.arrived(
                        event.program,
                        event.call,
                        opened_s=event.opened_s,
                        deadline_at_s=event.deadline_at_s,
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

    def kill(self) -> None:
        Line.is_up = False

    def start_again(self) -> None:
        self.process.start()
        Line.is_up = True

    def stages(self, program: int, parts: Sequence[Part] = THREE) -> list[list[Event]]:
        """What happens in each stage of a program that begins now."""
        groups: list[list[Event]] = []
        for event in life(program, parts, opened_s=self.clock.now_s()):
            if isinstance(event, Arrived) and (not groups or isinstance(groups[-1][-1], Finished)):
                groups.append([])
            groups[-1].append(event)
        return groups


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(client_module, "DealerChannel", Line)
    made = World()
    for program in range(100, 105):
        made.tell(*life(program, THREE, opened_s=made.clock.now_s()))
    made.pass_time(1)
    assert made.process.store.num_added == 5
    return made


def test_what_is_told_is_answered(world: World) -> None:
    first, second, third = world.stages(1)
    world.tell(*first, second[0])
    world.pass_time(1)
    outlook = world.outlooks[1]
    assert outlook.is_known
    assert (outlook.num_calls, outlook.stage) == (2, 1)
    world.tell(*second[1:], *third)
    world.pass_time(1)
    assert world.process.store.num_added == 6
    assert len(world.process.tracker) == 0


def test_a_program_that_was_open_is_known_to_the_next_process(world: World) -> None:
    first, second, third = world.stages(1)
    world.tell(*first)
    world.pass_time(1)
    world.kill()
    world.pass_time(3)
    world.outlooks.clear()
    world.start_again()
    world.pass_time(3)
    assert world.outlooks[1].is_known
    world.tell(*second, *third)
    world.pass_time(1)
    assert world.process.store.num_added == 6


def test_a_program_that_went_on_meanwhile_is_known_to_the_next_process(world: World) -> None:
    first, second, third = world.stages(1)
    world.tell(*first)
    world.pass_time(1)
    world.kill()
    world.tell(second[0])
    world.pass_time(3)
    world.outlooks.clear()
    world.start_again()
    world.pass_time(3)
    outlook = world.outlooks[1]
    assert outlook.is_known
    assert (outlook.num_calls, outlook.stage) == (2, 1)
    world.tell(*second[1:], *third)
    world.pass_time(1)
    assert world.process.store.num_added == 6
    assert len(world.process.store) == 1


def test_a_program_that_began_meanwhile_is_known_to_the_next_process(world: World) -> None:
    first, second, third = world.stages(1)
    world.kill()
    world.tell(*first, second[0])
    world.pass_time(3)
    world.start_again()
    world.pass_time(3)
    assert world.outlooks[1].num_calls == 2
    assert world.outlooks[1].is_known
    world.tell(*second[1:], *third)
    world.pass_time(1)
    assert world.process.store.num_added == 6


def test_a_program_that_ended_meanwhile_is_not_open_in_the_next_process(world: World) -> None:
    first, second, third = world.stages(1)
    world.tell(*first)
    world.pass_time(1)
    world.kill()
    world.tell(*second, *third)
    world.pass_time(3)
    world.start_again()
    world.pass_time(3)
    assert len(world.process.tracker) == 0
    assert world.client.counters()["open"] == 0


def test_killed_again_and_again_a_program_is_learnt_once(world: World) -> None:
    for group in world.stages(1):
        world.tell(*group)
        world.kill()
        world.pass_time(3)
        world.start_again()
        world.pass_time(3)
    world.pass_time(1)
    assert world.process.store.num_added <= 6
    assert len(world.process.tracker) == 0
    assert world.client.counters()["open"] == 0
