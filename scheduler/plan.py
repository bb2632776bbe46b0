"""What a planning step is given and what it returns: frozen data, nothing else."""

import enum

import msgspec


class EngineCapacity(msgspec.Struct, frozen=True):
    """What the engine has left at this moment."""

    max_batch: int
    """Most requests that may be running (decoding or in prefill) together."""
    free_kv_tokens: int
    """KV tokens that are free or can be evicted from the prefix cache at once."""
    total_kv_tokens: int
    free_slots: int
    """Request slots nobody holds; parked and running requests hold one each."""


class PlanKind(enum.StrEnum):
    """How much a plan may change."""

    FRAME = "frame"
    """A frame boundary: every move is allowed."""
    BACKFILL = "backfill"
    """Inside a frame: free slots are filled, nobody running is moved."""


class Move(enum.StrEnum):
    """What happens to a request."""

    RUN = "run"
    RESUME = "resume"
    ADMIT = "admit"
    PARK = "park"
    PREEMPT = "preempt"
    WAIT = "wait"
    DROP = "drop"
    CANCEL = "cancel"


class Decision(msgspec.Struct, frozen=True):
    """Why a request was treated as it was."""

    request_id: str
    move: Move
    reason: str
    score: float
    """The policy's score in this frame; higher runs first."""


class Ending(msgspec.Struct, frozen=True):
    """A request to end, and the machine-readable reason its sender gets."""

    request_id: str
    reason: str


class FramePlan(msgspec.Struct, frozen=True):
    """One plan. The moves of preempt and park come first: they make the room for the rest."""

    frame: int
    kind: PlanKind
    run: tuple[str, ...]
    """Running requests that stay."""
    park: tuple[str, ...]
    preempt: tuple[str, ...]
    resume: tuple[str, ...]
    admit: tuple[str, ...]
    """Waiting and preempted requests to prefill, in this order, as room comes."""
    drop: tuple[Ending, ...]
    cancel: tuple[Ending, ...]
    tokens: dict[str, int]
    """Tokens each request of this frame needs in it to stay in time."""
    decisions: tuple[Decision, ...]
