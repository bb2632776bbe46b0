"""Baselines that are a single order over the queue."""

from collections.abc import Sequence

from scheduler.policies.base import PolicyContext
from scheduler.request import Request


class _TopOfOrder:
    def choose(
        self, ranked: Sequence[tuple[float, Request]], slots: int
    ) -> list[tuple[float, Request]]:
        return list(ranked[:slots])


class FirstComeFirstServed(_TopOfOrder):
    """Arrival order, as vLLM schedules (Kwon et al., SOSP 2023). Nobody is displaced."""

    may_displace = False

    def scores(self, requests: Sequence[Request], context: PolicyContext) -> list[float]:
        return [-float(request.serial) for request in requests]


class EarliestDeadlineFirst(_TopOfOrder):
    """The earliest due time first: the next token's, or the whole answer's."""

    may_displace = True

    def scores(self, requests: Sequence[Request], context: PolicyContext) -> list[float]:
        return [context.now_s - request.next_due_s() for request in requests]


class ShortestJobFirst(_TopOfOrder):
    """The shortest expected remaining answer first. Nobody is displaced."""

    may_displace = False

    def scores(self, requests: Sequence[Request], context: PolicyContext) -> list[float]:
        lengths = context.lengths
        return [-lengths.remaining_mean(request) for request in requests]
