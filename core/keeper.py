"""Keeps what a service has learnt on disk: every so often beside the loop, and at the end."""

import logging
from collections import Counter
from collections.abc import Callable

from core.background import Job
from core.checkpoint import CheckpointStore
from core.clock import Clock

logger = logging.getLogger(__name__)

FIRST_CHECKPOINT_S = 5.0
SAVE_LIMIT_S = 4.0


class Keeper:
    """Saves when there is news. Call ``tend`` in every pass of the loop and ``close`` at its end.

    Args:
        store: where checkpoints go; None keeps nothing.
        encode: everything that is to be kept, as bytes.
        progress: a number that is another one once there is news.
        every_s: time between two checkpoints.
        counters: gets ``checkpoints`` and ``failed_checkpoints``.
    """

    def __init__(
        self,
        store: CheckpointStore | None,
        encode: Callable[[], bytes],
        progress: Callable[[], int],
        clock: Clock,
        every_s: float,
        counters: "Counter[str]",
    ) -> None:
        self._store = store
        self._encode = encode
        self._progress = progress
        self._clock = clock
        self._every_s = every_s
        self._counters = counters
        self._saving: Job[object] | None = None
        self._next_save_s = clock.now_s() + min(FIRST_CHECKPOINT_S, every_s)
        self._saved_at = progress()
        self._is_trouble_told = False

    def tend(self) -> None:
        """Save where it is time to; note what became of the last save."""
        now_s = self._clock.now_s()
        if self._saving is not None and self._saving.is_done():
            self._note_save(self._saving)
        if now_s < self._next_save_s - 2 * self._every_s:
            # The clock has jumped back.
            self._next_save_s = now_s
        is_news = self._progress() != self._saved_at
        if now_s >= self._next_save_s and self._saving is None and is_news:
            self._next_save_s = now_s + self._every_s
            self._save()

    def close(self) -> None:
        """Save here and now what has not been saved."""
        if self._saving is not None and self._saving.wait(SAVE_LIMIT_S):
            self._note_save(self._saving)
        elif self._saving is not None:
            self._saved_at = -1
        if self._store is None or self._progress() == self._saved_at:
            return
        try:
            self._store.save(self._encode())
        except (OSError, ValueError) as error:
            logger.warning("checkpoint_failed error=%r: the one before stays", error)

    def _save(self) -> None:
        store = self._store
        if store is None:
            return
        self._saved_at = self._progress()
        # Encoded here, where nothing changes meanwhile; the slow disk is not the loop's.
        payload = self._encode()
        self._saving = Job(lambda: store.save(payload))

    def _note_save(self, saving: "Job[object]") -> None:
        self._saving = None
        try:
            path = saving.result()
        except Exception as error:
            # Nothing of it is on the disk: it is news still.
            self._saved_at = -1
            self._counters["failed_checkpoints"] += 1
            if not self._is_trouble_told:
                self._is_trouble_told = True
                logger.warning("checkpoint_failed error=%r: learning goes on unsaved", error)
        else:
            if path is None:
                # Another process owns the folder; it may end before this one.
                self._saved_at = -1
                return
            self._counters["checkpoints"] += 1
            self._is_trouble_told = False
