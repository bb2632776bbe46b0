"""Between SGLang's requests, the length predictor and the frame manager.

Asks the predictor about each request that arrives, hands what comes back to the frame
manager, refines it as tokens are generated, and reports how long answers became. Nothing
here waits: without a predictor the frame manager has its own lengths.
"""

from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, Req

from core.slo import CompoundSlo, LatencySlo, RequestTerms
from engine.runtime import arrivals, wire
from predictor.book import LengthBook
from predictor.client import NO_NEWS, News, PredictorClient
from predictor.features import EngineFacts, feature_row
from scheduler.frame import FrameManager

REFINE_EVERY_TOKENS = 50
"""As in the paper; and once an answer has outlived all but the last of its points."""
LAST_POINTS = 4


class Forecasts:
    """The forecasts of one scheduler process.

    Args:
        client: None where no predictor is used, or another rank asks and broadcasts.
    """

    def __init__(self, frames: FrameManager, client: PredictorClient | None) -> None:
        self._frames = frames
        self._client = client
        self._book = LengthBook()
        self._refine_at: dict[str, float] = {}
        self.is_used = True
        """Whether the frame manager is told; the predictor learns in any case."""
        self.num_forecasts = 0

    def arrived(self, key: str, req: Req, terms: RequestTerms) -> None:
        """A request was queued for the first time."""
        if self._client is None or not is_forecastable(req):
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
        if news.factors is not None:
            self._book.calibrate(news.factors)
        for key, points in news.forecasts:
            request = self._frames.get(key)
            if request is None:
                continue
            self._book.enter(key, points)
            self.num_forecasts += 1
            self._refine(key, request.generated_tokens)

    def progressed(self, key: str, generated_tokens: int) -> None:
        """So many tokens have been generated in all."""
        if generated_tokens >= self._refine_at.get(key, float("inf")):
            self._refine(key, generated_tokens)

    def ended(self, key: str, req: Req) -> None:
        """A request is over, however it ended."""
        self._book.forget(key)
        self._refine_at.pop(key, None)
        if self._client is not None:
            self._client.ended(key, len(req.output_ids), is_cut=is_cut(req))

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
            "num_held": len(self._book),
            "channel": {} if client is None else client.counters(),
        }

    def _refine(self, key: str, generated_tokens: int) -> None:
        total = self._book.refine(key, generated_tokens)
        if total is None:
            return
        last = float(total[-LAST_POINTS])
        soonest = generated_tokens + 1
        self._refine_at[key] = max(min(generated_tokens + REFINE_EVERY_TOKENS, last), soonest)
        if self.is_used:
            self._frames.forecast(key, total)


def connect(address: str, model: str, clock: Any) -> PredictorClient | None:
    """A client of the predictor at ``address``; None for no address."""
    return PredictorClient(address, clock, model=model) if address else None


def is_forecastable(req: Req) -> bool:
    """Whether its length is open and somebody's answer."""
    is_urgent = arrivals.is_refused(req) or arrivals.is_health_check(req)
    return not is_urgent and not req.sampling_params.ignore_eos


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
        temperature=params.temperature,
        top_p=params.top_p,
        has_penalty=arrivals.has_penalty(params),
        has_stop=bool(params.stop_strs or params.stop_token_ids),
        has_grammar=any((params.json_schema, params.regex, params.ebnf, params.structural_tag)),
        is_streamed=bool(req.stream),
        is_thinking=not arrivals.has_answer_begun(req),
        is_latency=isinstance(terms.slo, LatencySlo),
        is_program=isinstance(terms.slo, CompoundSlo),
    )
