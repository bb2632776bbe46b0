"""The length predictor: how fast, how calibrated, and how good against its rivals.

Latency through a real socket to a real predictor process, and in this process. Accuracy on
held-out answers (cross-validation over prompts), every forecaster with the same online
calibration. A stream of answers in which all lengths grow by a factor half way.
"""

import argparse
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench import forecasting, lengths, report
from bench.lengths import Sample
from bench.rivals import RIVALS
from core.clock import Clock, MonotonicClock
from predictor.book import LengthBook
from predictor.client import PredictorClient
from predictor.features import cues_of, feature_row
from predictor.forest import warm_up
from predictor.model import LengthModel
from predictor.progress import progress_row

OURS = "forest"
MIN_CASES = 200
"""Fewer cases say too little of a coverage: two points are one standard error then."""
START_LIMIT_S = 120.0


def main(argv: list[str]) -> int:
    """``python -m bench predictor``."""
    parser = argparse.ArgumentParser(prog="python -m bench predictor", description=__doc__)
    parser.add_argument(
        "--lengths",
        type=Path,
        action="append",
        help="what `bench collect` wrote; may be repeated (default: the demo model's, shipped)",
    )
    parser.add_argument("--references", type=Path, help="prompts with ref_output_tokens")
    parser.add_argument("--traces", type=Path, help="folder of traces for the stream")
    parser.add_argument("--stream", type=int, default=8000, help="answers in the stream")
    parser.add_argument("--drift", type=float, default=1.35, help="growth of lengths half way")
    parser.add_argument("--folds", type=int, default=5, help="of the cross-validation")
    parser.add_argument("--quantile", type=float, default=0.9, help="of the bound")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=("latency", "accuracy", "stream"), default=None)
    parser.add_argument("--json", type=Path, default=None, help="write the figures here")
    args = parser.parse_args(argv)
    try:
        samples = [s for path in args.lengths or [lengths.SHIPPED] for s in lengths.read(path)]
        if args.references:
            samples += lengths.references(args.references)
        stream = _stream(args, samples)
    except (OSError, ValueError) as error:
        print(f"predictor: {error}", file=sys.stderr)
        return 2
    warm_up()
    summary: dict[str, float] = {}
    detail: dict[str, Any] = {}
    if args.only in (None, "latency"):
        detail["latency"] = _latency(samples, args.seed)
        summary |= {
            "forecast_one_ms_p50": detail["latency"]["socket_one_ms_p50"],
            "forecast_batch64_ms_per_request": detail["latency"]["socket_64_ms_per_request_p50"],
            "refine_us": detail["latency"]["refine_us"],
        }
    if args.only in (None, "accuracy"):
        detail["accuracy"] = _accuracy(args, samples)
        summary |= _headline(detail["accuracy"], args.quantile)
    if args.only in (None, "stream"):
        detail["stream"] = _drift(args, stream)
        summary["coverage_worst_error_points"] = max(
            summary.get("coverage_worst_error_points", 0.0),
            *(_worst_error(part, args.quantile) for part in detail["stream"].values()),
        )
    report.write(args.json, "predictor", summary, {**detail, "options": str(vars(args))})
    print("summary:", {name: float(f"{value:.4g}") for name, value in summary.items()})
    return 0


# Latency.


def _latency(samples: Sequence[Sample], seed: int) -> dict[str, float]:
    figures = {**_in_process(samples, seed), **_through_socket(samples)}
    rows = list(figures.items())
    print("\nLatency\n" + report.table(("figure", "value"), rows), flush=True)
    return figures


def _in_process(samples: Sequence[Sample], seed: int) -> dict[str, float]:
    model = LengthModel(seed=seed)
    forecaster = forecasting.ForestForecaster(seed, 0.9)
    forecaster.model = model
    forecaster.train(samples[:3000])
    requests = [sample.request() for sample in samples]
    body = lengths.chat_body("Write a short story of 300 words about a lighthouse. " * 3, 512, 0.7)
    cues = cues_of(body)
    classes = np.random.default_rng(seed).integers(0, 64, 50_000).astype(np.uint8)
    ids = np.random.default_rng(seed).integers(0, 50_000, 200).tolist()
    book = LengthBook()
    book.calibrate(model.calibrator.factors)
    asked = model.forecast(requests[:256], 0.0)
    for index, one in enumerate(asked):
        book.enter(str(index), one.points)
    count = [0]

    def refine() -> None:
        count[0] += 1
        book.refine(str(count[0] % len(asked)), 50 * (count[0] % 12))

    def forecast(size: int) -> Callable[[], object]:
        def call() -> object:
            count[0] += 1
            start = (count[0] * size) % max(len(requests) - size, 1)
            return model.forecast(requests[start : start + size], 0.0)

        return call

    one_ms, batch_ms = _times_s(forecast(1), 400) * 1e3, _times_s(forecast(64), 100) * 1e3
    return {
        "features_us": float(np.median(_times_s(lambda: cues_of(body), 400))) * 1e6,
        "progress_us": float(np.median(_times_s(lambda: progress_row(ids, classes), 400))) * 1e6,
        "row_us": float(np.median(_times_s(lambda: feature_row(cues, samples[0].facts), 400)))
        * 1e6,
        "refine_us": float(np.median(_times_s(refine, 4000))) * 1e6,
        "in_process_one_ms_p50": float(np.median(one_ms)),
        "in_process_one_ms_p99": float(np.quantile(one_ms, 0.99)),
        "in_process_64_ms_per_request_p50": float(np.median(batch_ms)) / 64,
        "in_process_64_ms_per_request_p99": float(np.quantile(batch_ms, 0.99)) / 64,
    }


def _times_s(call: Callable[[], object], count: int) -> "np.ndarray[Any, np.dtype[np.float64]]":
    clock = MonotonicClock()
    call()
    times = []
    for _ in range(count):
        start_s = clock.now_s()
        call()
        times.append(clock.now_s() - start_s)
    return np.array(times)


def _through_socket(samples: Sequence[Sample]) -> dict[str, float]:
    clock = MonotonicClock()
    with predictor_process() as address:
        client = PredictorClient(address, clock, model="bench")
        try:
            _await_ready(client, clock)
            # Something to have learnt, so that the forest is of the usual size.
            for start in range(0, min(len(samples), 3000), 64):
                _ask(client, samples[start : start + 64], f"teach-{start}")
            one = [_ask(client, [samples[i % len(samples)]], f"one-{i}") for i in range(500)]
            many = [
                _ask(client, [samples[(i * 64 + k) % len(samples)] for k in range(64)], f"many-{i}")
                / 64
                for i in range(100)
            ]
        finally:
            client.close()
    return {
        "socket_one_ms_p50": float(np.median(one)) * 1e3,
        "socket_one_ms_p99": float(np.quantile(one, 0.99)) * 1e3,
        "socket_64_ms_per_request_p50": float(np.median(many)) * 1e3,
        "socket_64_ms_per_request_p99": float(np.quantile(many, 0.99)) * 1e3,
    }


def _await_ready(client: PredictorClient, clock: Clock) -> None:
    end_s = clock.now_s() + START_LIMIT_S
    while not client.is_alive():
        if clock.now_s() > end_s:
            raise RuntimeError("the predictor process did not answer")
        client.poll()
        client.wait(0.1)


def _ask(client: PredictorClient, samples: Sequence[Sample], name: str) -> float:
    """Ask about some requests and wait for all answers; seconds from the first call on."""
    clock = MonotonicClock()
    start_s = clock.now_s()
    for index, sample in enumerate(samples):
        client.ask(f"{name}-{index}", sample.features(), words=sample.cues.words)
    missing = len(samples)
    while missing:
        missing -= len(client.poll().forecasts)
        if missing:
            client.wait(0.05)
    took_s = clock.now_s() - start_s
    for index, sample in enumerate(samples):
        client.ended(f"{name}-{index}", sample.output_tokens, is_cut=sample.is_cut)
    return took_s


@contextlib.contextmanager
def predictor_process() -> Iterator[str]:
    """A predictor process of its own, without a state; its address."""
    with tempfile.TemporaryDirectory(prefix="jitserve-") as folder:
        address = f"ipc://{folder}/predictor"
        command = [sys.executable, "-m", "predictor", "--address", address]
        process = subprocess.Popen(command, cwd=Path(__file__).resolve().parent.parent)
        try:
            yield address
        finally:
            process.terminate()
            process.wait(timeout=30)


# Accuracy.


def _accuracy(args: argparse.Namespace, samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    parts = forecasting.folds(samples, args.folds, args.seed)
    makers: dict[str, Callable[[], forecasting.Forecaster]] = {
        OURS: lambda: forecasting.ForestForecaster(args.seed, args.quantile)
    }
    for name, kind in RIVALS.items():
        is_oracle = name == "oracle"
        makers[name] = lambda kind=kind, is_oracle=is_oracle: forecasting.RivalForecaster(  # type: ignore[misc]
            kind(), args.seed, args.quantile, is_calibrated=not is_oracle
        )
    figures = {}
    for name, make in makers.items():
        scores = forecasting.no_scores()
        for index, held_out in enumerate(parts):
            rest = [s for other, part in enumerate(parts) if other != index for s in part]
            forecaster = make()
            forecaster.train(rest)
            if isinstance(forecaster, forecasting.ForestForecaster):
                # Judged as the rivals are: nothing but the calibration learns from now on.
                forecaster.is_frozen = True
            forecasting.judge(forecaster, held_out, args.quantile, scores)
        figures[name] = forecasting.summary(scores)
    _print_accuracy(figures)
    return figures


def _print_accuracy(figures: dict[str, dict[str, float]]) -> None:
    progress = [g for g in forecasting.PROGRESS if f"cases_{g}" in figures[OURS]]
    cases = ", ".join(
        f"{figures[OURS][f'open_{g}']:.0f} of {figures[OURS][f'cases_{g}']:.0f} at {g}"
        for g in progress
    )
    print(f"\nHeld-out answers: coverage of the bound, where it is below max_tokens ({cases})")
    print(_grid(figures, progress, "coverage"))
    print("\nbound over true length, P5 / median / P95, by tokens generated; Kendall's tau at 0")
    rows = []
    for name, row in figures.items():
        spans = [_span(row, g) for g in progress]
        rows.append((name, *spans, row.get("kendall_tau")))
    print(report.table(("forecaster", *(str(g) for g in progress), "tau"), rows))
    print("\npinball loss by tokens generated")
    print(_grid(figures, progress, "pinball"), flush=True)


def _span(row: dict[str, float], g: int) -> str:
    values = [row.get(f"ratio_{name}_{g}") for name in ("p5", "p50", "p95")]
    return " / ".join("-" if value is None else f"{value:.2g}" for value in values)


def _grid(figures: dict[str, dict[str, float]], progress: list[int], what: str) -> str:
    rows = [(name, *(row.get(f"{what}_{g}") for g in progress)) for name, row in figures.items()]
    return report.table(("forecaster", *(str(g) for g in progress)), rows)


def _headline(figures: dict[str, dict[str, float]], quantile: float) -> dict[str, float]:
    def loss(name: str) -> float:
        values = [v for key, v in figures[name].items() if key.startswith("pinball_")]
        return float(np.mean(values))

    best = min(loss(name) for name in figures if name not in (OURS, "oracle"))
    return {
        "coverage_worst_error_points": _worst_error(figures[OURS], quantile),
        "pinball_ratio_vs_best_rival": loss(OURS) / best,
    }


def _worst_error(row: dict[str, float], quantile: float) -> float:
    """Largest distance of the coverage from its quantile, in points, where cases suffice."""
    errors = [
        100 * abs(row[f"coverage_{g}"] - quantile)
        for g in forecasting.PROGRESS
        if row.get(f"open_{g}", 0.0) >= MIN_CASES
    ]
    return max(errors, default=0.0)


# The stream.


def _stream(args: argparse.Namespace, samples: Sequence[Sample]) -> list[Sample]:
    if args.traces:
        found = lengths.traces(args.traces, args.stream // len(lengths.TRACES) + 1, args.seed)
        return found[: args.stream]
    rng = np.random.default_rng(args.seed)
    print(
        f"stream: without --traces, {args.stream} draws of {len(samples)} answers: each comes often"
    )
    return [samples[i] for i in rng.integers(len(samples), size=args.stream)]


def _drift(args: argparse.Namespace, stream: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """Learn along a stream; lengths grow by ``--drift`` half way.

    Parts: the first thousand, until the drift, the thousand after it, and the rest.
    """
    half = len(stream) // 2
    grown = [_longer(sample, args.drift) for sample in stream[half:]]
    early = min(1000, half)
    parts = {
        "first": list(stream[:early]),
        "steady": list(stream[early:half]),
        "after drift": grown[:1000],
        "later": grown[1000:],
    }
    forecaster = forecasting.ForestForecaster(args.seed, args.quantile, lambda s: s.group)
    figures = {}
    for name, part in parts.items():
        scores = forecasting.no_scores()
        forecasting.judge(forecaster, part, args.quantile, scores)
        figures[name] = forecasting.summary(scores) if scores.truth else {"cases": 0.0}
    progress = list(forecasting.PROGRESS)
    print(f"\nStream of {len(stream)} answers, lengths times {args.drift:g} half way: coverage")
    print(_grid(figures, progress, "coverage"))
    print("cases with a bound below max_tokens")
    print(_grid(figures, progress, "open"), flush=True)
    del figures["first"]
    return figures


def _longer(sample: Sample, factor: float) -> Sample:
    tokens = max(round(sample.output_tokens * factor), 1)
    facts = msgspec.structs.replace(
        sample.facts, max_output_tokens=round(sample.facts.max_output_tokens * factor)
    )
    return msgspec.structs.replace(sample, output_tokens=tokens, facts=facts)
