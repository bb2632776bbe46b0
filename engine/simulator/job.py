"""One call inside the simulated engine."""

from __future__ import annotations

from core.slo import LatencySlo, RequestTerms
from engine.simulator.workload import SimCall
from scheduler.request import Request


class Job:
    """A call that has arrived. The replica that has it keeps what grows with each token."""

    __slots__ = (
        "call",
        "computed_tokens",
        "first_scheduled_s",
        "first_token_s",
        "generated",
        "hit_tokens",
        "is_scheduled",
        "is_swapped",
        "key",
        "lane",
        "last_token_s",
        "max_tbt_s",
        "num_parks",
        "num_preemptions",
        "on_time_tokens",
        "place",
        "program",
        "replica",
        "request",
        "serial",
        "stage",
        "terms",
        "worst_lateness_s",
    )

    def __init__(
        self,
        serial: int,
        call: SimCall,
        terms: RequestTerms,
        *,
        program: int,
        stage: int,
        place: int,
    ) -> None:
        self.serial = serial
        self.key = str(serial)
        self.call = call
        self.terms = terms
        self.program, self.stage, self.place = program, stage, place
        self.replica = -1
        self.request: Request | None = None
        """Its record in the frame manager."""
        self.lane = -1
        """Where its figures are in the replica's arrays; -1 while it does not decode."""
        self.generated = 0
        """Output tokens, where it has no lane."""
        self.hit_tokens = 0
        """Of its prompt what a cached text holds for it."""
        self.computed_tokens = 0
        """Of its context what this prefill has done, the cached ones included."""
        self.is_swapped = False
        """Its KV is in host memory and cheaper to bring back than to compute."""
        self.first_scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s = 0.0
        self.max_tbt_s = 0.0
        self.on_time_tokens = 0
        self.worst_lateness_s = -float("inf")
        self.num_parks = self.num_preemptions = 0

    @property
    def is_stream(self) -> bool:
        return isinstance(self.terms.slo, LatencySlo)

    @property
    def context_tokens(self) -> int:
        """Input and output so far; valid where it has no lane."""
        return self.call.input_tokens + self.generated
