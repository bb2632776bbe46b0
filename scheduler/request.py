"""One request as the scheduler sees it: fixed terms, and a view of its row in the table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from core.slo import LatencySlo, ReasoningSlo, RequestTerms, SloType, deadline_at_s, slo_type
from scheduler.lifecycle import RequestState, check_transition

if TYPE_CHECKING:
    from scheduler.table import RequestTable

MAX_TOKENS = 1 << 40
"""Token counts are clamped to this: nothing that a sender may claim overflows a sum."""


class Request:
    """Terms that never change; what changes is in the table. Only ``FrameManager`` writes to it."""

    __slots__ = (
        "_ended",
        "_ended_tokens",
        "_table",
        "deadline_at_s",
        "first_scheduled_s",
        "input_tokens",
        "is_pinned",
        "is_urgent",
        "known_output_tokens",
        "max_output_tokens",
        "num_parks",
        "num_preemptions",
        "priority",
        "request_id",
        "row",
        "serial",
        "slo_type",
        "terms",
    )

    def __init__(
        self,
        request_id: str,
        serial: int,
        terms: RequestTerms,
        *,
        input_tokens: int,
        max_output_tokens: int,
        is_pinned: bool = False,
        is_urgent: bool = False,
        priority: int = 0,
        known_output_tokens: int | None = None,
    ) -> None:
        self.request_id = request_id
        self.serial = serial
        """Arrival order. It survives preemption, so a requeued request keeps its place."""
        self.terms = terms
        self.input_tokens = min(max(input_tokens, 0), MAX_TOKENS)
        self.max_output_tokens = min(max(max_output_tokens, 0), MAX_TOKENS)
        self.is_pinned = is_pinned
        """Once running it keeps its place, with others like it up to a share of the batch."""
        self.is_urgent = is_urgent
        """Goes before everything (health checks)."""
        self.priority = priority
        """The sender's own; higher goes first. Only the ``priority`` baseline looks at it."""
        self.known_output_tokens = known_output_tokens
        """How long the answer will be, where that is certain; only oracles look at it."""
        self.slo_type: SloType = slo_type(terms.slo)
        self.deadline_at_s = deadline_at_s(terms)
        self.first_scheduled_s: float | None = None
        self.num_parks = 0
        self.num_preemptions = 0
        self.row = -1
        """Where it stands in the table; moves when another request leaves."""
        self._table: RequestTable | None = None
        self._ended: RequestState = RequestState.WAITING
        self._ended_tokens = 0

    def attach(self, table: RequestTable, row: int) -> None:
        """It has entered ``table``."""
        self._table, self.row = table, row

    def detach(self, state: RequestState) -> None:
        """It has left the table; its last figures stay readable."""
        self._ended_tokens = self.generated_tokens
        self._ended = state
        self._table, self.row = None, -1

    def move_to(self, state: RequestState) -> None:
        """Change state; raises ``TransitionError`` on a move the table of moves does not have."""
        check_transition(self.request_id, self.state, state)
        if self._table is not None:
            self._table.set_state(self.row, state)
        self._ended = state
        if state is RequestState.PARKED:
            self.num_parks += 1
        elif state is RequestState.PREEMPTED:
            self.num_preemptions += 1

    @property
    def state(self) -> RequestState:
        return self._ended if self._table is None else self._table.state_of(self.row)

    @property
    def generated_tokens(self) -> int:
        if self._table is None:
            return self._ended_tokens
        return int(self._table.generated_tokens[self.row])

    @property
    def frames_waited(self) -> int:
        """Frames in which others were chosen instead."""
        return 0 if self._table is None else int(self._table.frames_waited[self.row])

    @property
    def frames_blocked(self) -> int:
        """Frames in which it was chosen and its KV did not fit."""
        return 0 if self._table is None else int(self._table.frames_blocked[self.row])

    @property
    def prefill_tokens(self) -> int:
        """Tokens to prefill before the next one can be decoded (none once KV is resident)."""
        return 0 if self.holds_kv else self.context_tokens

    @property
    def holds_kv(self) -> bool:
        """Whether its KV is resident."""
        return self.state in (RequestState.RUNNING, RequestState.PARKED)

    @property
    def context_tokens(self) -> int:
        """Input and output tokens so far."""
        return self.input_tokens + self.generated_tokens

    @property
    def is_latency(self) -> bool:
        return isinstance(self.terms.slo, LatencySlo)

    @property
    def has_slo(self) -> bool:
        return self.slo_type != "best_effort"

    def is_expired(self, now_s: float) -> bool:
        """Its deadline has passed, so nothing of it can count any more."""
        return self.has_slo and now_s > self.deadline_at_s

    def next_due_s(self) -> float:
        """When its next token (stream) or its whole answer is due."""
        slo = self.terms.slo
        if isinstance(slo, LatencySlo):
            offset_s = slo.target_ttft_s + self.generated_tokens * slo.target_tbt_s
            return self.terms.arrival_s + offset_s
        if isinstance(slo, ReasoningSlo) and self._table is not None:
            return self._table.next_due_s(self.row)
        return self.deadline_at_s

    def __repr__(self) -> str:
        return f"<Request {self.request_id} {self.slo_type} {self.state}>"
