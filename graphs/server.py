"""The graphs process: one loop that follows programs, answers, clusters beside it and saves.

``python -m graphs --address ipc:///run/jitserve/graphs --state-dir DIR``. Whatever comes over
the socket is decoded into known messages or dropped with a count.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import assert_never

from core.background import Job
from core.checkpoint import CheckpointStore
from core.clock import Clock
from core.keeper import Keeper
from graphs import state
from graphs.protocol import (
    MAX_OUTLOOKS,
    AskStatus,
    Events,
    FromGraphs,
    Hello,
    Outlook,
    Outlooks,
    Ready,
    Status,
    ToGraphs,
    check_event,
    check_pace,
)
from graphs.store import Clustered, PatternStore
from graphs.tracker import Tracker

logger = logging.getLogger(__name__)

MAX_PEERS = 1024
EXPIRE_EVERY_S = 0.25
FAILED_PAUSE_S = 60.0

Send = Callable[[bytes, FromGraphs], bool]


class GraphsServer:
    """Everything but the socket: messages in, messages out through ``send``.

    Args:
        session: differs from that of every other start, so that clients notice.
        store: where checkpoints go; None keeps nothing.
    """

    def __init__(
        self,
        tracker: Tracker,
        send: Send,
        clock: Clock,
        *,
        session: int,
        store: CheckpointStore | None = None,
        checkpoint_every_s: float = 60.0,
    ) -> None:
        self._tracker = tracker
        self._send = send
        self._clock = clock
        self._session = session
        self._greeted: OrderedDict[bytes, None] = OrderedDict()
        self._clustering: Job[Clustered] | None = None
        self._next_expiry_s = self._next_clustering_s = -float("inf")
        self.counters: Counter[str] = Counter()
        self._keeper = Keeper(
            store,
            lambda: state.encode(tracker.store),
            lambda: tracker.store.num_added,
            clock,
            checkpoint_every_s,
            self.counters,
        )

    @property
    def is_behind(self) -> bool:
        """Never: whatever comes is dealt with at once."""
        return False

    def handle(self, messages: list[tuple[bytes, ToGraphs]]) -> None:
        """Follow what has happened; each program is looked at once per pass."""
        now_s = self._clock.now_s()
        for peer, message in messages:
            if peer not in self._greeted:
                self._greet(peer)
            match message:
                case Hello():
                    self._send(peer, Ready(self._session))
                case Events():
                    self._take(peer, message, now_s)
                case AskStatus():
                    self._send(peer, self.status())
                case _:
                    assert_never(message)
        self._answer()

    def status(self) -> Status:
        """Liveness and counts."""
        store = self._tracker.store
        counts = {
            **self.counters,
            **self._tracker.counters,
            "running": len(self._tracker),
            "patterns": len(store),
            "finished": store.num_added,
            "merged": store.num_merged,
            "evicted": store.num_evicted,
            "clusterings": store.num_clusterings,
        }
        return Status(self._session, counts)

    def tend(self) -> None:
        """Close what is quiet, cluster and save where it is time to; call it in every pass."""
        now_s = self._clock.now_s()
        if now_s >= self._next_expiry_s or now_s < self._next_expiry_s - 2 * EXPIRE_EVERY_S:
            self._next_expiry_s = now_s + EXPIRE_EVERY_S
            self._tracker.expire(now_s)
            self._tracker.store.decay(now_s)
        self._tend_clustering(now_s)
        self._keeper.tend()

    def close(self) -> None:
        """Save what has been learnt."""
        self._keeper.close()

    def _greet(self, peer: bytes) -> None:
        self._greeted[peer] = None
        while len(self._greeted) > MAX_PEERS:
            self._greeted.popitem(last=False)
        self._send(peer, Ready(self._session))

    def _take(self, peer: bytes, message: Events, now_s: float) -> None:
        try:
            check_pace(message.pace)
        except ValueError:
            self.counters["bad_events"] += len(message.events)
            return
        for event in message.events:
            try:
                check_event(event)
                self._tracker.take(event, message.pace, now_s, peer)
            except ValueError:
                self.counters["bad_events"] += 1

    def _answer(self) -> None:
        answers: dict[bytes, list[Outlook]] = {}
        for running, outlook in self._tracker.outlooks():
            for peer in running.peers:
                answers.setdefault(peer, []).append(outlook)
        for peer, outlooks in answers.items():
            for start in range(0, len(outlooks), MAX_OUTLOOKS):
                self._send(peer, Outlooks(tuple(outlooks[start : start + MAX_OUTLOOKS])))
            self.counters["outlooks"] += len(outlooks)

    def _tend_clustering(self, now_s: float) -> None:
        store = self._tracker.store
        if self._clustering is None:
            if store.is_clustering_due and now_s >= self._next_clustering_s:
                self._clustering = Job(store.clustering().run)
            return
        if not self._clustering.is_done():
            return
        job, self._clustering = self._clustering, None
        try:
            store.adopt(job.result())
        except Exception as error:
            # Whatever is wrong with the patterns: the store bounds itself without it.
            self._next_clustering_s = now_s + FAILED_PAUSE_S
            self.counters["failed_clusterings"] += 1
            logger.error("clustering_failed error=%r: all patterns stay", error)


def restored_store(
    make: Callable[[], PatternStore], checkpoints: CheckpointStore | None
) -> tuple[PatternStore, str]:
    """A store with what is known: the newest good checkpoint, else nothing.

    Returns:
        The store, and where it is from: ``checkpoint`` or ``nothing``.
    """

    def restored(data: bytes) -> PatternStore:
        # A store of its own for each try: a bad state may have been half read.
        store = make()
        state.decode_into(data, store)
        return store

    found = None if checkpoints is None else checkpoints.newest(restored)
    return (make(), "nothing") if found is None else (found, "checkpoint")
