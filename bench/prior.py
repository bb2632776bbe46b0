"""Make the prior that the length predictor ships with, from numbers only.

Answers of several models and traces are played through an empty predictor in random order;
what its reservoir holds afterwards, relative to what it had learnt of each model, is the
prior. The same files and seed make the same prior.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench import lengths
from bench.lengths import Sample
from predictor import state
from predictor.distribution import Floats
from predictor.model import COLUMNS, LengthModel

DAY_COLUMNS = [index for index, name in enumerate(COLUMNS) if name.startswith("day_")]


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
    """The prior of these samples."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(samples))
    model = LengthModel(seed=seed, capacity=max(len(samples), 1))
    model.history.prior_mean = _mean_of_sources(samples)
    sources = sorted({f"{sample.source}/{sample.group}" for sample in samples})
    number_of = {name: number for number, name in enumerate(sources)}
    source_of = []
    for index in order.tolist():
        sample = samples[index]
        asked = model.forecast([sample.request(tenant=sample.group)], 0.0)[0]
        model.learn(asked, sample.output_tokens, is_cut=sample.is_cut)
        source_of.append(number_of[f"{sample.source}/{sample.group}"])
    data = model.training_data()
    rows = data.rows.copy()
    # No time of day is known of them: a place that no real time has.
    rows[:, DAY_COLUMNS] = 0.0
    return state.Prior(
        rows=rows,
        targets=data.targets,
        prior_mean=model.history.prior_mean,
        sources=tuple(sources),
        source_of=np.array(source_of, dtype=np.int64),
        words=model.words.state(),
    )


def _mean_of_sources(samples: Sequence[Sample]) -> float:
    """The mean log length of a source, the same weight for each."""
    found: dict[str, list[float]] = {}
    for sample in samples:
        found.setdefault(sample.source, []).append(float(np.log1p(sample.output_tokens)))
    means: Floats = np.array([np.mean(values) for values in found.values()])
    return float(means.mean()) if means.size else 5.0
