"""What a planning step is given and what it returns: frozen data, nothing else."""

import enum
from collections.abc import Iterator

import msgspec
import numpy as np


class EngineCapacity(msgspec.Struct, frozen=True):
    """What the engine has left at this moment."""

    max_batch: int
    """Most requests that may be running (decoding or in prefill) together."""
    free_kv_tokens: int
    """KV tokens that are free or can be evicted from the prefix cache at once."""
    total_kv_tokens: int
    free_slots: int
    """Request slots nobody holds; parked and running requests hold one each."""
    swap_token_s: float | None = None
    """Measured seconds to bring a token's KV back from host memory; None: it is recomputed."""


class PlanKind(enum.StrEnum):
    """How much a plan may change."""

    FRAME = "frame"
    """A frame boundary: every move is allowed."""
    EARLY = "early"
    """A first token cannot wait for the boundary: a few moves for it, and the frame goes on."""
    BACKFILL = "backfill"
    """Inside a frame: free slots are filled, nobody running is moved."""
    TURN = "turn"
    """Inside a frame: who has the tokens that it needs gives way to who has not."""


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


class Reason(enum.StrEnum):
    """Why."""

    BEST = "among the best of this frame"
    MUST_RUN = "pinned or urgent: not a matter of choice"
    STARVED = "passed over for as long as anybody may be"
    NOBODY_BETTER = "nothing takes its place"
    HAS_TURN = "the one before it has its tokens of this frame"
    IN_LINE = "its turn comes within this frame"
    OUTRANKED = "better requests fill the batch"
    RESTS = "ahead of its timeline, so waiting costs it nothing"
    NO_KV = "its KV does not fit"
    NOT_LOOKED_AT = "inside a frame only the best of it are looked at"
    GIVES_PLACE = "a better request takes its place"
    FEWER_EARN_MORE = "fewer at once are faster and earn more"
    HAS_ITS_TOKENS = "it has the tokens that it needs in this frame"
    GIVES_KV = "its KV makes room for a better request"
    WAITING_TIME = "not started within its waiting_time"
    DEADLINE_PASSED = "its deadline has passed"


_MOVES = tuple(Move)
_REASONS = tuple(Reason)
MOVE_CODE = {move: code for code, move in enumerate(_MOVES)}
REASON_CODE = {reason: code for code, reason in enumerate(_REASONS)}


class Decision(msgspec.Struct, frozen=True):
    """Why a request was treated as it was."""

    request_id: str
    move: Move
    reason: Reason
    score: float | None
    """The policy's score in this frame; higher runs first. None where it was not scored."""
    in_time_fraction: float | None = None
    """Expected share of it in time if it runs now, where the policy estimates one."""
    slack_s: float | None = None
    """Time to spare before it falls behind, where the policy estimates it."""


class Ending(msgspec.Struct, frozen=True):
    """A request to end, and the machine-readable reason its sender gets."""

    request_id: str
    reason: str


class Ledger(msgspec.Struct, frozen=True):
    """The decisions of a plan in a few bytes per request: aligned columns, packed."""

    ids: tuple[str, ...]
    moves: bytes
    """A code per id."""
    reasons: bytes
    scores: bytes
    """float64 per id."""
    in_time: bytes
    """float32 per id, or empty."""
    slack_s: bytes
    """float32 per id, or empty."""

    def __iter__(self) -> Iterator[Decision]:
        scores = np.frombuffer(self.scores)
        in_time = np.frombuffer(self.in_time, dtype=np.float32)
        slack_s = np.frombuffer(self.slack_s, dtype=np.float32)
        for place, request_id in enumerate(self.ids):
            yield Decision(
                request_id,
                _MOVES[self.moves[place]],
                _REASONS[self.reasons[place]],
                _number(scores, place),
                _number(in_time, place),
                _number(slack_s, place),
            )

    def __len__(self) -> int:
        return len(self.ids)


def turn_ledger(
    stay: list[str], park: tuple[str, ...], resume: list[str], admit: list[str]
) -> Ledger:
    """The ledger of a turn inside a frame: those that run and those that change places."""
    groups = (
        (stay, Move.RUN, Reason.NOBODY_BETTER),
        (park, Move.PARK, Reason.HAS_ITS_TOKENS),
        (resume, Move.RESUME, Reason.HAS_TURN),
        (admit, Move.ADMIT, Reason.HAS_TURN),
    )
    ids = tuple(request_id for names, _, _ in groups for request_id in names)
    return Ledger(
        ids=ids,
        moves=b"".join(bytes([MOVE_CODE[move]]) * len(names) for names, move, _ in groups),
        reasons=b"".join(bytes([REASON_CODE[why]]) * len(names) for names, _, why in groups),
        scores=np.full(len(ids), np.nan).tobytes(),
        in_time=b"",
        slack_s=b"",
    )


def _number(values: "np.ndarray[tuple[int], np.dtype[np.floating]]", place: int) -> float | None:
    if not values.size or np.isnan(values[place]):
        return None
    return min(max(float(values[place]), -1e300), 1e300)


class FramePlan(msgspec.Struct, frozen=True):
    """One plan. The moves of preempt and park come first: they make the room for the rest."""

    frame: int
    kind: PlanKind
    num_run: int
    """How many may run together until the next plan: a decision, at most ``max_batch``."""
    frame_tokens: int
    """Tokens that one request can get in this frame."""
    run: tuple[str, ...]
    """Running requests that stay."""
    park: tuple[str, ...]
    preempt: tuple[str, ...]
    resume: tuple[str, ...]
    admit: tuple[str, ...]
    """Waiting and preempted requests to prefill, in this order, as room comes."""
    line: tuple[str, ...]
    """Who is next when one of those that run has its tokens of this frame; a backfill leaves
    the frame's line as it is."""
    drop: tuple[Ending, ...]
    cancel: tuple[Ending, ...]
    tokens: dict[str, int]
    """Tokens each request of this frame needs in it to stay in time, ``line`` included; their
    sum is at most ``num_run`` times ``frame_tokens``. Empty inside a frame (backfill, turn): the
    frame's count on."""
    ledger: Ledger

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Every request that was looked at and what became of it."""
        return tuple(self.ledger)

    def explain(self, request_id: str) -> Decision | None:
        """The decision on one request; None where this plan did not look at it."""
        return next((item for item in self.ledger if item.request_id == request_id), None)
