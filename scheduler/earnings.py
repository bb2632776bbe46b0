"""What was earned lately, in the objective's unit: the reward by which the cutoff is tuned."""

import numpy as np

from scheduler.objective import GoodputObjective
from scheduler.table import Floats


class Earnings:
    """Goodput since the last ``take``, as far as the scheduler sees it.

    It sees a token when it is generated and not when it reaches its client, so this is for
    comparing one way of scheduling with another, not for reports.
    """

    def __init__(self, objective: GoodputObjective) -> None:
        self._objective = objective
        self._stream_tokens = 0.0
        self._inputs: list[float] = []
        self._outputs: list[float] = []

    def stream(self, next_due_s: float, now_s: float, num_tokens: int) -> None:
        """A stream got tokens, the first of them due at ``next_due_s``."""
        if now_s <= next_due_s:
            self._stream_tokens += num_tokens

    def streams(self, next_due_s: Floats, now_s: float) -> None:
        """Streams got one token each, due then."""
        self._stream_tokens += int((next_due_s >= now_s).sum())

    def answer(self, input_tokens: int, output_tokens: int) -> None:
        """An answer with a deadline was complete in time."""
        self._inputs.append(float(input_tokens))
        self._outputs.append(float(output_tokens))

    def take(self, average_tokens: float) -> float:
        """All of it; a stream's token is worth its share of a stream of average length."""
        length = np.array([max(average_tokens, 1.0)])
        unit = float(self._objective.stream_value(length, length)[0]) / float(length[0])
        total = unit * self._stream_tokens
        if self._inputs:
            inputs, outputs = np.array(self._inputs), np.array(self._outputs)
            total += float(self._objective.answer_value(inputs, outputs).sum())
            self._inputs, self._outputs = [], []
        self._stream_tokens = 0.0
        return total
