"""Matching a program that unfolds against pattern graphs, one stage after the other.

Patterns whose prefix diverges (another model at a stage, or an end before it) are pruned; the
rest are scored with Gaussian kernels over the attributes of each stage (paper, section
Estimating Dependency with Pattern-Graph Matching). Other tools are a penalty and no end:
whether an agent uses one at this very step says little (docs/decisions/0011). A new stage adds
one term to the score of each pattern that is left: nothing is computed anew.
"""

import math

import msgspec
import numpy as np
import numpy.typing as npt

from graphs.patterns import (
    CALLS,
    COMPARED,
    INPUT,
    LONGEST,
    MAX_CODE,
    NEW,
    OUTPUT,
    PER_OCTAVE,
    TOOL,
    UNKNOWN,
    Floats,
    Indices,
    PatternPack,
    codes_of,
    values_of,
)
from graphs.shape import Pace, StageShape

Scores = npt.NDArray[np.float32]

MIN_WEIGHT = 1e-3
SIGMA_OCTAVES: Floats = np.array([1.0, 1.0, 2.0, 2.0, 3.0])
"""Width of each attribute's kernel: two that differ so much are alike by exp(-1/2)."""
MAX_PENALTY = 4.0
"""Most that one attribute may take from the logarithm of a similarity."""
ROLE_PENALTY = 3.0
"""Another role is another part of the program, but names are not always kept."""
TOOLS_PENALTY = 1.0
"""Other tools before a stage, or none."""
MODEL_PENALTY = 4.0
"""Another model, where no pattern has this one: rather what nearly fits than nothing."""
TOP = 64
"""Patterns that the outlook is a mixture of."""
FEW_PATTERNS_DOUBT = 0.5
"""Standard deviation that is taken of programs like a single one seen, in shares of its own."""
FORGETTING = 0.5
"""Weight of a stage against the one after it: what came last says most of what comes next."""
MIN_OF_APPLICATION = 8
"""Programs seen of its own application from which on a program is compared with those alone."""

_CODE_STEPS = np.arange(MAX_CODE + 1)[None, :] / PER_OCTAVE
PENALTIES: npt.NDArray[np.float32] = np.minimum(
    0.5 * (_CODE_STEPS / SIGMA_OCTAVES[:, None]) ** 2, MAX_PENALTY
).astype(np.float32)
"""Logarithm of the kernels, negated, by attribute and difference of codes."""
_Which = tuple[int, ...]
_WHOLE: _Which = COMPARED
_AT_OPENING: _Which = (INPUT, TOOL)
"""What is known of a stage when its first call has arrived."""


class Remaining(msgspec.Struct, frozen=True):
    """What is expected of a program after what is known of it.

    Attributes:
        stage_s: execution time of the stage that is open, without the tools before it.
        later_s: of all stages after it.
        stages: how many stages come after it.
        calls, input_tokens, output_tokens: of those stages together.
        new_tokens: of that input what will not be in the prefix cache.
        longest_tokens: the longest call of each of those stages, added up.
        spread_tokens: standard deviation of that among the patterns that still fit.
        tool_s: tool time before those stages, added up.
        missing_calls: calls of the open stage that have not arrived yet.
        missing_input_tokens, missing_output_tokens: of those calls together.
        next_tool_s: tool time before the next stage that has not begun, if there is one.
        next_input_tokens: of that stage's calls together.
        num_patterns: patterns that still fit.
    """

    stage_s: float
    later_s: float
    stages: float
    calls: float
    input_tokens: float
    output_tokens: float
    new_tokens: float
    longest_tokens: float
    spread_tokens: float
    tool_s: float
    missing_calls: float
    missing_input_tokens: float
    missing_output_tokens: float
    next_tool_s: float
    next_input_tokens: float
    num_patterns: int


class Match:
    """One running program against one pack.

    Args:
        application: hash of its name; 0 where it has none.
        tenant: hash of whose it is; 0 for nobody's.
    """

    __slots__ = ("_alive", "_prior", "_scores", "num_stages", "pack")

    def __init__(self, pack: PatternPack, application: int = 0, tenant: int = 0) -> None:
        self.pack = pack
        self.num_stages = 0
        """Stages that are over and counted in the scores."""
        self._alive: Indices = _comparable(pack, application, tenant)
        prior = np.log(np.maximum(pack.weight[self._alive], MIN_WEIGHT))
        self._prior: Scores = prior.astype(np.float32)
        """How often each was seen; other than what stages say, it does not age."""
        self._scores: Scores = np.zeros(len(self._alive), dtype=np.float32)

    def __len__(self) -> int:
        """Patterns that still fit."""
        return len(self._alive)

    def close_stage(self, stage: StageShape) -> None:
        """The next stage is over: all of its calls have ended."""
        fits, places = self._fitting(stage)
        self._scores = self._scores[fits] * FORGETTING + self._similarity(stage, places, _WHOLE)
        self._alive, self._prior = self._alive[fits], self._prior[fits]
        self.num_stages += 1

    def best(self) -> int:
        """The likeliest pattern's index; -1 where none fits."""
        return int(self._alive[np.argmax(self._prior + self._scores)]) if len(self) else -1

    def outlook(self, pace: Pace, opened: StageShape | None = None) -> Remaining | None:
        """What is still to come, as the mean of the likeliest patterns; None where none fits.

        Args:
            opened: the next stage as far as it is known, or None between two stages. Its input
                is that of its first call: the calls of a stage do not arrive all at once.
        """
        alive, scores = self._alive, self._prior + self._scores
        if opened is not None:
            fits, places = self._fitting(opened)
            alive = alive[fits]
            scores = scores[fits] + self._similarity(opened, places, _AT_OPENING)
        if not len(alive):
            return None
        num_patterns = len(alive)
        if num_patterns > TOP:
            top = np.argpartition(scores, -TOP)[-TOP:]
            alive, scores = alive[top], scores[top]
        share = np.exp(scores.astype(np.float64) - float(scores.max()))
        share /= share.sum()
        mixture = _Mixture(self.pack, alive, share, self.num_stages, pace)
        return mixture.remaining(None if opened is None else opened.num_calls, num_patterns)

    def _fitting(self, stage: StageShape) -> tuple[Indices, Indices]:
        """Who has such a stage next: indices into ``_alive``, and into the pack's flat arrays."""
        pack, alive = self.pack, self._alive
        places = pack.offsets[alive].astype(np.int64) + self.num_stages
        fits = np.flatnonzero(places < pack.offsets[alive + 1])
        places = places[fits]
        same = pack.identity[places] == pack.identities.get(stage.identity)
        if not same.any():
            return fits, places
        return fits[same], places[same]

    def _similarity(self, stage: StageShape, places: Indices, attributes: "_Which") -> Scores:
        """Logarithm of how alike a stage is to those at ``places``, at most 0; shape as theirs."""
        pack = self.pack
        codes = codes_of(stage).astype(np.int16)
        total = np.zeros(len(places), dtype=np.float32)
        for attribute in attributes:
            gap = np.abs(pack.codes[attribute, places].astype(np.int16) - codes[attribute])
            total -= PENALTIES[attribute][gap]
        index = pack.identities.get(stage.identity)
        total -= np.float32(MODEL_PENALTY) * (pack.identity[places] != index)
        tools = pack.toolsets.get(stage.tools)
        total -= np.float32(TOOLS_PENALTY) * (pack.tools[places] != tools)
        if stage.role:
            role = pack.roles.get(stage.role)
            total -= np.float32(ROLE_PENALTY) * (pack.role[places] != role)
        return total


def _comparable(pack: PatternPack, application: int, tenant: int) -> Indices:
    """The patterns of its own application, else of its tenant, else all: the first that suffice."""
    kinds = (
        (pack.application, pack.applications.get(application)),
        (pack.tenant, pack.tenants.get(tenant)),
    )
    for column, index in kinds:
        own = np.flatnonzero(column == index) if index != UNKNOWN else np.empty(0, dtype=np.int64)
        if float(pack.weight[own].sum()) >= MIN_OF_APPLICATION:
            return own
    return np.arange(len(pack), dtype=np.int64)


class _Mixture:
    """The stages that some patterns have after the first ``num_over``, each with its weight."""

    def __init__(
        self, pack: PatternPack, alive: Indices, share: Floats, num_over: int, pace: Pace
    ) -> None:
        first = pack.offsets[alive].astype(np.int64) + num_over
        counts = np.maximum(pack.offsets[alive + 1].astype(np.int64) - first, 0)
        owner = np.repeat(np.arange(len(alive)), counts)
        rank = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        self._rank = rank
        """0 for the first stage that is not over."""
        self._weight = share[owner]
        self._owner, self._share = owner, share
        self._num_seen = max(float(pack.weight[alive].sum()), 1.0)
        self._values = values_of(pack.codes[:, first[owner] + rank])
        self._time_s = (
            self._values[TOOL]
            + self._values[NEW] * pace.prefill_s
            + self._values[LONGEST] * pace.step_s
            + self._values[OUTPUT] * pace.token_s
        )

    def _spread(self, tokens: Floats) -> float:
        """Standard deviation of the patterns' sums; of the mean of few, its own doubt beside."""
        sums = np.bincount(self._owner, weights=tokens, minlength=len(self._share))
        mean = float((self._share * sums).sum())
        variance = float((self._share * (sums - mean) ** 2).sum())
        return math.sqrt(variance + (FEW_PATTERNS_DOUBT * mean) ** 2 / self._num_seen)

    def remaining(self, calls_arrived: int | None, num_patterns: int) -> Remaining:
        """``calls_arrived`` of the stage that is open; None where none is."""
        is_open = calls_arrived is not None
        now = self._weight * (self._rank == 0) if is_open else np.zeros_like(self._weight)
        later = self._weight - now
        values = self._values
        missing = np.maximum(values[CALLS] - (calls_arrived or 0), 0.0)
        per_call = 1.0 / np.maximum(values[CALLS], 1.0)
        following = self._weight * (self._rank == int(is_open))
        following /= max(float(following.sum()), 1e-12)
        return Remaining(
            stage_s=float((now * (self._time_s - values[TOOL])).sum()),
            later_s=float((later * self._time_s).sum()),
            stages=float(later.sum()),
            calls=float((later * values[CALLS]).sum()),
            input_tokens=float((later * values[INPUT]).sum()),
            output_tokens=float((later * values[OUTPUT]).sum()),
            new_tokens=float((later * values[NEW]).sum()),
            longest_tokens=float((later * values[LONGEST]).sum()),
            spread_tokens=self._spread(np.where(later > 0, values[LONGEST], 0.0)),
            tool_s=float((later * values[TOOL]).sum()),
            missing_calls=float((now * missing).sum()),
            missing_input_tokens=float((now * missing * per_call * values[INPUT]).sum()),
            missing_output_tokens=float((now * missing * per_call * values[OUTPUT]).sum()),
            next_tool_s=float((following * values[TOOL]).sum()),
            next_input_tokens=float((following * values[INPUT]).sum()),
            num_patterns=num_patterns,
        )
