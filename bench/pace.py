"""How fast the machine is while a benchmark runs, as the server's own step timer sees it.

A shared machine is not equally fast in all turns of a run. What is watched is the step-time model
that the scheduler fits online, at one composition: nothing of what came of the load.
"""

import contextlib
import statistics
import threading
from collections.abc import Iterator, Sequence

import httpx
import msgspec

EVERY_S = 2.0
REFERENCE = (8, 1200)
"""Decodes, and context tokens of all of them together, of the step that is looked at."""


class StepTimer(msgspec.Struct, frozen=True):
    """Of ``/slo/state`` what matters here."""

    step_time_coefficients_s: tuple[float, ...] = ()
    """Seconds: constant, per decode, per context, prefill and padding token."""


class Paces:
    """Seconds of the reference step, one for each time that the server was asked."""

    def __init__(self) -> None:
        self.seen_s: list[float] = []

    @property
    def median_s(self) -> float:
        """0 where the server never said."""
        return statistics.median(self.seen_s) if self.seen_s else 0.0


def reference_s(coefficients_s: Sequence[float]) -> float:
    """Seconds of the reference step by coefficients as ``StepTimer`` has them; 0 without any."""
    if len(coefficients_s) < 3:
        return 0.0
    decodes, context_tokens = REFERENCE
    constant_s, decode_s, context_s = coefficients_s[:3]
    return constant_s + decodes * decode_s + context_tokens * context_s


def ratio(now_s: float, then_s: float) -> float:
    """How many times as long a step takes now; 1 where one of both is not known."""
    return now_s / then_s if now_s > 0 and then_s > 0 else 1.0


@contextlib.contextmanager
def watched(url: str, every_s: float = EVERY_S) -> Iterator[Paces]:
    """Ask the server from time to time, in a thread of its own, until the block ends."""
    paces, is_over = Paces(), threading.Event()

    def watch() -> None:
        with httpx.Client(base_url=url, timeout=10) as client:
            while not is_over.wait(every_s):
                with contextlib.suppress(httpx.HTTPError, msgspec.DecodeError):
                    paces.seen_s.extend(_ask(client))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield paces
    finally:
        is_over.set()
        thread.join(timeout=15)


def _ask(client: httpx.Client) -> list[float]:
    response = client.get("/slo/state")
    response.raise_for_status()
    timer = msgspec.json.decode(response.content, type=StepTimer)
    found = reference_s(timer.step_time_coefficients_s)
    return [found] if found > 0 else []
