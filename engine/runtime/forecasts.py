"""Between SGLang's requests, the length predictor and the frame manager.

Asks the predictor about each request that arrives, hands what comes back to the frame
manager, refines it as tokens are generated, and reports how long answers became. Nothing
here waits: without a predictor the frame manager has its own lengths.
"""

from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, Req

from core.clock import Clock
from core.slo import CompoundSlo, LatencySlo, RequestTerms
from engine.runtime import arrivals, wire
from predictor.book import LengthBook
from predictor.client import NO_NEWS, News, PredictorClient
from predictor.features import EngineFacts, Row, feature_row
from predictor.progress import Classes, classes_of, progress_row
from predictor.tilt import TILT_MARKS, TILTED_BUCKETS
from scheduler.frame import FrameManager

REFINE_EVERY_TOKENS = 50
"""As in the paper; and once an answer has outlived all but the last of its points."""
LAST_POINTS = 4
REFINEMENTS_PER_PASS = 32
"""Refinements, looks at what was generated included, between two steps: what is left over is
done after the next one. Requests that began together pass their marks together."""
MIN_OPEN_TOKENS = 8
"""Of an answer with a lower limit there is nothing to forecast, and nothing to learn."""


class _Live:
    """A request that may be forecast."""

    __slots__ = ("progress", "refine_at", "req")

    def __init__(self, req: Req) -> None:
        self.req = req
        self.progress: list[Row] = []
        """What its answer looked like at the first of ``TILT_MARKS``."""
        self.refine_at = float("inf")


class Forecasts:
    """The forecasts of one scheduler process.

    Args:
        client: None where no predictor is used, or another rank asks and broadcasts.
        classes: of the model's tokens; None: answers are not looked at while they grow.
    """

    def __init__(
        self,
        frames: FrameManager,
        client: PredictorClient | None,
        classes: Classes | None = None,
    ) -> None:
        self._frames = frames
        self._client = client
        self._classes = classes
        self._book = LengthBook()
        self._live: dict[str, _Live] = {}
        self.is_used = True
        """Whether the frame manager is told; the predictor learns in any case."""
        self.num_forecasts = 0
        self.num_unusable = 0
        self._budget = REFINEMENTS_PER_PASS

    def arrived(self, key: str, req: Req, terms: RequestTerms) -> None:
        """A request was queued for the first time."""
        if not is_forecastable(req):
            return
        self._live[key] = _Live(req)
        if self._client is None:
            return
        cues = wire.cues_in(req.sampling_params.custom_params)
        node = terms.slo.node if isinstance(terms.slo, CompoundSlo) else ""
        self._client.ask(
            key,
            feature_row(cues, facts_of(req, terms)),
            tenant=terms.tenant,
            node=node,
            words=cues.words,
        )

    def listen(self) -> News:
        """What the predictor has sent since the last call."""
        return NO_NEWS if self._client is None else self._client.poll()

    def take(self, news: News) -> None:
        """Use what has come in: here, or from the rank that asks."""
        self._budget = REFINEMENTS_PER_PASS
        if news.factors is not None:
            self._book.calibrate(news.factors, news.tilts)
        for key, points in news.forecasts:
            live = self._live.get(key)
            request = self._frames.get(key)
            if live is None or request is None:
                continue
            self._book.enter(key, points)
            self.num_forecasts += 1
            self._refine(key, live, request.generated_tokens)

    def progressed(self, key: str, generated_tokens: int) -> None:
        """So many tokens have been generated in all."""
        live = self._live.get(key)
        is_due = live is not None and generated_tokens >= live.refine_at
        if live is not None and is_due and self._budget > 0:
            self._refine(key, live, generated_tokens)

    def ended(self, key: str, req: Req) -> None:
        """A request is over, however it ended."""
        self._book.forget(key)
        live = self._live.pop(key, None)
        if live is not None and self._client is not None:
            self._client.ended(key, len(req.output_ids), is_cut=is_cut(req), progress=live.progress)

    def use(self, *, is_used: bool) -> None:
        """Let the frame manager have forecasts, or leave it to its own lengths from now on."""
        self.is_used = is_used

    def state(self) -> dict[str, Any]:
        """For whoever looks at the server."""
        client = self._client
        return {
            "is_used": self.is_used,
            "is_alive": client is not None and client.is_alive(),
            "num_forecasts": self.num_forecasts,
            "num_refinements": self._book.num_refinements,
            "num_unusable": self.num_unusable,
            "num_held": len(self._book),
            "channel": {} if client is None else client.counters(),
        }

    def _refine(self, key: str, live: _Live, generated_tokens: int) -> None:
        self._budget -= 1
        self._look(key, live, generated_tokens)
        total = self._book.refine(key, generated_tokens)
        if total is None:
            return
        next_mark = (generated_tokens // REFINE_EVERY_TOKENS + 1) * REFINE_EVERY_TOKENS
        last = float(total[-LAST_POINTS])
        live.refine_at = max(min(next_mark, last), generated_tokens + 1)
        if not self.is_used:
            return
        try:
            self._frames.forecast(key, total)
        except ValueError:
            # Not a length: whatever the predictor meant, serving goes on.
            self.num_unusable += 1

    def _look(self, key: str, live: _Live, generated_tokens: int) -> None:
        """Note what the answer looked like at each mark that it has passed."""
        if self._classes is None:
            return
        while len(live.progress) < TILTED_BUCKETS:
            mark = int(TILT_MARKS[len(live.progress)])
            if generated_tokens < mark:
                return
            self._budget -= 1
            row = progress_row(live.req.output_ids[:mark], self._classes)
            live.progress.append(row)
            self._book.saw(key, mark, row)


def token_classes(tokenizer: Any) -> Classes | None:
    """What is to be seen in the tokens of the served model; None without a vocabulary."""
    try:
        return classes_of(tokenizer.get_vocab())
    except (AttributeError, NotImplementedError, TypeError, ValueError):
        return None


def connect(address: str, model: str, clock: Clock) -> PredictorClient | None:
    """A client of the predictor at ``address``; None for no address."""
    return PredictorClient(address, clock, model=model) if address else None


def is_forecastable(req: Req) -> bool:
    """Whether its length is open and somebody's answer."""
    is_urgent = arrivals.is_refused(req) or arrivals.is_health_check(req)
    is_open = arrivals.max_output_tokens(req) >= MIN_OPEN_TOKENS
    return is_open and not is_urgent and not req.sampling_params.ignore_eos


def is_cut(req: Req) -> bool:
    """Whether the answer would have gone on: aborted, vanished, or at its limit of tokens."""
    reason = req.finished_reason
    return reason is None or isinstance(reason, FINISH_ABORT | FINISH_LENGTH)


def facts_of(req: Req, terms: RequestTerms) -> EngineFacts:
    """What SGLang knows of a request when it is queued."""
    params = req.sampling_params
    return EngineFacts(
        input_tokens=len(req.origin_input_ids),
        max_output_tokens=arrivals.max_output_tokens(req),
        min_output_tokens=params.min_new_tokens,
        # SGLang has rewritten greedy sampling to the likeliest one of a temperature of 1.
        temperature=0.0 if params.top_k == 1 else params.temperature,
        top_p=params.top_p,
        has_penalty=arrivals.has_penalty(params),
        has_stop=bool(params.stop_strs or params.stop_token_ids),
        has_grammar=any((params.json_schema, params.regex, params.ebnf, params.structural_tag)),
        is_streamed=bool(req.stream),
        is_thinking=not arrivals.has_answer_begun(req),
        is_latency=isinstance(terms.slo, LatencySlo),
        is_program=isinstance(terms.slo, CompoundSlo),
    )
