"""Trace files of real services: arrival times and lengths. Each is read from a given path."""

import csv
import gzip
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

BLOCK_TOKENS = 512
"""Of a block of Mooncake's ``hash_ids``."""


class TraceRequest(NamedTuple):
    """One request.

    ``prefix`` is the place (from 1) of an earlier request in the trace whose text the prompt
    begins with, for ``prefix_tokens``; 0: of none.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    prefix: int = 0
    prefix_tokens: int = 0


class Trace(NamedTuple):
    """The requests of a file, in order of arrival."""

    requests: tuple[TraceRequest, ...]

    @property
    def arrival_s(self) -> Floats:
        return np.array([request.arrival_s for request in self.requests])


def read(path: Path) -> Trace:
    """An Azure CSV (``.csv``), or Mooncake's JSON lines (``.jsonl``, also ``.jsonl.gz``).

    Raises OSError, or ValueError naming file and line.
    """
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        requests = _mooncake(path)
    elif path.name.endswith(".csv"):
        requests = _azure(path)
    else:
        raise ValueError(f"{path}: a trace is a .csv, .jsonl or .jsonl.gz file")
    if len(requests) < 2:
        raise ValueError(f"{path}: a trace has two requests or more")
    if requests[-1].arrival_s <= requests[0].arrival_s:
        raise ValueError(f"{path}: all requests arrive at once")
    return Trace(tuple(requests))


def _lines(path: Path) -> Iterator[str]:
    try:
        if path.name.endswith(".gz"):
            with gzip.open(path, "rt", encoding="utf-8") as packed:
                yield from packed
        else:
            with path.open(encoding="utf-8", newline="") as file:
                yield from file
    except (EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ValueError(f"{path}: {error!r}") from error


def _checked(request: TraceRequest, before: TraceRequest | None) -> TraceRequest:
    if not (math.isfinite(request.arrival_s) and request.arrival_s >= 0):
        raise ValueError("an arrival is a number of seconds, 0 or more")
    if before is not None and request.arrival_s < before.arrival_s:
        raise ValueError("arrives before the request above it")
    if min(request.input_tokens, request.output_tokens) < 0:
        raise ValueError("a length is 0 or more")
    return request


def _azure(path: Path) -> list[TraceRequest]:
    """Columns ``arrival_s``, ``input_tokens``, ``output_tokens``; lengths of 0 count as 1."""
    requests: list[TraceRequest] = []
    for number, row in enumerate(csv.DictReader(_lines(path)), start=2):
        try:
            request = TraceRequest(
                float(row["arrival_s"]), int(row["input_tokens"]), int(row["output_tokens"])
            )
            requests.append(_checked(request, requests[-1] if requests else None))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: {error!r}") from error
    return requests


def _mooncake(path: Path) -> list[TraceRequest]:
    """Arrivals come in steps of about 3 s: within a step they are spread evenly."""
    requests: list[TraceRequest] = []
    owners: dict[int, int] = {}
    for number, line in enumerate(_lines(path), start=1):
        try:
            row = json.loads(line)
            blocks = [int(block) for block in row["hash_ids"]]
            tokens = int(row["input_length"])
            prefix, prefix_tokens = _longest(blocks, owners, tokens)
            request = TraceRequest(
                float(row["timestamp"]) / 1000,
                tokens,
                int(row["output_length"]),
                prefix,
                prefix_tokens,
            )
            requests.append(_checked(request, requests[-1] if requests else None))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: {error!r}") from error
        # The first to have a text keeps its name: whoever repeats it begins with the same.
        for block in blocks:
            owners.setdefault(block, number)
    return _spread(requests)


def _longest(blocks: list[int], owners: Mapping[int, int], tokens: int) -> tuple[int, int]:
    """The request whose text a prompt begins with, and for how many tokens."""
    for place in range(len(blocks), 0, -1):
        owner = owners.get(blocks[place - 1])
        if owner is not None:
            return owner, min(place * BLOCK_TOKENS, tokens)
    return 0, 0


def _spread(requests: list[TraceRequest]) -> list[TraceRequest]:
    times = np.array([request.arrival_s for request in requests])
    steps, first, counts = np.unique(times, return_index=True, return_counts=True)
    lengths = np.diff(steps)
    if not len(lengths):
        return requests
    lengths = np.append(lengths, np.median(lengths))
    rank = np.arange(len(times)) - np.repeat(first, counts)
    spread = times + np.repeat(lengths, counts) * rank / np.repeat(counts, counts)
    return [
        request._replace(arrival_s=at_s)
        for request, at_s in zip(requests, spread.tolist(), strict=True)
    ]


# ServeGen.


class Window(NamedTuple):
    """How a client sends during a part of the day: gaps of ``kind`` with a shape."""

    start_s: float
    rate_per_s: float
    kind: str
    shape: float

    def gaps(self, rng: np.random.Generator, num: int) -> Floats:
        """Gaps of mean 1: the rate is the window's, whatever mean its fit has."""
        if self.kind == "Gamma":
            return rng.gamma(self.shape, 1 / self.shape, num)
        return rng.weibull(self.shape, num) / math.gamma(1 + 1 / self.shape)


class Client(NamedTuple):
    """A client's day: its windows in order, and quantiles of its lengths."""

    window_s: float
    windows: tuple[Window, ...]
    input_tokens: tuple[float, ...]
    output_tokens: tuple[float, ...]

    @property
    def weight(self) -> float:
        """Its requests of the whole day."""
        return sum(window.rate_per_s for window in self.windows) * self.window_s

    def between(self, start_s: float, end_s: float) -> Iterator[tuple[float, float, Window]]:
        """(begin, end, window) of the parts of a stretch of time; the day comes again."""
        for day in range(int(start_s // DAY_S), math.ceil(end_s / DAY_S)):
            for window in self.windows:
                begin_s = window.start_s + day * DAY_S
                begin_s, close_s = max(begin_s, start_s), min(begin_s + self.window_s, end_s)
                if begin_s < close_s:
                    yield begin_s, close_s, window


DAY_S = 86_400.0


def read_servegen(path: Path, pool: str) -> list[Client]:
    """The clients of a pool of a ServeGen file (``.json``, ``.json.gz``).

    Raises OSError, or ValueError naming the file and the client.
    """
    try:
        pools = json.loads("".join(_lines(path)))
        found = pools[pool]
        window_s = float(found["window_s"])
        rows = list(found["clients"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}, pool {pool}: {error!r}") from error
    clients = []
    for number, row in enumerate(rows):
        try:
            clients.append(_client(row, window_s))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, pool {pool}, client {number}: {error!r}") from error
    return clients


def _client(row: Mapping[str, Any], window_s: float) -> Client:
    windows = tuple(
        Window(float(start_s), float(rate), str(kind), float(shape))
        for start_s, rate, _, kind, shape, _ in row["windows"]
    )
    for window in windows:
        if window.kind not in ("Gamma", "Weibull") or min(window.rate_per_s, window.shape) <= 0:
            raise ValueError(
                f"a window is Gamma or Weibull, of a rate and a shape above 0: {window}"
            )
    return Client(
        window_s,
        windows,
        _quantiles(part["input_tokens"] for part in row["lengths"].values()),
        _quantiles(part["output_tokens"] for part in row["lengths"].values()),
    )


def _quantiles(parts: Iterable[Any]) -> tuple[float, ...]:
    """Of all parts of the day together."""
    values = tuple(sorted(float(value) for part in parts for value in part))
    if not values:
        raise ValueError("a client has lengths")
    return values
