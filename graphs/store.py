"""The patterns that are kept: what finished programs looked like, how often, and for how long.

Every finished program enters as a pattern of its own, or strengthens one that it is the same
as. Above the capacity they are clustered (k-medoids) and each cluster's medoid stays. How often
a pattern was seen or used is forgotten at 0.9 an hour (paper, section Estimating Dependency
with Pattern-Graph Matching); the least used are evicted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from graphs.medoids import distance_matrix, distances_to, k_medoids
from graphs.patterns import Indices, PatternPack
from graphs.shape import MAX_STAGES, ProgramShape, cut_to

Weights = npt.NDArray[np.float32]

CAPACITY = 500
"""With more, matching gets slower and hardly better (docs/experiments.md)."""
DECAY_PER_HOUR = 0.9
DECAY_EVERY_S = 60.0
SAME_DISTANCE = 0.002
"""Programs nearer than this are one pattern."""
KEPT_FRACTION = 0.75
"""Of the capacity, after clustering: room for what comes."""
MIN_WEIGHT = 0.01
"""A pattern decayed below this is evicted: seen once, and not for two days."""
MIN_KEPT = 32
"""So many are never evicted for their age alone: after a quiet week something is known still."""
MAX_WEIGHT = 1e6


@dataclass(frozen=True)
class Clustered:
    """The medoids of a clustering, as patterns with weights."""

    pack: PatternPack
    """The one that was clustered."""
    num_patterns: int
    """How many of it."""
    medoids: Indices
    cluster: Indices
    """Of each pattern, as an index into ``medoids``."""
    weights: Weights
    """Of the medoids: those of their clusters together."""
    weights_then: Weights
    """Of all patterns when it began."""


class Clustering:
    """The work of one clustering; it may run beside everything else."""

    def __init__(self, pack: PatternPack, shapes: Sequence[ProgramShape], keep: int) -> None:
        self._pack = pack
        self._shapes = list(shapes)
        self._weights = pack.weight.copy()
        self._keep = keep

    def run(self) -> Clustered:
        """Find the medoids; each has the weights of its whole cluster."""
        weights = np.maximum(self._weights, MIN_WEIGHT)
        medoids, nearest = self._by_tenant(weights)
        together = np.bincount(nearest, weights=self._weights, minlength=len(medoids))
        return Clustered(
            self._pack,
            len(self._shapes),
            medoids,
            nearest,
            together.astype(np.float32),
            self._weights,
        )

    def _by_tenant(self, weights: Weights) -> tuple[Indices, Indices]:
        """Medoids, ascending, and each pattern's as an index into them: each tenant's apart."""
        tenants = np.array([shape.tenant for shape in self._shapes], dtype=np.int64)
        nearest = np.zeros(len(tenants), dtype=np.int64)
        medoids: list[Indices] = []
        for tenant, quota in quotas(tenants, self._keep).items():
            if not quota:
                continue
            own = np.flatnonzero(tenants == tenant)
            # A copy of its own: the store's pack grows meanwhile.
            shapes = [self._shapes[index] for index in own.tolist()]
            pack = PatternPack(shapes, weights[own].tolist())
            found, cluster = k_medoids(distance_matrix(pack), weights[own], quota, seed=0)
            nearest[own] = cluster + sum(len(part) for part in medoids)
            medoids.append(own[found])
        joined = np.concatenate(medoids)
        order = np.argsort(joined)
        return joined[order], np.argsort(order)[nearest]


def quotas(tenants: Indices, num: int) -> dict[int, int]:
    """How many patterns of each tenant stay if ``num`` may: nobody's crowd out another's.

    Who has few keeps all; the others share what is left alike.
    """
    names, counts = np.unique(tenants, return_counts=True)
    found: dict[int, int] = {}
    left = num
    for rank, place in enumerate(np.argsort(counts, kind="stable").tolist()):
        share = left // (len(names) - rank)
        found[int(names[place])] = min(int(counts[place]), share)
        left -= found[int(names[place])]
    return found


class PatternStore:
    """Patterns with their weights. ``pack`` is what programs are matched against.

    Args:
        capacity: most patterns; above it ``is_clustering_due``.
        now_s: any clock; only differences count.
    """

    def __init__(self, capacity: int = CAPACITY, now_s: float = 0.0) -> None:
        self.capacity = max(capacity, 2)
        self.pack = PatternPack()
        """Another object whenever patterns have been taken out."""
        self.shapes: list[ProgramShape] = []
        self._decayed_s = now_s
        self.num_added = 0
        """Finished programs so far."""
        self.num_merged = 0
        """Of those, that were the same as a pattern."""
        self.num_evicted = 0
        self.num_clusterings = 0

    def __len__(self) -> int:
        return len(self.shapes)

    def add(self, shape: ProgramShape, now_s: float) -> int:
        """A program has finished; the pattern that it has become or has strengthened.

        Raises:
            ValueError: it has no stage.
        """
        self.decay(now_s)
        shape = msgspec.structs.replace(shape, stages=cut_to(shape.stages, MAX_STAGES))
        same = self._same_as(shape)
        self.num_added += 1
        if same >= 0:
            self.num_merged += 1
            self._strengthen(same)
            return same
        if len(self) >= 2 * self.capacity:
            # The clustering has not kept up: the least used go.
            self._keep_best(self.capacity)
        self.shapes.append(shape)
        return self.pack.add(shape, 1.0)

    def restore(self, shape: ProgramShape, weight: float) -> None:
        """A pattern as it was kept. Raises ValueError where it has no stage."""
        self.pack.add(shape, min(max(weight, 0.0), MAX_WEIGHT))
        self.shapes.append(shape)

    def used(self, index: int, now_s: float) -> None:
        """A finished program had been matched with a pattern of ``pack``."""
        self.decay(now_s)
        if 0 <= index < len(self):
            self._strengthen(index)

    def decay(self, now_s: float) -> None:
        """Forget a little, and evict what is hardly used. A clock that jumps back is no time."""
        elapsed_s = now_s - self._decayed_s
        if 0 <= elapsed_s < DECAY_EVERY_S:
            return
        self._decayed_s = now_s
        if elapsed_s < 0:
            return
        self.pack.weight[:] *= np.float32(DECAY_PER_HOUR ** (elapsed_s / 3600.0))
        num_used = int(np.count_nonzero(self.pack.weight >= MIN_WEIGHT))
        self._keep_best(max(num_used, MIN_KEPT))

    # Clustering.

    @property
    def is_clustering_due(self) -> bool:
        """Whether there are more patterns than the capacity."""
        return len(self) > self.capacity

    def clustering(self) -> Clustering:
        """The work whose result ``adopt`` takes."""
        return Clustering(self.pack, self.shapes, max(int(self.capacity * KEPT_FRACTION), 1))

    def adopt(self, clustered: Clustered) -> bool:
        """Keep the medoids and what has come in since; False where all that has changed."""
        if clustered.pack is not self.pack:
            return False
        since = np.arange(clustered.num_patterns, len(self))
        kept = np.concatenate([clustered.medoids, since]).astype(np.int64)
        # What has been seen again since then counts for the cluster; so does what was forgotten.
        change = self.pack.weight[: clustered.num_patterns] - clustered.weights_then
        num = len(clustered.medoids)
        weights = clustered.weights + np.bincount(clustered.cluster, weights=change, minlength=num)
        weights = np.concatenate([np.maximum(weights, 0.0), self.pack.weight[since]])
        self._keep(kept, weights.astype(np.float32))
        self.num_clusterings += 1
        return True

    def _same_as(self, shape: ProgramShape) -> int:
        """The pattern that a program is the same as; -1 for none."""
        coded = self.pack.encode(shape)
        if not len(self):
            return -1
        distances = distances_to(self.pack, coded)
        # A name is worth keeping even where the shape is known.
        is_own = self.pack.application == coded.application
        distances[~is_own] = 1.0
        nearest = int(np.argmin(distances))
        return nearest if distances[nearest] < SAME_DISTANCE else -1

    def _strengthen(self, index: int) -> None:
        self.pack.weight[index] = min(float(self.pack.weight[index]) + 1.0, MAX_WEIGHT)

    def _keep_best(self, num: int) -> None:
        """Keep the ``num`` most used, of each tenant its share."""
        if num >= len(self):
            return
        tenants = np.array([shape.tenant for shape in self.shapes], dtype=np.int64)
        best = []
        for tenant, quota in quotas(tenants, num).items():
            own = np.flatnonzero(tenants == tenant)
            best.append(own[np.argsort(-self.pack.weight[own], kind="stable")[:quota]])
        kept = np.sort(np.concatenate(best)).astype(np.int64)
        self.num_evicted += len(self) - len(kept)
        self._keep(kept, self.pack.weight[kept])

    def _keep(self, kept: Indices, weights: Weights) -> None:
        self.shapes = [self.shapes[index] for index in kept.tolist()]
        self.pack = PatternPack(self.shapes, weights.tolist())
