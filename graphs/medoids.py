"""Which of many patterns to keep: distances between them, and k-medoids.

k-medoids by swaps as in FastPAM (Schubert and Rousseeuw, 2021, Fast and eager k-medoids
clustering, https://doi.org/10.1016/j.is.2021.101804). The packaged implementations are under
the GPL, which this project is not.
"""

import numpy as np
import numpy.typing as npt

from graphs.matcher import PENALTIES, ROLE_PENALTY, TOOLS_PENALTY
from graphs.patterns import COMPARED, UNKNOWN, Coded, Indices, PatternPack

Distances = npt.NDArray[np.float32]

MAX_PASSES = 20
MIN_GAIN = 1e-6
_FAR = np.float32(2.0)
"""Farther than anything."""


def distances_to(pack: PatternPack, program: Coded) -> Distances:
    """From every pattern to one program: 0 for the same, 1 where nothing is alike; shape (n,).

    One minus the mean similarity of the stages at the same place; a stage that one of the two
    does not have, or of another model, counts as not alike. Programs of two applications that
    have names are never alike.
    """
    starts = pack.offsets[:-1].astype(np.int64)
    lengths: Indices = np.diff(pack.offsets.astype(np.int64))
    length = len(program.identity)
    alike = np.zeros(len(pack), dtype=np.float32)
    there = np.arange(len(pack))
    for rank in range(length):
        there = there[lengths[there] > rank]
        if not len(there):
            break
        alike[there] += _alike(pack, starts[there] + rank, program, rank)
    distances: Distances = (1.0 - alike / np.maximum(lengths, length)).astype(np.float32)
    own, other = program.application, pack.application
    distances[(other != own) & (other != UNKNOWN) & (own != UNKNOWN)] = 1.0
    np.clip(distances, 0.0, 1.0, out=distances)
    return distances


def _alike(pack: PatternPack, places: Indices, program: Coded, rank: int) -> Distances:
    """Kernels of the stages at ``places`` with one of the program, averaged: 0 to 1."""
    penalty = np.zeros(len(places), dtype=np.float32)
    for attribute in COMPARED:
        code = np.int16(program.codes[attribute, rank])
        gaps = np.abs(pack.codes[attribute, places].astype(np.int16) - code)
        penalty += PENALTIES[attribute][gaps]
    penalty += np.float32(ROLE_PENALTY) * (pack.role[places] != program.role[rank])
    penalty += np.float32(TOOLS_PENALTY) * (pack.tools[places] != program.tools[rank])
    alike: Distances = np.exp(-penalty / len(COMPARED))
    alike[pack.identity[places] != program.identity[rank]] = 0.0
    return alike


def distance_matrix(pack: PatternPack) -> Distances:
    """Between all patterns, shape (n, n)."""
    if not len(pack):
        return np.zeros((0, 0), dtype=np.float32)
    return np.stack([distances_to(pack, pack.at(index)) for index in range(len(pack))])


def k_medoids(
    distances: Distances, weight: npt.NDArray[np.float32], k: int, seed: int
) -> tuple[Indices, Indices]:
    """``k`` of n items such that the weighted distances of all to the nearest are small.

    Args:
        distances: (n, n), symmetric.
        weight: (n,) above 0.
        k: at least 1.

    Returns:
        The medoids, ascending, shape (k,), and each item's medoid as an index into them, (n,).
    """
    num = len(weight)
    if k >= num:
        every = np.arange(num, dtype=np.int64)
        return every, every
    start = np.random.default_rng(seed).choice(num, size=max(k, 1), replace=False)
    search = _Search(distances, weight, start.astype(np.int64))
    unchanged = 0
    for step in range(MAX_PASSES * num):
        if unchanged == num:
            break
        unchanged = 0 if search.try_swap(step % num) else unchanged + 1
    medoids = np.sort(search.medoids)
    nearest: Indices = np.argmin(distances[:, medoids], axis=1).astype(np.int64)
    return medoids, nearest


class _Search:
    """Medoids, and to each item its nearest one and how far the second nearest is."""

    def __init__(
        self, distances: Distances, weight: npt.NDArray[np.float32], medoids: Indices
    ) -> None:
        self._distances = distances
        self._weight = weight
        self.medoids = medoids
        num = len(weight)
        self._is_medoid = np.zeros(num, dtype=bool)
        self._is_medoid[medoids] = True
        self._nearest: Indices = np.zeros(num, dtype=np.int64)
        """Index into ``medoids``."""
        self._second: Indices = np.zeros(num, dtype=np.int64)
        self._near = np.zeros(num, dtype=np.float32)
        self._far = np.zeros(num, dtype=np.float32)
        """Distance of the second nearest; infinitely far where there is one medoid."""
        self._look_up(np.arange(num))

    def try_swap(self, candidate: int) -> bool:
        """Make ``candidate`` a medoid in the place of whichever pays most, if any does."""
        if self._is_medoid[candidate]:
            return False
        to = self._distances[candidate]
        near, far, weight = self._near, self._far, self._weight
        loses = np.minimum(far, to) - near
        # Whom the candidate suits better leaves its medoid whichever one goes.
        change = np.where(to < near, 0.0, loses) * weight
        by_medoid = np.bincount(self._nearest, weights=change, minlength=len(self.medoids))
        leaves = int(np.argmin(by_medoid))
        gain = float((np.maximum(near - to, 0.0) * weight).sum()) - float(by_medoid[leaves])
        if gain <= MIN_GAIN:
            return False
        self._swap(leaves, candidate)
        return True

    def _swap(self, leaves: int, candidate: int) -> None:
        self._is_medoid[self.medoids[leaves]] = False
        self._is_medoid[candidate] = True
        self.medoids[leaves] = candidate
        to = self._distances[candidate]
        touched = (self._nearest == leaves) | (self._second == leaves) | (to < self._far)
        self._look_up(np.flatnonzero(touched))

    def _look_up(self, items: Indices) -> None:
        """Find the two nearest medoids of ``items``."""
        to = self._distances[np.ix_(items, self.medoids)]
        order = np.argpartition(to, min(1, to.shape[1] - 1), axis=1)
        rows = np.arange(len(items))
        self._nearest[items] = order[:, 0]
        self._near[items] = to[rows, order[:, 0]]
        if to.shape[1] == 1:
            self._second[items], self._far[items] = 0, _FAR
            return
        self._second[items] = order[:, 1]
        self._far[items] = to[rows, order[:, 1]]
