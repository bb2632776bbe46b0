"""Goodput as ``--goodput ttft:2000 tpot:100 e2el:20000`` has it, in milliseconds.

The flag and the fields of the result are spelled as in SGLang's and vLLM's serving benchmarks;
token-level goodput by the objectives that requests carry themselves (docs/metrics.md) is beside
it. Every number has its definition in ``DEFINITIONS``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence

import msgspec

METRICS = ("ttft", "tpot", "e2el")
"""What a target may be of: first token, time per output token after it, whole answer."""

DEFINITIONS: Mapping[str, str] = {
    "goodput_slos_ms": "the targets given with --goodput, in milliseconds",
    "request_goodput": "answers complete and within every target of --goodput, per second of the "
    "window of arrivals",
    "slo_attainment": "answers complete and within every target of --goodput, over all calls that "
    "were sent",
    "slo_attainment_by_metric": "answers complete and within this target of --goodput, over all "
    "calls that were sent; tpot is (e2el - ttft) / (output tokens - 1), 0 for a single token",
    "token_goodput": "tokens that met the objective which their own request carries "
    "(docs/metrics.md: of a stream its output tokens in time; of an answer or a program input and "
    "output tokens, if complete by the deadline), per second of the window of arrivals",
}
"""By the name of the field; printed under tables and written beside the figures."""


class Timing(msgspec.Struct, frozen=True):
    """One answer as its sender saw it, in seconds; ``ttft_s`` is None without any token."""

    ttft_s: float | None
    e2el_s: float
    output_tokens: int
    is_complete: bool = True

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first; 0 where there is none."""
        if self.output_tokens < 2 or self.ttft_s is None:
            return 0.0
        return (self.e2el_s - self.ttft_s) / (self.output_tokens - 1)


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """Field names are those of the ecosystem's result files; see ``DEFINITIONS``."""

    goodput_slos_ms: dict[str, float]
    request_goodput: float
    slo_attainment: float
    slo_attainment_by_metric: dict[str, float]
    token_goodput: float


def parse(pairs: Sequence[str]) -> dict[str, float]:
    """Targets in milliseconds by metric; ValueError that says what is wrong with which pair."""
    targets: dict[str, float] = {}
    for pair in pairs:
        name, value = parse_pair(pair)
        if name in targets:
            raise ValueError(f"{name} is given twice, with {pair!r}")
        targets[name] = value
    return targets


def parse_pair(pair: str) -> tuple[str, float]:
    """One KEY:VALUE; ValueError that says what is wrong with it."""
    name, colon, text = pair.partition(":")
    if not colon:
        raise ValueError(f"expected KEY:VALUE, such as ttft:2000, got {pair!r}")
    if name not in METRICS:
        raise ValueError(f"KEY must be one of {', '.join(METRICS)}, got {pair!r}")
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"VALUE must be a number of milliseconds, got {pair!r}") from None
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"VALUE must be a number of milliseconds above 0, got {pair!r}")
    return name, value


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Give a parser ``--goodput``; what it leaves in ``args.goodput`` is for ``parse``."""

    def checked(pair: str) -> str:
        try:
            parse_pair(pair)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return pair

    parser.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        type=checked,
        metavar="KEY:VALUE",
        help=f"targets of every call in milliseconds, KEY one of {', '.join(METRICS)}, such as "
        "ttft:2000 tpot:100 e2el:20000: adds request_goodput, slo_attainment and "
        "slo_attainment_by_metric by them",
    )


def evaluate(
    calls: Sequence[Timing],
    targets_ms: Mapping[str, float],
    duration_s: float,
    *,
    goodput_tokens: int,
) -> Goodput:
    """Judge calls by targets; without targets every complete answer is a good one.

    Args:
        duration_s: that rates are per second of.
        goodput_tokens: tokens that met their own requests' objectives.

    Raises ValueError unless the duration is above 0.
    """
    if duration_s <= 0:
        raise ValueError("goodput is per second of a duration above 0")
    num_met = dict.fromkeys(targets_ms, 0)
    num_good = 0
    for call in calls:
        if not call.is_complete or call.ttft_s is None:
            continue
        seen_ms = {
            "ttft": 1e3 * call.ttft_s,
            "tpot": 1e3 * call.tpot_s,
            "e2el": 1e3 * call.e2el_s,
        }
        met = [name for name, target in targets_ms.items() if seen_ms[name] <= target]
        for name in met:
            num_met[name] += 1
        num_good += len(met) == len(targets_ms)
    num_calls = max(len(calls), 1)
    return Goodput(
        goodput_slos_ms=dict(targets_ms),
        request_goodput=num_good / duration_s,
        slo_attainment=num_good / num_calls,
        slo_attainment_by_metric={name: num / num_calls for name, num in num_met.items()},
        token_goodput=goodput_tokens / duration_s,
    )
