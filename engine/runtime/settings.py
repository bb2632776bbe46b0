"""What our hooks need to know inside SGLang's processes, handed over in one environment variable.

SGLang spawns its processes itself and imports us there through its plugin entry point, so
the settings travel with the environment. Without the variable our hooks stay out.
"""

import os

import msgspec

from core.terms import SloDefaults
from scheduler.config import SchedulerConfig

ENVIRONMENT_VARIABLE = "JITSERVE_SETTINGS"
STOCK_POLICY = "sglang"
"""The name under which SGLang's own scheduler stays in charge."""

CPU_ATTENTION = ("jitserve_cpu", "torch_native")
"""Attention backends that a CPU has, by SGLang's flag: ours, the default, and SGLang's own."""

KNOB_POLICY = "jitserve_policy"
KNOB_FORCE_MOVES = "jitserve_force_moves_every"
KNOB_FORECASTS = "jitserve_forecasts"
KNOB_OUTLOOKS = "jitserve_outlooks"
KNOB_END_PROGRAM = "jitserve_end_program"
KNOB_CANCEL_PROGRAM = "jitserve_cancel_program"
"""Names under which SGLang's control messages carry our knobs; it takes numbers only."""


class SloConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Server-side defaults: the file of ``--slo-config``.

    The most specific entry wins as a whole: route, then tenant, then model, then default.
    """

    default: SloDefaults = SloDefaults()
    models: dict[str, SloDefaults] = {}
    tenants: dict[str, SloDefaults] = {}
    routes: dict[str, SloDefaults] = {}

    def defaults_for(self, model: str, tenant: str, route: str) -> SloDefaults:
        """The defaults of one request."""
        for table, key in ((self.routes, route), (self.tenants, tenant), (self.models, model)):
            if key in table:
                return table[key]
        return self.default


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of ours that SGLang's processes are told."""

    policy: str
    scheduler: SchedulerConfig
    slo: SloConfig = SloConfig()
    max_batch: int | None = None
    """Most requests running together on all data-parallel ranks; None: as SGLang decides."""
    predictor_address: str = ""
    """Where the length predictor listens; empty: lengths of each class only."""
    graphs_address: str = ""
    """Where the graphs process listens; empty: programs go by what has been seen of them."""
    trusts_known_lengths: bool = False
    """Testing: take an answer's length from the request where it says so."""
    kv_swap_bytes: int = 0
    """Host memory of each scheduler process for the KV of preempted requests; 0: none."""
    force_moves_every: int = 0
    """Testing: park and preempt running requests every so many steps; 0 never."""

    @property
    def is_stock(self) -> bool:
        """Whether SGLang's own scheduler decides."""
        return self.policy == STOCK_POLICY

    def to_environment(self) -> None:
        """Hand these settings to the processes started from here."""
        os.environ[ENVIRONMENT_VARIABLE] = msgspec.json.encode(self).decode()


def from_environment() -> Settings | None:
    """The settings of this server, or None where the process is not one of ours."""
    text = os.environ.get(ENVIRONMENT_VARIABLE)
    return None if text is None else msgspec.json.decode(text, type=Settings)
