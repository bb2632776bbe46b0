"""Make the prior that the length predictor ships with, from numbers only.

Rows are answers of several models and of traces, each relative to the mean of its source, so
that what prompts do to lengths carries over to models that nobody has seen. The same files
and seed make the same prior.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench import lengths
from bench.lengths import Sample
from predictor import state
from predictor.features import NUM_FEATURES
from predictor.history import PRIOR_MEAN
from predictor.model import COLUMNS, NUM_COLUMNS
from predictor.words import WordScores


def main(argv: list[str]) -> int:
    """``python -m bench prior``."""
    parser = argparse.ArgumentParser(prog="python -m bench prior", description=__doc__)
    parser.add_argument("--lengths", type=Path, action="append", help="files of `bench collect`")
    parser.add_argument("--references", type=Path, help="prompts with ref_output_tokens")
    parser.add_argument("--traces", type=Path, help="folder of traces")
    parser.add_argument("--per-trace", type=int, default=250, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=state.PRIOR_PATH, help="(default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        samples = [s for path in args.lengths or [lengths.SHIPPED] for s in lengths.read(path)]
        if args.references:
            samples += lengths.references(args.references)
        if args.traces:
            samples += lengths.traces(args.traces, args.per_trace, args.seed)
    except (OSError, ValueError) as error:
        print(f"prior: {error}", file=sys.stderr)
        return 2
    prior = make(samples, args.seed)
    args.out.write_bytes(state.encode_prior(prior))
    size = args.out.stat().st_size
    print(f"{len(prior.targets)} rows of {len(prior.sources)} sources, {size} bytes: {args.out}")
    return 0


def make(samples: Sequence[Sample], seed: int) -> state.Prior:
    """The prior of these samples: how prompts make answers longer or shorter than their source's.

    Means are taken per model, or per trace where there is no model; what the history will say
    of tenants and nodes is left open. A cut answer is completed as the Lindy rule has it.
    """
    rng = np.random.default_rng(seed)
    words = WordScores()
    logs = [_log_length(sample, rng) for sample in samples]
    found: dict[str, list[float]] = {}
    for sample, value in zip(samples, logs, strict=True):
        found.setdefault(_origin(sample), []).append(value)
    sources = sorted(found)
    number_of = {name: number for number, name in enumerate(sources)}
    mean_of = {name: float(np.mean(values)) for name, values in found.items()}
    spread_of = {name: float(np.std(values)) for name, values in found.items()}
    rows = np.zeros((len(samples), NUM_COLUMNS), dtype=np.float32)
    targets = np.zeros(len(samples))
    source_of = np.zeros(len(samples), dtype=np.int64)
    for place, index in enumerate(rng.permutation(len(samples)).tolist()):
        sample, name = samples[index], _origin(samples[index])
        deviation = logs[index] - mean_of[name]
        rows[place, :NUM_FEATURES] = sample.features()
        rows[place, COLUMNS.index("spread")] = spread_of[name]
        rows[place, COLUMNS.index("word_score")] = words.score(sample.cues.words)
        words.learn(sample.cues.words, deviation)
        targets[place], source_of[place] = deviation, number_of[name]
    # The same weight for each: how long a model's answers are says little of the next model's.
    prior_mean = float(np.mean(list(mean_of.values()))) if mean_of else PRIOR_MEAN
    return state.Prior(rows, targets, prior_mean, tuple(sources), source_of, words.state())


def _origin(sample: Sample) -> str:
    return f"{sample.source}/{sample.group}" if sample.source == "trace" else sample.source


def _log_length(sample: Sample, rng: np.random.Generator) -> float:
    tokens = float(sample.output_tokens)
    if sample.is_cut:
        tokens *= 1.0 + 0.5 * rng.exponential()
    return float(np.log1p(tokens))
