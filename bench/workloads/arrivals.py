"""When programs arrive: processes of a wanted mean rate over a window.

A process is a small frozen struct; ``draw`` makes the arrival times of any of them.
"""

import math
from pathlib import Path
from typing import assert_never

import msgspec
import numpy as np

from bench.workloads import traces
from bench.workloads.traces import Floats


class Poisson(msgspec.Struct, frozen=True, tag="poisson"):
    """Independent of each other."""


class Gamma(msgspec.Struct, frozen=True, kw_only=True, tag="gamma"):
    """Gaps drawn from a Gamma distribution.

    Attributes:
        cv: deviation of a gap over its mean; 1 is Poisson, above it arrivals come in bursts.
    """

    cv: float = 3.0

    def __post_init__(self) -> None:
        if not 0 < self.cv < math.inf:
            raise ValueError("cv is a number above 0")


class AzureLike(msgspec.Struct, frozen=True, tag="azure_like"):
    """As the Azure conversation trace, without its file: Poisson of a rate that wanders.

    The rate's logarithm is a sum of Gaussian processes with exponential memory, in seconds of
    real time whatever the mean rate is; see ``WANDERING``.
    """


class TraceArrivals(msgspec.Struct, frozen=True, kw_only=True, tag="trace"):
    """Arrivals of a trace file: Azure CSV, or Mooncake JSON lines (``.jsonl``, ``.jsonl.gz``).

    As many consecutive arrivals as the window is to have (``rate * window``), from a random one
    on, the trace beginning again where it ends; their gaps are scaled by one factor so that
    they span the window. The mean rate is exact; bursts keep their size in requests, and last
    longer or shorter as the factor is.
    """

    path: str


class ServeGenArrivals(msgspec.Struct, frozen=True, kw_only=True, tag="servegen"):
    """Clients of a ServeGen file, each with the rate and the gaps of its windows.

    All rates are scaled by one factor so that the mean over the window is the wanted one; time
    is not, and the day begins again where it ends. Clients' gaps keep their shape.

    Attributes:
        pool: name of one of the file's pools.
        start_s: from when of the day on.
    """

    path: str
    pool: str = "m-large"
    start_s: float = 0.0


SteadySpec = Poisson | Gamma | AzureLike | TraceArrivals | ServeGenArrivals


class Surge(msgspec.Struct, frozen=True, kw_only=True, tag="surge"):
    """Another process, for a part of the window ``factor`` times as fast.

    The wanted rate is that outside of the surge: the mean is ``1 + (factor - 1) * length``
    times as high.

    Attributes:
        base: the other process.
        start: of the surge, as a part of the window.
        length: of the surge, as a part of the window.
    """

    base: SteadySpec = Poisson()
    factor: float = 5.0
    start: float = 0.4
    length: float = 0.1

    def __post_init__(self) -> None:
        if not (0 < self.factor < math.inf and self.start >= 0 and self.length > 0):
            raise ValueError("a surge has a factor and a length above 0, and starts at 0 or later")
        if self.start + self.length > 1:
            raise ValueError("a surge ends within the window: start + length is at most 1")


ArrivalSpec = SteadySpec | Surge


def draw(spec: ArrivalSpec, rate_per_s: float, window_s: float, rng: np.random.Generator) -> Floats:
    """Arrival times in order, all in [0, ``window_s``).

    Raises OSError or ValueError (naming file and line) for a trace that cannot be read.
    """
    if isinstance(spec, Surge):
        return _surge(spec, rate_per_s, window_s, rng)
    times = _steady(spec, rate_per_s, window_s, rng)
    return np.sort(times[(times >= 0) & (times < window_s)])


def _steady(
    spec: SteadySpec, rate_per_s: float, window_s: float, rng: np.random.Generator
) -> Floats:
    match spec:
        case Poisson():
            return rng.uniform(0.0, window_s, rng.poisson(rate_per_s * window_s))
        case Gamma(cv=cv):
            return _renewal(1 / cv**2, rate_per_s, window_s, rng)
        case AzureLike():
            return _wandering(rate_per_s, window_s, rng)
        case TraceArrivals(path=path):
            return _from_trace(traces.read(Path(path)).arrival_s, rate_per_s, window_s, rng)
        case ServeGenArrivals(path=path, pool=pool, start_s=start_s):
            clients = traces.read_servegen(Path(path), pool)
            return _from_clients(clients, start_s, rate_per_s, window_s, rng)
        case _:
            assert_never(spec)


def _surge(spec: Surge, rate_per_s: float, window_s: float, rng: np.random.Generator) -> Floats:
    """The base process on a clock that runs faster during the surge, read on the real one."""
    start_s, length_s = spec.start * window_s, spec.length * window_s
    end_s = start_s + length_s
    fast_end_s = start_s + spec.factor * length_s
    times = draw(spec.base, rate_per_s, window_s - length_s + spec.factor * length_s, rng)
    real = np.interp(
        times,
        [0.0, start_s, fast_end_s, fast_end_s + window_s - end_s],
        [0.0, start_s, end_s, window_s],
    )
    return real[real < window_s]


WARM_UP_GAPS = 100.0


def _renewal(shape: float, rate_per_s: float, window_s: float, rng: np.random.Generator) -> Floats:
    """Gamma gaps; begun some mean gaps early, since a window need not begin at an arrival."""
    at_s, end = -WARM_UP_GAPS / rate_per_s, []
    while at_s < window_s:
        num = max(round((window_s - at_s) * rate_per_s), 64)
        times = at_s + np.cumsum(rng.gamma(shape, 1 / (shape * rate_per_s), num))
        end.append(times)
        at_s = float(times[-1])
    return np.concatenate(end)


WANDERING: tuple[tuple[float, float], ...] = ((0.056, 400.0), (0.012, 3.0), (0.05, 0.2))
"""(squared CV of the rate, memory in seconds) of each process.

Fitted to the counts of ``azure_llm_2023_conv.csv``: their variance over their mean is 1.38 at
1 s, 3.9 at 10 s and 16.1 at 60 s at its 5.53 requests a second, and the CV of its gaps 1.09;
the mean of 16 windows of these is 1.41, 3.8, 15.1 and 1.08.
"""
WANDERING_STEP_S = 0.1


def _wandering(rate_per_s: float, window_s: float, rng: np.random.Generator) -> Floats:
    num = max(math.ceil(window_s / WANDERING_STEP_S), 1)
    log_rate = np.zeros(num)
    for squared_cv, memory_s in WANDERING:
        log_rate += _remembering(math.log1p(squared_cv), memory_s, rng.standard_normal(num))
    rate = np.exp(log_rate)
    # The mean over the window is the wanted one: what is compared at a rate has that rate.
    counts = rng.poisson(rate / rate.sum() * rate_per_s * window_s)
    starts = np.repeat(np.arange(num) * WANDERING_STEP_S, counts)
    return starts + rng.uniform(0.0, min(WANDERING_STEP_S, window_s), len(starts))


def _remembering(variance: float, memory_s: float, noise: Floats) -> Floats:
    """A stationary Gaussian process that forgets in ``memory_s``, step by step."""
    keep = math.exp(-WANDERING_STEP_S / memory_s)
    scale = math.sqrt(variance * (1 - keep**2))
    value = math.sqrt(variance) * float(noise[0])
    path = [value]
    for step in noise[1:].tolist():
        value = keep * value + scale * step
        path.append(value)
    return np.array(path)


def _from_trace(
    arrival_s: Floats, rate_per_s: float, window_s: float, rng: np.random.Generator
) -> Floats:
    num = round(rate_per_s * window_s)
    if not num:
        return np.zeros(0)
    gaps = np.diff(arrival_s)
    # From the last arrival to the first of the next round: a mean gap.
    gaps = np.append(gaps, gaps.mean())
    taken = gaps[(rng.integers(len(gaps)) + np.arange(num)) % len(gaps)]
    span_s = float(taken.sum())
    if span_s <= 0:
        # A burst of the trace is all that there is: it stays one.
        return np.full(num, rng.random() * window_s)
    times: Floats = (np.cumsum(taken) - taken[0] * rng.random()) / span_s * window_s
    times[times >= window_s] = np.nextafter(window_s, 0.0)
    return times


def _from_clients(
    clients: list[traces.Client],
    start_s: float,
    rate_per_s: float,
    window_s: float,
    rng: np.random.Generator,
) -> Floats:
    found = []
    pieces = [
        (begin_s, end_s, window)
        for client in clients
        for begin_s, end_s, window in client.between(start_s, start_s + window_s)
    ]
    expected = sum((end_s - begin_s) * window.rate_per_s for begin_s, end_s, window in pieces)
    if expected <= 0:
        raise ValueError("no client of the pool sends anything in this part of the day")
    factor = rate_per_s * window_s / expected
    for begin_s, end_s, window in pieces:
        rate = window.rate_per_s * factor
        gaps = window.gaps(rng, math.ceil((end_s - begin_s) * rate * 1.5) + 64) / rate
        # Where a window begins within a gap is chance.
        gaps[0] *= rng.random()
        times = begin_s - start_s + np.cumsum(gaps)
        found.append(times[times < end_s - start_s])
    return np.concatenate(found)
