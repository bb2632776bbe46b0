"""The training data: a bounded sample of finished requests in which the recent count more.

A new row takes the place of a random one once the reservoir is full, so that the age of what
is kept falls off exponentially (Aggarwal, "On Biased Reservoir Sampling", VLDB 2006). Rows of
the shipped prior go first, ten for every real one.
"""

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]

CAPACITY = 6000
PRIOR_ROWS_PER_REAL = 10
MAX_ADDED = 1 << 53


class Reservoir:
    """Rows of numbers with their targets."""

    def __init__(
        self, num_columns: int, rng: np.random.Generator, capacity: int = CAPACITY
    ) -> None:
        self._rng = rng
        self._capacity = capacity
        self._rows = np.zeros((capacity, num_columns), dtype=np.float32)
        self._targets = np.zeros(capacity)
        self._is_prior = np.zeros(capacity, dtype=np.bool_)
        self._size = 0
        self.num_added = 0
        """Real rows ever added."""

    def __len__(self) -> int:
        return self._size

    @property
    def num_prior(self) -> int:
        """Rows of the prior that are left."""
        return int(self._is_prior[: self._size].sum())

    def fill(self, rows: Rows, targets: Floats) -> None:
        """Begin with rows of the prior: a random choice where they are too many."""
        count = min(len(rows), self._capacity)
        chosen = self._rng.permutation(len(rows))[:count]
        self._rows[:count] = rows[chosen]
        self._targets[:count] = targets[chosen]
        self._is_prior[:count] = True
        self._is_prior[count:] = False
        self._size = count

    def add(self, row: Rows, target: float) -> None:
        """A finished request."""
        self.num_added += 1
        for _ in range(PRIOR_ROWS_PER_REAL):
            self._drop_one_prior_row()
        if self._size < self._capacity:
            place = self._size
            self._size += 1
        else:
            place = int(self._rng.integers(self._size))
        self._rows[place] = row
        self._targets[place] = target
        self._is_prior[place] = False

    def _drop_one_prior_row(self) -> None:
        places = np.flatnonzero(self._is_prior[: self._size])
        if not places.size:
            return
        place = int(self._rng.choice(places))
        last = self._size - 1
        for array in (self._rows, self._targets, self._is_prior):
            array[place] = array[last]
        self._size = last

    def data(self) -> tuple[Rows, Floats]:
        """Copies of the rows (n, columns) and the targets (n,)."""
        return self._rows[: self._size].copy(), self._targets[: self._size].copy()

    def state(self) -> dict[str, npt.NDArray[np.generic]]:
        """All that is needed to go on from here."""
        return {
            "rows": self._rows[: self._size],
            "targets": self._targets[: self._size],
            "is_prior": self._is_prior[: self._size],
            "num_added": np.array([self.num_added], dtype=np.int64),
        }

    def restore(self, state: dict[str, npt.NDArray[np.generic]]) -> None:
        """Go on from ``state``. Raises ValueError where it is not one of this class."""
        rows, targets = state["rows"].astype(np.float32), state["targets"].astype(np.float64)
        is_prior, added = state["is_prior"].astype(np.bool_), state["num_added"]
        size = len(rows)
        if rows.shape != (size, self._rows.shape[1]) or size > self._capacity:
            raise ValueError(f"training rows have shape {rows.shape}")
        if targets.shape != (size,) or is_prior.shape != (size,) or added.shape != (1,):
            raise ValueError("training rows and targets do not belong together")
        if not (np.isfinite(rows).all() and np.isfinite(targets).all()):
            raise ValueError("training rows are not all numbers")
        self._rows[:size], self._targets[:size] = rows, targets
        self._is_prior[:size] = is_prior
        self._is_prior[size:] = False
        self._size = size
        self.num_added = min(max(int(added[0]), 0), MAX_ADDED)
