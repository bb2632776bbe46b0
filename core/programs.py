"""Programs as the HTTP process sees them: one deadline for all calls, and what came of them."""

from collections import Counter
from itertools import islice
from typing import NamedTuple

import msgspec

DEFAULT_TIMEOUT_S = 600.0
MAX_PROGRAMS = 10_000
FORGOTTEN_AT_ONCE = 64


class ProgramCancelledError(ValueError):
    """A call of a program that its client has cancelled."""


class ProgramOutcome(msgspec.Struct, frozen=True):
    """How a program has gone so far: the ``program`` object in the outcome of each of its calls.

    Of its last call this is how the whole program went.
    """

    calls: int
    """Calls of which an answer has finished."""
    tokens: int
    """Input and output tokens of all their answers."""
    goodput_tokens: int
    """The same if the latest of them was complete by the program's deadline, else 0."""


class ProgramClock(NamedTuple):
    """When a program's first call arrived and when the whole program is due, absolute."""

    opened_s: float
    deadline_at_s: float


class ProgramRecord:
    """One program: its clock and what its calls have come to."""

    def __init__(self, clock: ProgramClock) -> None:
        self.clock = clock
        self.heard_s = clock.opened_s
        self.num_live = 0
        self.num_finished = 0
        self.tokens = 0
        self.ended_s = clock.opened_s
        """When the latest of its calls was complete."""
        self.has_failed_last = False
        """The latest of its calls that is over came to nothing."""
        self.is_closed = False
        """No call of it will follow: another one of the same id is another program."""
        self.is_cancelled = False

    def begin(self, now_s: float) -> None:
        """A call has been let in."""
        self.num_live += 1
        self.heard_s = max(self.heard_s, now_s)

    def finished(self, tokens: int, now_s: float, *, is_first: bool = True) -> None:
        """An answer is complete, with so many input and output tokens.

        Args:
            is_first: it is the first of its call; with ``n`` a call has several.
        """
        self.num_finished += is_first
        self.has_failed_last = False
        self.tokens += tokens
        self.ended_s = max(self.ended_s, now_s)

    def leave(self, now_s: float, *, has_failed: bool = False) -> None:
        """A call is over, however it ended."""
        self.num_live = max(self.num_live - 1, 0)
        self.has_failed_last |= has_failed
        self.heard_s = max(self.heard_s, now_s)

    @property
    def met(self) -> bool:
        """Whether it would be in time if nothing followed."""
        is_in_time = self.ended_s <= self.clock.deadline_at_s and self.num_finished > 0
        return is_in_time and not (self.is_cancelled or self.has_failed_last)

    def outcome(self) -> ProgramOutcome:
        return ProgramOutcome(self.num_finished, self.tokens, self.tokens if self.met else 0)


class ProgramBook:
    """Running programs by tenant and id; the first call sets the deadline of all.

    Bounded: of too many the least recently used without a live call is forgotten, of the tenant
    that has the most, so a program that goes quiet among very many may get a new deadline. Where
    all others have live calls, that is the newcomer: it has its deadline and no record.

    Args:
        timeout_s: a program without a call for so long is over.
    """

    def __init__(
        self, max_programs: int = MAX_PROGRAMS, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        self._records: dict[tuple[str, str], ProgramRecord] = {}
        self._num_of: Counter[str] = Counter()
        """Programs of each tenant."""
        self._max_programs = max_programs
        self._timeout_s = timeout_s

    def __len__(self) -> int:
        """Programs that are known, cancelled ones among them."""
        return len(self._records)

    def join(self, tenant: str, program_id: str, now_s: float, deadline_s: float) -> ProgramClock:
        """A call of the program arrives; ``deadline_s`` counts where it is the first.

        Raises:
            ProgramCancelledError: its client has cancelled it.
        """
        self.check(tenant, program_id, now_s)
        key = (tenant, program_id)
        record = self._remove(key)
        if record is None or record.is_closed or self._is_over(record, now_s):
            record = ProgramRecord(ProgramClock(now_s, now_s + deadline_s))
        self._records[key] = record
        self._num_of[tenant] += 1
        record.heard_s = max(record.heard_s, now_s)
        self._bound(now_s)
        return record.clock

    def check(self, tenant: str, program_id: str, now_s: float) -> None:
        """Raise ProgramCancelledError where its client has cancelled it a short time ago."""
        record = self._records.get((tenant, program_id))
        if record is not None and record.is_cancelled and not self._is_over(record, now_s):
            raise ProgramCancelledError(program_id)

    def get(self, tenant: str, program_id: str) -> ProgramRecord | None:
        """The record of a program, while a call of it may follow or is live."""
        return self._records.get((tenant, program_id))

    def close(self, tenant: str, program_id: str) -> ProgramRecord | None:
        """No call of it will follow; its record, or None where it is not known."""
        record = self._records.get((tenant, program_id))
        if record is None or record.is_cancelled:
            return None
        record.is_closed = True
        return record

    def reopen(self, tenant: str, program_id: str) -> None:
        """What was to be its last call has come to nothing: another one may follow."""
        record = self._records.get((tenant, program_id))
        if record is not None:
            record.is_closed = False

    def cancel(self, tenant: str, program_id: str) -> ProgramRecord | None:
        """Refuse its calls from now on; its record, or None where it is not known or over."""
        record = self._records.get((tenant, program_id))
        if record is None or (record.is_closed and not record.num_live):
            return None
        record.is_cancelled = True
        return record

    def tidy(self, tenant: str, program_id: str) -> None:
        """Forget a program that is closed and has no live call."""
        record = self._records.get((tenant, program_id))
        if record is not None and record.is_closed and not record.num_live:
            self._remove((tenant, program_id))

    def _is_over(self, record: ProgramRecord, now_s: float) -> bool:
        return not record.num_live and now_s - record.heard_s >= self._timeout_s

    def _bound(self, now_s: float) -> None:
        """Forget what is over, and of too many the quietest of whoever has the most.

        A program with a live call is kept, so one sender's ids do not drive out another's.
        """
        for key, record in list(islice(self._records.items(), FORGOTTEN_AT_ONCE)):
            if not self._is_over(record, now_s):
                break
            self._remove(key)
        while len(self._records) > self._max_programs:
            tenant = max(self._num_of, key=self._num_of.__getitem__)
            quiet = (
                key
                for key, record in self._records.items()
                if key[0] == tenant and not record.num_live
            )
            oldest = next(quiet, None)
            if oldest is None:
                return
            self._remove(oldest)

    def _remove(self, key: tuple[str, str]) -> ProgramRecord | None:
        record = self._records.pop(key, None)
        if record is not None:
            self._num_of[key[0]] -= 1
            if not self._num_of[key[0]]:
                del self._num_of[key[0]]
        return record
