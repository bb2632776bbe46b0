"""One request as the scheduler sees it."""

from core.slo import LatencySlo, RequestTerms, SloType, deadline_at_s, slo_type
from scheduler.lifecycle import RequestState, check_transition


class Request:
    """Terms that never change and progress that does. Only ``FrameManager`` writes to it."""

    __slots__ = (
        "deadline_at_s",
        "first_scheduled_s",
        "frames_blocked",
        "frames_waited",
        "generated_tokens",
        "input_tokens",
        "is_pinned",
        "is_urgent",
        "max_output_tokens",
        "num_parks",
        "num_preemptions",
        "request_id",
        "serial",
        "slo_type",
        "state",
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
    ) -> None:
        self.request_id = request_id
        self.serial = serial
        """Arrival order. It survives preemption, so a requeued request keeps its place."""
        self.terms = terms
        self.input_tokens = input_tokens
        self.max_output_tokens = max(max_output_tokens, 0)
        self.is_pinned = is_pinned
        """Once running it is never parked or preempted by choice (beam groups, sessions)."""
        self.is_urgent = is_urgent
        """Goes before everything (health checks)."""
        self.slo_type: SloType = slo_type(terms.slo)
        self.deadline_at_s = deadline_at_s(terms)
        self.state = RequestState.WAITING
        self.generated_tokens = 0
        self.first_scheduled_s: float | None = None
        self.frames_waited = 0
        self.frames_blocked = 0
        """Frames in which it was chosen and its KV did not fit."""
        self.num_parks = 0
        self.num_preemptions = 0

    def move_to(self, state: RequestState) -> None:
        """Change state; raises ``TransitionError`` on a move the table does not have."""
        check_transition(self.request_id, self.state, state)
        self.state = state
        if state is RequestState.PARKED:
            self.num_parks += 1
        elif state is RequestState.PREEMPTED:
            self.num_preemptions += 1

    @property
    def prefill_tokens(self) -> int:
        """Tokens to prefill before the next one can be decoded (none once KV is resident)."""
        if self.holds_kv:
            return 0
        return self.input_tokens + self.generated_tokens

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
        """When its next token (latency) or its whole answer is due."""
        slo = self.terms.slo
        if isinstance(slo, LatencySlo):
            offset_s = slo.target_ttft_s + self.generated_tokens * slo.target_tbt_s
            return self.terms.arrival_s + offset_s
        return self.deadline_at_s

    def __repr__(self) -> str:
        return f"<Request {self.request_id} {self.slo_type} {self.state}>"
