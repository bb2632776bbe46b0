"""What each tenant has been served: the counters behind fairness.

Virtual token counters as in VTC (Sheng et al., Fairness in Serving Large Language Models,
OSDI 2024): service is input tokens plus twice the output tokens, and a tenant that comes
back after a pause starts level with the least served active one, so that nobody saves up.
"""

import numpy as np

from scheduler.table import Floats, Ints

INPUT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0


class Tenants:
    """Counters by tenant. Idle tenants above ``max_idle`` are forgotten, the longest idle first."""

    def __init__(self, max_idle: int = 4096) -> None:
        self._max_idle = max_idle
        self._index: dict[str, int] = {}
        self._free: list[int] = []
        self._idle: dict[str, None] = {}
        self._names: list[str] = []
        self._live = np.zeros(16, dtype=np.int64)
        self._service = np.zeros(16)

    def __len__(self) -> int:
        return len(self._index)

    def join(self, tenant: str) -> int:
        """A request of the tenant arrived; the tenant's index."""
        index = self._index.get(tenant)
        if index is None:
            index = self._new(tenant)
        if self._live[index] == 0:
            self._idle.pop(tenant, None)
            active = self._service[self._live > 0]
            if active.size:
                self._service[index] = max(self._service[index], active.min())
        self._live[index] += 1
        return index

    def leave(self, index: int) -> None:
        """One of its requests ended."""
        self._live[index] -= 1
        if self._live[index] == 0:
            self._idle[self._names[index]] = None
            if len(self._idle) > self._max_idle:
                oldest = next(iter(self._idle))
                del self._idle[oldest]
                self._free.append(self._index.pop(oldest))

    def serve(self, index: int, *, input_tokens: float = 0, output_tokens: float = 0) -> None:
        """It was given service."""
        self._service[index] += INPUT_WEIGHT * input_tokens + OUTPUT_WEIGHT * output_tokens

    def serve_all(self, indices: Ints, *, output_tokens: float) -> None:
        """Each was given so many output tokens; an index may be there several times."""
        np.add.at(self._service, indices, OUTPUT_WEIGHT * output_tokens)

    def service_of(self, tenant: str) -> float:
        """Its counter, 0 for one that is not known."""
        index = self._index.get(tenant)
        return 0.0 if index is None else float(self._service[index])

    def service(self) -> Floats:
        """Counters by index, shape (indices in use so far,)."""
        return self._service[: max(len(self._names), 1)]

    def _new(self, tenant: str) -> int:
        if self._free:
            index = self._free.pop()
            self._names[index], self._service[index], self._live[index] = tenant, 0.0, 0
        else:
            index = len(self._names)
            self._names.append(tenant)
            if index == len(self._service):
                self._live = np.concatenate([self._live, np.zeros_like(self._live)])
                self._service = np.concatenate([self._service, np.zeros_like(self._service)])
        self._index[tenant] = index
        return index
