"""The policies, by the name that ``--policy`` takes."""

import dataclasses
from collections.abc import Callable, Mapping

from scheduler.lengths import Information
from scheduler.policies.base import Assessment, Policy, Traits
from scheduler.policies.gmax import Gmax, GmaxParts, PaperGmax
from scheduler.policies.orders import (
    EarliestDeadlineFirst,
    FirstComeFirstServed,
    LearningToRank,
    LeastAttainedService,
    Priority,
    Sarathi,
    ShortestJobFirst,
    VirtualTokenCounter,
)

CANCEL_SUFFIX = "+cancel"
"""Appended to a name: work whose deadline has passed stops, whatever its ``on_miss`` says."""

BASELINES: Mapping[str, Callable[[], Policy]] = {
    "fcfs": FirstComeFirstServed,
    "sarathi": Sarathi,
    "sjf": ShortestJobFirst,
    "ltr": LearningToRank,
    "plas": LeastAttainedService,
    "edf": EarliestDeadlineFirst,
    "priority": Priority,
    "vtc": VirtualTokenCounter,
    "gmax-paper": PaperGmax,
}

ABLATIONS: Mapping[str, Callable[[], Policy]] = {
    "gmax-no-analyzer": lambda: Gmax(information=Information.AVERAGE),
    "gmax-no-gmax": lambda: Gmax(GmaxParts(has_gmax=False)),
    "gmax-no-grouping": lambda: Gmax(GmaxParts(has_grouping=False)),
    "gmax-no-jit": lambda: Gmax(GmaxParts(has_jit=False)),
    "gmax-no-adaptive-batch": lambda: Gmax(GmaxParts(has_adaptive_batch=False)),
}

ORACLES: Mapping[str, Callable[[], Policy]] = {
    "gmax-oracle": lambda: Gmax(information=Information.KNOWN),
    "gmax-paper-oracle": lambda: PaperGmax(information=Information.KNOWN),
}
"""With the true length of every answer whose length is known beforehand."""


def _cancelling(make: Callable[[], Policy]) -> Callable[[], Policy]:
    def build() -> Policy:
        policy = make()
        policy.traits = dataclasses.replace(policy.traits, cancels_expired=True)
        return policy

    return build


_PLAIN: Mapping[str, Callable[[], Policy]] = {"gmax": Gmax, **BASELINES, **ORACLES, **ABLATIONS}

POLICIES: Mapping[str, Callable[[], Policy]] = {
    **_PLAIN,
    **{name + CANCEL_SUFFIX: _cancelling(make) for name, make in _PLAIN.items()},
}
"""``sglang`` is not here: that name leaves SGLang's own scheduler in charge."""

CHOICES = f"{', '.join(_PLAIN)}; each also with {CANCEL_SUFFIX}"
"""The names, for people."""

_: tuple[type[Policy], ...] = (
    Gmax,
    PaperGmax,
    FirstComeFirstServed,
    Sarathi,
    EarliestDeadlineFirst,
    ShortestJobFirst,
    Priority,
    LearningToRank,
    LeastAttainedService,
    VirtualTokenCounter,
)

__all__ = [
    "ABLATIONS",
    "BASELINES",
    "CANCEL_SUFFIX",
    "CHOICES",
    "ORACLES",
    "POLICIES",
    "Assessment",
    "Policy",
    "Traits",
]
