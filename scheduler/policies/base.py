"""What a policy is: scores for the live requests, and how they may be moved."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from scheduler.lengths import LengthEstimates
from scheduler.request import Request
from scheduler.step_time import StepTimeModel


@dataclass(frozen=True)
class PolicyContext:
    """What a policy may look at when it scores."""

    now_s: float
    lengths: LengthEstimates
    step_time: StepTimeModel
    batch_size: int
    """Requests that will run together in the coming frame."""
    mean_context_tokens: float
    """Of the requests that hold KV."""

    @property
    def step_s(self) -> float:
        """Expected seconds of a decode step of the coming frame: v_token of the paper."""
        context = int(self.batch_size * self.mean_context_tokens)
        return self.step_time.step_s(self.batch_size, context)


class Policy(Protocol):
    """Ranks live requests. Stateless but for what it learns; no clock, no randomness."""

    may_displace: bool
    """Whether a better request may take a running one's place at a frame boundary."""

    def scores(self, requests: Sequence[Request], context: PolicyContext) -> list[float]:
        """One finite score per request, higher runs first; ties keep arrival order."""
        ...

    def choose(
        self, ranked: Sequence[tuple[float, Request]], slots: int
    ) -> list[tuple[float, Request]]:
        """The group to run: at most ``slots`` of the ranked requests, best first."""
        ...
