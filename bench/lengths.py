"""Answer lengths to learn from: what ``bench collect`` writes and what the traces hold.

A sample is numbers only: the cues of a prompt, what the engine knew, and how long the answer
became. Files are JSON lines, gzipped where the name ends in ``.gz``.
"""

import csv
import gzip
import io
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from core.names import name_hash
from predictor.distribution import Points
from predictor.features import NO_CUES, Cues, EngineFacts, Row, cues_of, feature_row
from predictor.model import Request
from predictor.progress import NUM_PROGRESS, Classes, progress_row
from predictor.tilt import TILT_MARKS

SHIPPED = Path(__file__).with_name("data") / "demo_lengths.jsonl.gz"
"""The demo model's answers to public prompts, as numbers."""

TRACES: tuple[tuple[str, str], ...] = (
    ("azure_llm_2023_conv.csv", "azure-conv"),
    ("azure_llm_2023_code.csv", "azure-code"),
    ("mooncake_conversation_sessions.csv", "mooncake"),
    ("lengths_sharegpt.csv", "sharegpt"),
    ("lengths_arxiv_summarization.csv", "arxiv"),
    ("lengths_bwb.csv", "bwb"),
)
"""Files of a trace folder and the tenant that each stands for."""


class Sample(msgspec.Struct, frozen=True):
    """One answered request.

    Attributes:
        source: the model that answered.
        group: category of the prompt or name of the trace; stands for the tenant.
        is_cut: the answer would have gone on.
        progress: what it looked like at the first of ``TILT_MARKS``.
    """

    source: str
    group: str
    facts: EngineFacts
    output_tokens: int
    is_cut: bool = False
    cues: Cues = NO_CUES
    progress: tuple[tuple[float, ...], ...] = ()

    def features(self) -> Row:
        """The feature row, shape (NUM_FEATURES,)."""
        return feature_row(self.cues, self.facts)

    def progress_rows(self) -> Points:
        """Shape (n, NUM_PROGRESS)."""
        return np.array(self.progress, dtype=np.float32).reshape(-1, NUM_PROGRESS)

    def request(self, *, tenant: str = "") -> Request:
        """As the predictor gets it."""
        return Request(
            self.features(),
            name_hash(self.source),
            name_hash(self.source, tenant),
            0,
            self.cues.words,
        )


def write(path: Path, samples: Iterable[Sample]) -> None:
    """Write samples as JSON lines."""
    lines = b"".join(msgspec.json.encode(_rounded(sample)) + b"\n" for sample in samples)
    if path.suffix == ".gz":
        # Without the time of writing: the same samples make the same file.
        buffer = io.BytesIO()
        with gzip.GzipFile(filename="", fileobj=buffer, mode="wb", mtime=0) as file:
            file.write(lines)
        lines = buffer.getvalue()
    path.write_bytes(lines)


def read(path: Path) -> list[Sample]:
    """Read what ``write`` wrote. Raises OSError, or ValueError naming the line."""
    data = path.read_bytes()
    data = gzip.decompress(data) if path.suffix == ".gz" else data
    samples = []
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            samples.append(msgspec.json.decode(line, type=Sample))
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    return samples


def _rounded(sample: Sample) -> Sample:
    values = tuple(round(value, 4) for value in sample.cues.values)
    progress = tuple(tuple(round(value, 3) for value in row) for row in sample.progress)
    return msgspec.structs.replace(sample, cues=Cues(values, sample.cues.words), progress=progress)


def chat_body(prompt: str, max_tokens: int, temperature: float) -> dict[str, Any]:
    """The chat request that asks ``prompt``."""
    return {
        "model": "default",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": temperature,
    }


def chat_sample(
    source: str,
    group: str,
    body: dict[str, Any],
    input_tokens: int,
    output_tokens: int,
    reason: str,
) -> Sample:
    """The sample of an answered chat request."""
    facts = EngineFacts(
        input_tokens=input_tokens,
        max_output_tokens=body["max_tokens"],
        temperature=body["temperature"],
    )
    return Sample(source, group, facts, output_tokens, reason != "stop", cues_of(body))


def progress_of(output_ids: Sequence[int], classes: Classes) -> tuple[tuple[float, ...], ...]:
    """What an answer looked like at the marks that it passed."""
    marks = [mark for mark in TILT_MARKS.tolist() if mark < len(output_ids)]
    return tuple(tuple(progress_row(output_ids[:mark], classes).tolist()) for mark in marks)


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """JSON lines with at least a ``prompt`` each. Raises OSError, or ValueError."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        row = json.loads(line)
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
            raise ValueError(f"{path}, line {number}: a prompt is missing")
        rows.append(row)
    return rows


def references(path: Path) -> Iterator[Sample]:
    """Lengths that other models gave to the prompts, where the file has ``ref_output_tokens``."""
    for row in read_prompts(path):
        known = row.get("ref_output_tokens")
        for source, tokens in (known or {}).items() if isinstance(known, dict) else ():
            body = chat_body(row["prompt"], 4096, 0.7)
            yield chat_sample(
                str(source),
                str(row.get("category", "")),
                body,
                int(row.get("prompt_tokens", len(row["prompt"]) // 4)),
                int(tokens),
                "stop",
            )


def traces(folder: Path, per_trace: int, seed: int) -> list[Sample]:
    """Requests of the traces in ``folder`` (``TRACES``) in order of arrival, without texts.

    Those without times are spread over the hour of those that have them. Raises OSError.
    """
    rng = random.Random(seed)
    timed: list[tuple[float, Sample]] = []
    for name, group in TRACES:
        with (folder / name).open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        for row in rng.sample(rows, min(per_trace, len(rows))):
            facts = EngineFacts(int(row["input_tokens"]), 8192)
            at_s = float(row["arrival_s"]) if "arrival_s" in row else rng.uniform(0.0, 3500.0)
            tokens = max(int(row["output_tokens"]), 1)
            timed.append((at_s, Sample("trace", group, facts, tokens)))
    timed.sort(key=lambda item: item[0])
    return [sample for _, sample in timed]


def lengths_of(samples: Sequence[Sample]) -> list[int]:
    """Output tokens, in order."""
    return [sample.output_tokens for sample in samples]
