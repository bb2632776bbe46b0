"""Settings of the decision core."""

import math

import msgspec

from core.programs import DEFAULT_TIMEOUT_S
from scheduler.policies import CHOICES, POLICIES


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an operator may set. Raises ValueError that begins with the field's name."""

    policy: str = "gmax"
    frame_steps: int = 50
    """Decode steps a frame lasts at most."""
    frame_s: float = 0.5
    """Seconds a frame lasts at most: a slow engine must not decide only every 50 steps."""
    turns_per_frame: int = 0
    """How often in a frame those that have their tokens may give way to others; 0: never."""
    displace_margin: float = 0.1
    """A running request gives way only to one better by this share (paper, appendix)."""
    max_moves_fraction: float = 0.5
    """Parks and preemptions of one frame, as a share of the batch: no churn."""
    max_pinned_fraction: float = 0.5
    """Share of the batch that pinned requests may keep against better ones."""
    length_quantile: float = 0.9
    """Quantile of the answer's length used as its upper bound."""
    reserve_after_frames: int = 40
    """A request chosen in so many frames without its KV fitting gets what comes free next."""
    starvation_frames: int = 600
    """A request passed over for so many frames goes first, one for 64 places at a time."""
    program_timeout_s: float = DEFAULT_TIMEOUT_S
    """A program without a call for so long is over."""
    max_decode_pause_s: float = 0.25
    """Prefill may keep running requests from decoding for about this long at a time."""
    goodput: str = "token"
    """What is maximised: token, request, INPUT:OUTPUT weights, or a dotted path."""
    fairness: float = 0.0
    """f: weight of fairness between tenants against goodput, 0 to 1."""
    fairness_function: str = ""
    """Dotted path of a function that says what is fair; none: least service first (VTC)."""

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"policy must be one of {CHOICES}, got {self.policy!r}")
        if self.turns_per_frame < 0:
            raise ValueError(f"turns_per_frame must be at least 0, got {self.turns_per_frame}")
        for name in ("frame_steps", "reserve_after_frames", "starvation_frames"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("frame_s", "max_decode_pause_s", "program_timeout_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"{name} must be a number of seconds above 0")
        if not 0 < self.length_quantile < 1:
            raise ValueError("length_quantile must be between 0 and 1")
        if not 0 <= self.displace_margin < math.inf:
            raise ValueError("displace_margin must be a number, 0 or more")
        for name in ("max_moves_fraction", "max_pinned_fraction", "fairness"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be between 0 and 1")
