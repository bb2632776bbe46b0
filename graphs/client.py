"""The serving side of the graphs process: tells it what happens, listens, and never waits.

Every call returns at once. What has happened to programs that are open is kept for a while, so
that a process that was started again can be told: it has lost what was running.
"""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice
from typing import assert_never

from core.channel import DealerChannel
from core.clock import Clock
from core.presence import Presence
from core.probe import ChannelProbe
from graphs.protocol import (
    MAX_BATCH,
    Arrived,
    AskStatus,
    Closed,
    Event,
    Events,
    Finished,
    FromGraphs,
    Hello,
    Outlook,
    Outlooks,
    Ready,
    Status,
    ToGraphs,
    check_outlook,
    client_codec,
)
from graphs.shape import Call, Pace

logger = logging.getLogger(__name__)

MESSAGES_PER_POLL = 8
MAX_UNSENT = 8192
"""Events kept while nobody takes them; the oldest are lost first."""
MAX_OPEN = 10_000
MAX_KEPT = 50_000
"""Events of open programs kept for a process that starts anew, in all."""


class _Open:
    """A program that is open and what has happened in it."""

    __slots__ = ("events", "heard_s", "is_closed", "is_final", "live", "num_calls")

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.live: set[int] = set()
        self.num_calls = 0
        self.is_final = False
        """Its last call has arrived, or its client has said that none will follow."""
        self.is_closed = False
        """Its client has said so: for good."""
        self.heard_s = 0.0


class GraphsClient:
    """One scheduler process's connection to the graphs process.

    Args:
        address: ``ipc://PATH`` or ``tcp://HOST:PORT``; ValueError where it is neither.
        timeout_s: a program that has been quiet for so long is over.
    """

    def __init__(self, address: str, clock: Clock, *, timeout_s: float) -> None:
        self._channel: DealerChannel[ToGraphs, FromGraphs] = DealerChannel(address, client_codec())
        self._clock = clock
        self._timeout_s = timeout_s
        self._open: OrderedDict[int, _Open] = OrderedDict()
        """The longest quiet first."""
        self._kept: OrderedDict[int, None] = OrderedDict()
        """Programs of which events are kept, the longest quiet first."""
        self._num_kept = 0
        self._unsent: OrderedDict[int, Event] = OrderedDict()
        self._serial = 0
        self._session: int | None = None
        self._presence = Presence(
            clock, logger, "graphs_silent seconds=%.0f: programs go by what is known of them"
        )
        self.num_bad = 0
        """Outlooks that made no sense."""
        self.num_lost = 0
        """Events that nobody took."""

    def arrived(
        self,
        program: int,
        call: Call,
        *,
        opened_s: float,
        deadline_at_s: float,
        application: int = 0,
        tenant: int = 0,
        is_final: bool = False,
    ) -> None:
        """A call of a program has arrived; ``poll`` tells."""
        opened = self._touch(program)
        event = Arrived(
            program, application, opened.num_calls, call, opened_s, deadline_at_s, is_final, tenant
        )
        opened.num_calls += 1
        opened.is_final |= is_final
        opened.live.add(call.node)
        self._note(opened, event)

    def finished(
        self,
        program: int,
        node: int,
        output_tokens: int,
        *,
        at_s: float,
        has_failed: bool,
        cached_tokens: int = 0,
    ) -> None:
        """A call has ended; ignored where it is not one of an open program."""
        opened = self._open.get(program)
        if opened is None or node not in opened.live:
            return
        opened = self._touch(program)
        opened.live.discard(node)
        event = Finished(program, node, output_tokens, at_s, has_failed, cached_tokens)
        self._note(opened, event)
        if has_failed and not opened.is_closed:
            # If it was to be the last, another one may follow.
            opened.is_final = False
        if opened.is_final and not opened.live:
            self._forget(program)

    def closed(self, program: int, *, is_cancelled: bool) -> None:
        """A program is over by its client's word."""
        if program not in self._open:
            return
        opened = self._touch(program)
        self._note(opened, Closed(program, is_cancelled))
        opened.is_final = opened.is_closed = True
        if is_cancelled or not opened.live:
            self._forget(program)

    def poll(self, pace: Pace) -> tuple[Outlook, ...]:
        """Tell what is to be told and take in what has come. Call it in every pass."""
        now_s = self._clock.now_s()
        if self._presence.is_hello_due(now_s):
            self._channel.send(Hello())
            self._expire(now_s)
        if self._unsent:
            self._send_events(pace)
        messages = self._channel.receive(MESSAGES_PER_POLL)
        if not messages:
            self._presence.not_heard(now_s)
            return ()
        self._presence.heard(now_s)
        return self._take(messages)

    @property
    def has_news(self) -> bool:
        """Whether there is something to tell."""
        return bool(self._unsent)

    def is_alive(self) -> bool:
        """Whether the process was heard in the last seconds."""
        return self._presence.is_alive()

    def counters(self) -> dict[str, int]:
        """Counts since the start, for whoever watches."""
        return {
            **self._channel.counters,
            "bad": self.num_bad,
            "lost": self.num_lost,
            "open": len(self._open),
            "unsent": len(self._unsent),
        }

    def wait(self, timeout_s: float) -> bool:
        """Whether a message is here within ``timeout_s``; for tests and tools, never in a frame."""
        return self._channel.wait(timeout_s)

    def close(self) -> None:
        self._channel.close()

    # What is kept.

    def _touch(self, program: int) -> _Open:
        opened = self._open.get(program)
        if opened is None:
            opened = self._open[program] = _Open()
        self._open.move_to_end(program)
        opened.heard_s = self._clock.now_s()
        while len(self._open) > MAX_OPEN:
            self._forget(next(iter(self._open)))
        return opened

    def _note(self, opened: _Open, event: Event) -> None:
        opened.events.append(event)
        self._kept[event.program] = None
        self._kept.move_to_end(event.program)
        self._num_kept += 1
        self._queue(event)
        while self._num_kept > MAX_KEPT:
            self._drop_events(next(iter(self._kept)))

    def _queue(self, event: Event) -> None:
        self._serial += 1
        self._unsent[self._serial] = event
        while len(self._unsent) > MAX_UNSENT:
            self._unsent.popitem(last=False)
            self.num_lost += 1

    def _drop_events(self, program: int) -> None:
        """What has happened in it cannot be told again."""
        opened = self._open[program]
        self._num_kept -= len(opened.events)
        opened.events = []
        self._kept.pop(program, None)

    def _forget(self, program: int) -> None:
        self._drop_events(program)
        del self._open[program]

    def _expire(self, now_s: float) -> None:
        if self._open and next(reversed(self._open.values())).heard_s > now_s:
            # The clock has jumped back.
            for opened in self._open.values():
                opened.heard_s = min(opened.heard_s, now_s)
        while self._open:
            program, opened = next(iter(self._open.items()))
            if now_s - opened.heard_s < self._timeout_s:
                return
            if opened.live:
                # Its calls take their time.
                opened.heard_s = now_s
                self._open.move_to_end(program)
                return
            self._forget(program)

    # Messages.

    def _send_events(self, pace: Pace) -> None:
        while self._unsent:
            batch = list(islice(self._unsent.items(), MAX_BATCH))
            if not self._channel.send(Events(tuple(event for _, event in batch), pace)):
                return
            for serial, _ in batch:
                del self._unsent[serial]

    def _take(self, messages: Sequence[FromGraphs]) -> tuple[Outlook, ...]:
        outlooks: list[Outlook] = []
        for message in messages:
            match message:
                case Ready(session=session):
                    self._greet(session)
                case Outlooks(outlooks=items):
                    outlooks += self._believable(items)
                case Status():
                    pass
                case _:
                    assert_never(message)
        return tuple(outlooks)

    def _greet(self, session: int) -> None:
        before, self._session = self._session, session
        if before is None or before == session:
            return
        logger.info("graphs_restarted open_programs=%d", len(self._open))
        self._unsent.clear()
        for opened in self._open.values():
            for event in opened.events:
                self._queue(event)

    def _believable(self, items: Sequence[Outlook]) -> list[Outlook]:
        found = []
        for outlook in items:
            if outlook.program not in self._open:
                continue
            try:
                check_outlook(outlook)
            except ValueError:
                self.num_bad += 1
                continue
            found.append(outlook)
        return found


class GraphsProbe(ChannelProbe[ToGraphs, FromGraphs, Status]):
    """What the launcher listens through: whether the process answers at all."""

    def __init__(self, address: str) -> None:
        super().__init__(address, client_codec(), Hello(), AskStatus(), Status)
