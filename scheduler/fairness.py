"""Fairness between tenants beside goodput (paper, section JITServe across Design Space).

priority'(r) = (1 - f) * priority(r) + f * Fair(r). Priorities have a unit and fairness has
none, so Fair(r) in 0 to 1 is taken in units of the frame's highest priority.
"""

from collections.abc import Callable

import numpy as np

from scheduler.estimates import Estimates
from scheduler.objective import bounded
from scheduler.table import Floats

FairFunction = Callable[[Estimates], Floats]
"""Of the rows of a frame, shape (n,): 1 for whom it is fairest to serve next, 0 for the last.

A user's own is given by its dotted path (``--fairness-function package.module:name``) and
gets the attained service of each row's tenant: ``function(service)``, both of shape (n,).
"""


def least_service_first(estimates: Estimates) -> Floats:
    """1 for the tenant that has been served least, 0 for the one served most (VTC)."""
    return _least_first(attained_service(estimates))


def attained_service(estimates: Estimates) -> Floats:
    """Service of each row's tenant so far: input tokens plus twice the output tokens."""
    service = estimates.context.tenant_service
    rows = estimates.rows
    return np.zeros(rows.size) if service is None else service[rows.tenant]


def users(function: Callable[[Floats], Floats]) -> FairFunction:
    """A user's function, kept from doing harm: bounded to 0 to 1, and VTC where it raises."""

    def fair(estimates: Estimates) -> Floats:
        service = attained_service(estimates)
        try:
            return np.minimum(bounded(function(service.copy()), service), 1.0)
        except Exception:
            return _least_first(service)

    return fair


def blend(scores: Floats, fairness: Floats, weight: float) -> Floats:
    """(1 - f) * priority + f * Fair, for a policy whose priorities are 0 or more."""
    if not scores.size:
        return scores
    unit = max(float(scores.max()), 1e-12)
    mixed: Floats = (1 - weight) * scores + weight * fairness * unit
    return mixed


def _least_first(service: Floats) -> Floats:
    if not service.size:
        return service
    spread = service.max() - service.min()
    fair: Floats = (service.max() - service) / spread if spread > 0 else np.ones_like(service)
    return fair


_: FairFunction = least_service_first
