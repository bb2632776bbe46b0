"""The policies, by the name that ``--policy`` takes."""

from collections.abc import Callable, Mapping

from scheduler.policies.base import Policy, PolicyContext
from scheduler.policies.gmax import Gmax
from scheduler.policies.orders import EarliestDeadlineFirst, FirstComeFirstServed, ShortestJobFirst

POLICIES: Mapping[str, Callable[[], Policy]] = {
    "gmax": Gmax,
    "fcfs": FirstComeFirstServed,
    "edf": EarliestDeadlineFirst,
    "sjf": ShortestJobFirst,
}
"""``sglang`` is not here: that name leaves SGLang's own scheduler in charge."""

_: tuple[type[Policy], ...] = (Gmax, FirstComeFirstServed, EarliestDeadlineFirst, ShortestJobFirst)

__all__ = ["POLICIES", "Policy", "PolicyContext"]
