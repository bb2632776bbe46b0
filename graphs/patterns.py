"""Many pattern graphs as a few compact arrays: twelve bytes a stage.

Counts, tokens and times are kept as logarithms in one byte each, a tenth of an octave apart:
within 3.6 % of the truth and one unit, far nearer than two programs ever are to each other.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from graphs.shape import MAX_STAGES, ProgramShape, StageShape, cut_to

Codes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

ATTRIBUTES = (
    "num_calls",
    "input_tokens per call",
    "output_tokens",
    "longest_tokens",
    "tool_s",
    "new input tokens per call",
)
CALLS, INPUT, OUTPUT, LONGEST, TOOL, NEW = range(len(ATTRIBUTES))
COMPARED = (CALLS, INPUT, OUTPUT, LONGEST, TOOL)
"""What two stages are compared by: what was in the prefix cache is chance."""
PER_OCTAVE = 10.0
_TOOL_UNIT_S = 0.01
_UNITS: Floats = np.array([1.0, 1.0, 1.0, 1.0, _TOOL_UNIT_S, 1.0])
MAX_CODE = 255
VALUES: Floats = 2.0 ** (np.arange(MAX_CODE + 1) / PER_OCTAVE) - 1.0
"""What a code stands for, in units of ``_UNITS``."""
UNKNOWN = 0
"""Index of a name that is in no pattern or was not told."""
_MAX_NAMES = 65_535


def codes_of(stage: StageShape) -> Codes:
    """The attributes of one stage as codes, shape (6,)."""
    return codes_of_all((stage,))[:, 0]


def codes_of_all(stages: Sequence[StageShape]) -> Codes:
    """The attributes of stages as codes, shape (6, stages)."""
    values = np.array(
        [
            (
                stage.num_calls,
                stage.input_tokens / max(stage.num_calls, 1),
                stage.output_tokens,
                stage.longest_tokens,
                stage.tool_s,
                stage.filled_tokens / max(stage.num_calls, 1),
            )
            for stage in stages
        ]
    )
    octaves = np.log2(1.0 + np.maximum(values.T, 0.0) / _UNITS[:, None])
    codes: Codes = np.minimum(np.rint(octaves * PER_OCTAVE), MAX_CODE).astype(np.uint8)
    return codes


def values_of(codes: Codes) -> Floats:
    """The attributes that codes of shape (6, n) stand for; input is that of all calls."""
    values: Floats = VALUES[codes] * _UNITS[:, None]
    values[INPUT] *= values[CALLS]
    values[NEW] *= values[CALLS]
    return values


class Coded(NamedTuple):
    """One program in the terms of a pack: indices of names, (stages,), and codes, (6, stages)."""

    identity: npt.NDArray[np.uint16]
    role: npt.NDArray[np.uint16]
    tools: npt.NDArray[np.uint16]
    codes: Codes
    application: int
    tenant: int


class Names:
    """Hashes as small indices; ``UNKNOWN`` for 0 and, when there are very many, for new ones."""

    def __init__(self) -> None:
        self._index: dict[int, int] = {0: UNKNOWN}

    def enter(self, name: int) -> int:
        """The index of a name, which is given one if it has none."""
        index = self._index.get(name)
        if index is None:
            if len(self._index) > _MAX_NAMES:
                return UNKNOWN
            index = self._index[name] = len(self._index)
        return index

    def get(self, name: int) -> int:
        """The index of a name, or ``UNKNOWN``."""
        return self._index.get(name, UNKNOWN)


class PatternPack:
    """Patterns one behind the other. They can be added to, never changed or removed."""

    def __init__(self, shapes: Sequence[ProgramShape] = (), weights: Sequence[float] = ()) -> None:
        self._num = 0
        self._num_stages = 0
        self._offsets = np.zeros(64, dtype=np.uint32)
        self._application = np.zeros(64, dtype=np.uint16)
        self._tenant = np.zeros(64, dtype=np.uint16)
        self._weight = np.zeros(64, dtype=np.float32)
        self._identity = np.zeros(512, dtype=np.uint16)
        self._role = np.zeros(512, dtype=np.uint16)
        self._tools = np.zeros(512, dtype=np.uint16)
        self._codes: Codes = np.zeros((len(ATTRIBUTES), 512), dtype=np.uint8)
        self.identities, self.roles, self.toolsets = Names(), Names(), Names()
        self.applications, self.tenants = Names(), Names()
        for shape, weight in zip(shapes, weights, strict=True):
            self.add(shape, weight)

    def __len__(self) -> int:
        return self._num

    @property
    def offsets(self) -> npt.NDArray[np.uint32]:
        """Where each pattern's stages begin in the flat arrays, and their end; (n + 1,)."""
        return self._offsets[: self._num + 1]

    @property
    def application(self) -> npt.NDArray[np.uint16]:
        """Index into ``applications``, shape (n,)."""
        return self._application[: self._num]

    @property
    def tenant(self) -> npt.NDArray[np.uint16]:
        """Index into ``tenants``, shape (n,)."""
        return self._tenant[: self._num]

    @property
    def weight(self) -> npt.NDArray[np.float32]:
        """How often each was seen, decayed; shape (n,). It may be written to."""
        return self._weight[: self._num]

    @property
    def identity(self) -> npt.NDArray[np.uint16]:
        """Index into ``identities``, shape (stages,)."""
        return self._identity[: self._num_stages]

    @property
    def role(self) -> npt.NDArray[np.uint16]:
        """Index into ``roles``, shape (stages,)."""
        return self._role[: self._num_stages]

    @property
    def tools(self) -> npt.NDArray[np.uint16]:
        """Index into ``toolsets``, shape (stages,)."""
        return self._tools[: self._num_stages]

    @property
    def codes(self) -> Codes:
        """``ATTRIBUTES`` as codes, shape (6, stages)."""
        return self._codes[:, : self._num_stages]

    @property
    def num_bytes(self) -> int:
        """Bytes of all patterns; the few names that they index are not counted."""
        parts = (
            self.offsets,
            self.application,
            self.tenant,
            self.weight,
            self.identity,
            self.role,
            self.tools,
            self.codes,
        )
        return sum(part.nbytes for part in parts)

    def encode(self, shape: ProgramShape) -> Coded:
        """A program in the terms of this pack. Raises ValueError where it has no stage."""
        if not shape.stages:
            raise ValueError("a pattern has at least one stage")
        stages = cut_to(shape.stages, MAX_STAGES)
        return Coded(
            np.array([self.identities.enter(stage.identity) for stage in stages], dtype=np.uint16),
            np.array([self.roles.enter(stage.role) for stage in stages], dtype=np.uint16),
            np.array([self.toolsets.enter(stage.tools) for stage in stages], dtype=np.uint16),
            codes_of_all(stages),
            self.applications.enter(shape.application),
            self.tenants.enter(shape.tenant),
        )

    def at(self, index: int) -> Coded:
        """The pattern at an index, as views."""
        stages = slice(int(self._offsets[index]), int(self._offsets[index + 1]))
        return Coded(
            self._identity[stages],
            self._role[stages],
            self._tools[stages],
            self._codes[:, stages],
            int(self._application[index]),
            int(self._tenant[index]),
        )

    def add(self, shape: ProgramShape, weight: float) -> int:
        """Add a pattern; its index. Raises ValueError where it has no stage."""
        coded = self.encode(shape)
        begin, end = self._num_stages, self._num_stages + len(coded.identity)
        self._make_room(self._num + 2, end)
        self._identity[begin:end] = coded.identity
        self._role[begin:end] = coded.role
        self._tools[begin:end] = coded.tools
        self._codes[:, begin:end] = coded.codes
        index = self._num
        self._application[index] = coded.application
        self._tenant[index] = coded.tenant
        self._weight[index] = weight
        self._offsets[index + 1] = end
        self._num, self._num_stages = index + 1, end
        return index

    def _make_room(self, num: int, num_stages: int) -> None:
        for name in ("_offsets", "_application", "_tenant", "_weight"):
            setattr(self, name, _grown(getattr(self, name), num))
        for name in ("_identity", "_role", "_tools", "_codes"):
            setattr(self, name, _grown(getattr(self, name), num_stages))


def _grown(array: npt.NDArray[np.generic], size: int) -> npt.NDArray[np.generic]:
    """``array`` with at least ``size`` columns."""
    if array.shape[-1] >= size:
        return array
    wider = np.zeros((*array.shape[:-1], max(size, 2 * array.shape[-1])), dtype=array.dtype)
    wider[..., : array.shape[-1]] = array
    return wider
