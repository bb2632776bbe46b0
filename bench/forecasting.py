"""Measures of length forecasts, and how they are taken on held-out and on streamed answers.

Formulas: docs/metrics.md. A forecaster is asked in batches and told afterwards how long the
answers became; whatever calibrates online sees only answers that were over before.
"""

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import numpy as np
from scipy.stats import kendalltau

from bench.lengths import Sample
from bench.rivals import Rival
from predictor.book import LengthBook
from predictor.calibration import Calibrator
from predictor.distribution import Points, at_level, pinball_loss
from predictor.model import Asked, LengthModel
from predictor.tilt import TILT_MARKS, Tilts, no_tilts, tilt_of

PROGRESS: tuple[int, ...] = (0, 50, 100, 200, 400)
BATCH = 32
NOON_S = 43_200.0
NUM_QUARTERS = 4


class Forecaster(Protocol):
    """Asked, then told."""

    def train(self, samples: Sequence[Sample]) -> None: ...

    def ask(self, samples: Sequence[Sample]) -> Points:
        """(n, NUM_POINTS) before calibration."""
        ...

    def tell(self, samples: Sequence[Sample]) -> None:
        """How long those that were asked about last became."""
        ...

    @property
    def calibrator(self) -> Calibrator: ...

    @property
    def tilts(self) -> Tilts: ...


class ForestForecaster:
    """The predictor's own model, learning as it goes.

    Args:
        tenant_of: how a sample's tenant is named.
    """

    def __init__(
        self,
        seed: int,
        quantile: float,
        tenant_of: Callable[[Sample], str] = lambda sample: "",
    ) -> None:
        self.model = LengthModel(seed=seed, quantile=quantile)
        self._tenant_of = tenant_of
        self._asked: list[Asked] = []
        self.is_frozen = False
        """Only the calibration goes on, as a rival's does."""

    @property
    def calibrator(self) -> Calibrator:
        return self.model.calibrator

    @property
    def tilts(self) -> Tilts:
        return self.model.tilt.tilts

    def train(self, samples: Sequence[Sample]) -> None:
        for start in range(0, len(samples), BATCH):
            batch = samples[start : start + BATCH]
            self.ask(batch)
            self.tell(batch)
        self.model.refit()

    def ask(self, samples: Sequence[Sample]) -> Points:
        requests = [sample.request(tenant=self._tenant_of(sample)) for sample in samples]
        self._asked = self.model.forecast(requests, NOON_S)
        return np.stack([asked.points for asked in self._asked])

    def tell(self, samples: Sequence[Sample]) -> None:
        if self.is_frozen:
            self._calibrate(samples)
            return
        for asked, sample in zip(self._asked, samples, strict=True):
            self.model.learn(
                asked,
                sample.output_tokens,
                is_cut=sample.is_cut,
                progress=sample.progress_rows(),
            )
        if self.model.is_fit_due():
            self.model.refit()

    def _calibrate(self, samples: Sequence[Sample]) -> None:
        for asked, sample in zip(self._asked, samples, strict=True):
            length = self.model.whole_length(asked, sample.output_tokens, is_cut=sample.is_cut)
            marks = enumerate(sample.progress_rows(), start=1)
            tilts = np.array([tilt_of(self.tilts, bucket, row) for bucket, row in marks])
            self.calibrator.learn(asked.points, length, self.model.quantile, tilts)


class RivalForecaster:
    """A rival with the same online calibration as ours, so that only the forecast differs."""

    def __init__(self, rival: Rival, seed: int, quantile: float, *, is_calibrated: bool) -> None:
        self._rival = rival
        self._seed = seed
        self._quantile = quantile
        self._is_calibrated = is_calibrated
        self._points: Points = np.zeros((0, 0), dtype=np.float32)
        self._calibrator = Calibrator()

    @property
    def calibrator(self) -> Calibrator:
        return self._calibrator

    @property
    def tilts(self) -> Tilts:
        return no_tilts()

    def train(self, samples: Sequence[Sample]) -> None:
        # Calibrated on each quarter by what was trained on the others, then trained on all.
        for quarter in range(NUM_QUARTERS):
            held_out = samples[quarter::NUM_QUARTERS]
            rest = [s for index, s in enumerate(samples) if index % NUM_QUARTERS != quarter]
            self._rival.fit(rest, self._seed)
            self.ask(held_out)
            self.tell(held_out)
        self._rival.fit(samples, self._seed)

    def ask(self, samples: Sequence[Sample]) -> Points:
        self._points = self._rival.points(samples)
        return self._points

    def tell(self, samples: Sequence[Sample]) -> None:
        if not self._is_calibrated:
            return
        for points, sample in zip(self._points, samples, strict=True):
            # They know no better than that a cut answer is as long as it got.
            self._calibrator.learn(points, sample.output_tokens, self._quantile)


class Scores(msgspec.Struct):
    """What was seen of one forecaster. Lists hold one number per answer that got so far."""

    is_within: dict[int, list[bool]]
    """Only where the bound is below the limit of tokens: no answer can outgrow that one."""
    ratio: dict[int, list[float]]
    pinball: dict[int, list[float]]
    median: list[float]
    truth: list[float]


def no_scores() -> Scores:
    """Scores of nothing yet."""
    return Scores(
        {g: [] for g in PROGRESS}, {g: [] for g in PROGRESS}, {g: [] for g in PROGRESS}, [], []
    )


def judge(
    forecaster: Forecaster, samples: Sequence[Sample], quantile: float, scores: Scores
) -> None:
    """Ask and tell ``samples`` in order, and note how each forecast did."""
    for start in range(0, len(samples), BATCH):
        batch = samples[start : start + BATCH]
        points = forecaster.ask(batch)
        book = LengthBook()
        book.calibrate(forecaster.calibrator.factors, forecaster.tilts)
        for index, sample in enumerate(batch):
            book.enter("it", points[index])
            _note(book, sample, quantile, scores)
        forecaster.tell(batch)


def _note(book: LengthBook, sample: Sample, quantile: float, scores: Scores) -> None:
    truth = float(sample.output_tokens)
    progress = sample.progress_rows()
    for g in PROGRESS:
        if truth <= g:
            break
        place = int(np.searchsorted(TILT_MARKS, g))
        if g == TILT_MARKS[min(place, len(TILT_MARKS) - 1)] and place < len(progress):
            book.saw("it", g, progress[place])
        total = book.refine("it", g)
        if total is None:
            continue
        limit = float(sample.facts.max_output_tokens)
        bound = math.ceil(float(at_level(total, quantile)))
        if bound < limit:
            scores.is_within[g].append(truth <= bound)
        # As the scheduler has it: no answer is longer than it may become.
        total = np.minimum(total, np.float32(limit))
        scores.ratio[g].append(min(bound, limit) / truth)
        scores.pinball[g].append(pinball_loss(total, truth))
        if g == 0:
            scores.median.append(float(at_level(total, 0.5)))
            scores.truth.append(truth)


def summary(scores: Scores) -> dict[str, float]:
    """Flat figures: coverage, ratio and pinball loss by progress, and Kendall's tau."""
    figures: dict[str, float] = {"cases": float(len(scores.truth))}
    for g in PROGRESS:
        within, ratio = scores.is_within[g], scores.ratio[g]
        if not ratio:
            continue
        figures[f"cases_{g}"] = float(len(ratio))
        figures[f"open_{g}"] = float(len(within))
        if within:
            figures[f"coverage_{g}"] = float(np.mean(within))
        for name, level in (("p5", 0.05), ("p50", 0.5), ("p95", 0.95)):
            figures[f"ratio_{name}_{g}"] = float(np.quantile(ratio, level))
        figures[f"pinball_{g}"] = float(np.mean(scores.pinball[g]))
    if len(scores.truth) > 1:
        tau = float(kendalltau(scores.median, scores.truth).statistic)
        figures["kendall_tau"] = tau if math.isfinite(tau) else 0.0
    return figures


def folds(samples: Sequence[Sample], count: int, seed: int) -> list[list[Sample]]:
    """Samples in ``count`` random parts; the same prompt is never in two of them."""
    rng = np.random.default_rng(seed)
    prompts = sorted({_prompt_key(sample) for sample in samples})
    part_of = dict(zip(prompts, rng.permutation(len(prompts)) % count, strict=True))
    parts: list[list[Sample]] = [[] for _ in range(count)]
    for index in rng.permutation(len(samples)):
        parts[part_of[_prompt_key(samples[index])]].append(samples[index])
    return parts


def _prompt_key(sample: Sample) -> tuple[int, ...]:
    return (*sample.cues.words, *(int(v * 1000) for v in sample.cues.values))
