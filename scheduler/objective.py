"""What goodput is worth: the objective that the scheduler maximises, behind a small protocol.

A user's own is any object with these two methods, given by its dotted path
(``--goodput package.module:name``). Both get and return float arrays of shape (n,).
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from scheduler.table import Floats

MAX_VALUE = 1e15
MAX_WEIGHT = 1e6


class GoodputObjective(Protocol):
    """The value of serving requests as their senders asked."""

    def answer_value(self, input_tokens: Floats, output_tokens: Floats) -> Floats:
        """Of whole answers that are complete by their deadline; late ones are worth nothing."""
        ...

    def stream_value(self, tokens_in_time: Floats, all_tokens: Floats) -> Floats:
        """Of streams that have so many of their output tokens in time."""
        ...


class WeightedTokens:
    """Input and output tokens with a weight each (R(k) of the paper, section Symbols)."""

    def __init__(self, input_weight: float = 1.0, output_weight: float = 1.0) -> None:
        self._input_weight = input_weight
        self._output_weight = output_weight

    def answer_value(self, input_tokens: Floats, output_tokens: Floats) -> Floats:
        return self._input_weight * input_tokens + self._output_weight * output_tokens

    def stream_value(self, tokens_in_time: Floats, all_tokens: Floats) -> Floats:
        return self._output_weight * tokens_in_time


class WholeRequests:
    """One for a request that meets its SLO as a whole, nothing for any other."""

    def answer_value(self, input_tokens: Floats, output_tokens: Floats) -> Floats:
        return np.ones_like(input_tokens)

    def stream_value(self, tokens_in_time: Floats, all_tokens: Floats) -> Floats:
        is_whole: Floats = (tokens_in_time >= all_tokens).astype(np.float64)
        return is_whole


class Guarded:
    """A user's objective, kept from doing harm.

    What it returns is made finite and bounded; where it raises, or returns another shape,
    that frame counts tokens instead and ``num_errors`` rises.
    """

    def __init__(self, inner: GoodputObjective) -> None:
        self._inner = inner
        self._fallback = WeightedTokens()
        self.num_errors = 0

    def answer_value(self, input_tokens: Floats, output_tokens: Floats) -> Floats:
        return self._guard("answer_value", input_tokens, output_tokens)

    def stream_value(self, tokens_in_time: Floats, all_tokens: Floats) -> Floats:
        return self._guard("stream_value", tokens_in_time, all_tokens)

    def _guard(self, method: str, first: Floats, second: Floats) -> Floats:
        try:
            # Copies: a frame's own columns are nobody else's to write to.
            values = np.asarray(getattr(self._inner, method)(first.copy(), second.copy()))
            if values.shape != first.shape:
                raise ValueError(f"{method} gave shape {values.shape}, not {first.shape}")
            return bounded(values, first)
        except Exception:
            self.num_errors += 1
            fallback: Floats = getattr(self._fallback, method)(first, second)
            return fallback


def bounded(values: Floats, like: Floats) -> Floats:
    """``values`` as finite floats of 0 or more, in the shape of ``like``."""
    wide = np.broadcast_to(np.asarray(values, dtype=np.float64), like.shape)
    return np.clip(np.nan_to_num(wide, nan=0.0, posinf=MAX_VALUE, neginf=0.0), 0.0, MAX_VALUE)


OBJECTIVES: Mapping[str, Callable[[], GoodputObjective]] = {
    "token": WeightedTokens,
    "request": WholeRequests,
}
"""By the name that ``--goodput`` takes, beside ``INPUT:OUTPUT`` weights and dotted paths."""


def built_in_objective(name: str) -> GoodputObjective | None:
    """``token``, ``request`` or weights as ``1:2``; None for anything else.

    Raises:
        ValueError: weights that are not two numbers from 0 to a million, one of them above 0.
    """
    if name in OBJECTIVES:
        return OBJECTIVES[name]()
    parts = name.split(":")
    if len(parts) != 2 or not all(_is_number(part) for part in parts):
        return None
    weights = [float(part) for part in parts]
    is_sound = all(0 <= weight <= MAX_WEIGHT for weight in weights)
    if not (is_sound and max(weights) > 0):
        raise ValueError(
            f"weights must be 0 or more and not both 0, and at most a million, got {name!r}"
        )
    return WeightedTokens(*weights)


def objective_of(name: str, given: GoodputObjective | None) -> GoodputObjective:
    """A user's own objective, guarded; without one the built-in of that name.

    Raises:
        ValueError: ``name`` is not one of ours and no objective is given.
    """
    chosen = built_in_objective(name) if given is None else Guarded(given)
    if chosen is None:
        raise ValueError(f"goodput: {name!r} needs an objective object")
    return chosen


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


_: tuple[type[GoodputObjective], ...] = (WeightedTokens, WholeRequests, Guarded)
