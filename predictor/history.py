"""How long answers of a model, a tenant and a program's node have been: a shrinking hierarchy.

Each level keeps a decayed mean of log lengths. An estimate is drawn towards the level above
it by the number of answers behind it (empirical Bayes): who has none gets what is known of
the tenant, of the model, of all.
"""

import math
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

MAX_GROUPS = 20_000
"""Groups that are remembered; the one used longest ago goes first."""
HISTORY_FEATURES: tuple[str, ...] = (
    "tenant_shift",
    "log_tenant_count",
    "node_shift",
    "log_node_count",
    "spread",
)
_MEMORY = (400.0, 200.0, 60.0)
"""Answers over which the mean of a model, a tenant and a node is taken."""
_STRENGTH = (20.0, 8.0, 4.0)
"""How many answers the level above is worth."""
PRIOR_SPREAD = 1.0
PRIOR_MEAN = 5.0
"""Log length to expect where nothing is known: about 150 tokens."""

MIN_RESIDUAL_TOKENS = 16.0
MAX_RESIDUAL = 4.0

Key = tuple[int, int, int]


class Group:
    """Decayed count, mean and variance of log lengths; tokens seen, and answers seen to end."""

    __slots__ = ("count", "ends", "mean", "tokens", "variance")

    def __init__(
        self,
        count: float = 0.0,
        mean: float = 0.0,
        variance: float = 0.0,
        tokens: float = 0.0,
        ends: float = 0.0,
    ) -> None:
        self.count = count
        self.mean = mean
        self.variance = variance
        self.tokens = tokens
        self.ends = ends

    def saw(self, tokens: float, memory: float, *, is_cut: bool) -> None:
        fade = 1.0 - 1.0 / memory
        self.tokens = fade * self.tokens + tokens
        self.ends = fade * self.ends + (not is_cut)

    def learn(self, value: float, memory: float) -> None:
        self.count = min(self.count + 1.0, memory)
        step = 1.0 / self.count
        delta = value - self.mean
        self.mean += step * delta
        self.variance += step * (delta * (value - self.mean) - self.variance)


_NOBODY = Group()


class Outlook:
    """What the history says of one request: the expected log length and its features."""

    __slots__ = ("expected", "features")

    def __init__(self, expected: float, features: tuple[float, ...]) -> None:
        self.expected = expected
        self.features = features


class History:
    """All groups, by (model, tenant, node) with 0 for "any"."""

    def __init__(self, prior_mean: float = PRIOR_MEAN) -> None:
        self.prior_mean = prior_mean
        self._groups: OrderedDict[Key, Group] = OrderedDict()

    def outlook(self, model: int, tenant: int, node: int) -> Outlook:
        """Before the answer is known."""
        count_of, means, spread = [], [], PRIOR_SPREAD
        parent = self.prior_mean
        for key, strength in zip(_keys(model, tenant, node), _STRENGTH, strict=True):
            group = self._groups.get(key) if key is not None else None
            count = 0.0
            if group is not None and key is not None:
                self._groups.move_to_end(key)
                count = group.count
                weight = count / (count + strength)
                parent = weight * group.mean + (1.0 - weight) * parent
                spread = weight * group.variance**0.5 + (1.0 - weight) * spread
            count_of.append(count)
            means.append(parent)
        features = (
            means[1] - means[0],
            math.log1p(count_of[1]),
            means[2] - means[1],
            math.log1p(count_of[2]),
            spread,
        )
        return Outlook(means[2], features)

    def saw(self, model: int, output_tokens: float, *, is_cut: bool) -> None:
        """So many tokens of an answer were seen, to its end or not."""
        self._group((model, 0, 0)).saw(output_tokens, _MEMORY[0], is_cut=is_cut)

    def residual_tokens(self, model: int, generated_tokens: float) -> float:
        """Mean tokens to come of an answer that was cut after ``generated_tokens``.

        The maximum-likelihood mean of an exponential with censored cases: tokens seen over
        answers seen to end. At most ``MAX_RESIDUAL`` times what is there.
        """
        group = self._groups.get((model, 0, 0), _NOBODY)
        mean = (group.tokens + generated_tokens) / (group.ends + 1.0)
        return min(max(mean, MIN_RESIDUAL_TOKENS), MAX_RESIDUAL * max(generated_tokens, 16.0))

    def learn(self, model: int, tenant: int, node: int, log_length: float) -> None:
        """An answer has ended."""
        for key, memory in zip(_keys(model, tenant, node), _MEMORY, strict=True):
            if key is None:
                continue
            self._group(key).learn(log_length, memory)

    def _group(self, key: Key) -> Group:
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = Group()
            while len(self._groups) > MAX_GROUPS:
                self._groups.popitem(last=False)
        self._groups.move_to_end(key)
        return group

    def state(self) -> dict[str, npt.NDArray[np.generic]]:
        """All that is needed to go on from here."""
        return {
            "keys": np.array(list(self._groups), dtype=np.int64).reshape(-1, 3),
            "groups": np.array(
                [
                    (group.count, group.mean, group.variance, group.tokens, group.ends)
                    for group in self._groups.values()
                ],
                dtype=np.float64,
            ).reshape(-1, 5),
        }

    def restore(self, state: dict[str, npt.NDArray[np.generic]]) -> None:
        """Go on from ``state``. Raises ValueError where it is not one of this class."""
        keys, groups = state["keys"].astype(np.int64), state["groups"].astype(np.float64)
        if keys.shape != (len(keys), 3) or groups.shape != (len(keys), 5):
            raise ValueError("the history has another shape")
        if not np.isfinite(groups).all() or (groups[:, [0, 2, 3, 4]] < 0).any():
            raise ValueError("the history has numbers that cannot be")
        rows = zip(keys.tolist(), groups.tolist(), strict=True)
        self._groups = OrderedDict(((k[0], k[1], k[2]), Group(*values)) for k, values in rows)


def _keys(model: int, tenant: int, node: int) -> tuple[Key, Key | None, Key | None]:
    """The groups of a request, from the widest; None where it has no such level."""
    return (
        (model, 0, 0),
        (model, tenant, 0) if tenant else None,
        (model, tenant, node) if node else None,
    )
