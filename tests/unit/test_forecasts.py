"""The adapter between SGLang's requests, the predictor and the frame manager; the rest is faked."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from core.slo import BestEffortSlo, CompoundSlo, LatencySlo, RequestTerms
from engine.runtime import wire
from predictor.calibration import no_factors
from predictor.client import News
from predictor.distribution import NUM_POINTS, Points
from predictor.features import FEATURES, Cues, cues_of
from scheduler.config import SchedulerConfig
from scheduler.frame import FrameManager
from scheduler.lifecycle import RequestState

# Importing SGLang takes a quarter of a minute on two idle cores, and it warns of missing GPUs.
pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]

TERMS = RequestTerms(0.0, BestEffortSlo(600.0), tenant="acme")


@pytest.fixture(scope="module")
def module() -> Any:
    from engine.runtime import forecasts

    return forecasts


@pytest.fixture(scope="module")
def reasons() -> Any:
    from sglang.srt.managers import schedule_batch

    return schedule_batch


class FakeClient:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.asked: dict[str, dict[str, Any]] = {}
        self.endings: list[tuple[str, int, bool]] = []
        self.news = News()

    def ask(self, request_id: str, features: Any, **more: Any) -> None:
        self.asked[request_id] = {"features": features, **more}

    def ended(
        self, request_id: str, output_tokens: int, *, is_cut: bool, progress: list[Any]
    ) -> None:
        self.endings.append((request_id, output_tokens, is_cut))
        self.progress = progress

    def poll(self) -> News:
        return self.news

    def is_alive(self) -> bool:
        return True

    def counters(self) -> dict[str, int]:
        return {}


def req(rid: str = "a", *, custom: Any = None, **more: Any) -> Any:
    """An SGLang request as far as it is looked at."""
    params = {
        "max_new_tokens": 100,
        "min_new_tokens": 0,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "ignore_eos": False,
        "stop_strs": [],
        "stop_token_ids": None,
        "json_schema": None,
        "regex": None,
        "ebnf": None,
        "structural_tag": None,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "custom_params": custom,
    }
    params.update({key: more.pop(key) for key in list(more) if key in params})
    fields = {
        "rid": rid,
        "origin_input_ids": [1] * 30,
        "output_ids": [],
        "stream": False,
        "finished_reason": None,
        "to_finish": None,
        "require_reasoning": False,
    }
    return SimpleNamespace(sampling_params=SimpleNamespace(**params), **(fields | more))


def ramp(most: float = 512.0) -> Points:
    return np.linspace(1.0, most, NUM_POINTS, dtype=np.float32)


class World:
    """A frame manager with one request, and forecasts of a fake predictor."""

    def __init__(self, module: Any) -> None:
        self.frames = FrameManager(SchedulerConfig())
        self.client = FakeClient()
        self.forecasts = module.Forecasts(self.frames, self.client)
        self.req = req()
        self.frames.arrive("a", TERMS, input_tokens=30, max_output_tokens=1000)
        self.forecasts.arrived("a", self.req, TERMS)

    def hear(self, points: Points, *, key: str = "a") -> None:
        self.forecasts.take(News(((key, points),), None))

    def known_points(self) -> list[float]:
        request = self.frames.get("a")
        assert request is not None
        return [float(point) for point in self.frames.table.points[request.row]]

    def generate(self, tokens: int) -> None:
        self.frames.progressed("a", tokens)
        self.forecasts.progressed("a", tokens)


@pytest.fixture
def world(module: Any) -> World:
    return World(module)


def test_a_request_is_asked_about_with_what_engine_and_prompt_say(module: Any) -> None:
    frames, client = FrameManager(SchedulerConfig()), FakeClient()
    forecasts = module.Forecasts(frames, client)
    cues = cues_of({"messages": [{"role": "user", "content": "List five facts in JSON."}]})
    custom = {wire.CUES_KEY: msgspec.to_builtins(cues)}
    terms = RequestTerms(0.0, CompoundSlo(9.0, "p", (), "plan"), tenant="acme")
    forecasts.arrived("a", req(custom=custom, json_schema="{}", stream=True), terms)
    asked = client.asked["a"]
    row = dict(zip(FEATURES, asked["features"].tolist(), strict=True))
    assert (asked["tenant"], asked["node"], asked["words"]) == ("acme", "plan", cues.words)
    assert row["log_input_tokens"] == pytest.approx(math.log1p(30))
    assert row["log_max_tokens"] == pytest.approx(math.log1p(100))
    assert row["temperature"] == pytest.approx(0.5)
    assert (row["has_grammar"], row["is_streamed"], row["is_program"]) == (1, 1, 1)
    assert row["log_asked_items"] > 0


@pytest.mark.parametrize(
    "unlike",
    [{"rid": "HEALTH_CHECK_1"}, {"ignore_eos": True}],
    ids=["a health check", "an answer of fixed length"],
)
def test_what_is_nobodys_open_answer_is_not_asked_about(
    module: Any, unlike: dict[str, Any]
) -> None:
    client = FakeClient()
    module.Forecasts(FrameManager(SchedulerConfig()), client).arrived("a", req(**unlike), TERMS)
    assert not client.asked


def test_without_a_predictor_nothing_happens(module: Any) -> None:
    forecasts = module.Forecasts(FrameManager(SchedulerConfig()), None)
    forecasts.arrived("a", req(), TERMS)
    forecasts.take(forecasts.listen())
    forecasts.progressed("a", 10)
    forecasts.ended("a", req())
    assert forecasts.state()["is_alive"] is False


def test_a_forecast_reaches_the_frame_manager(world: World) -> None:
    world.hear(ramp())
    points = world.known_points()
    assert points[0] < 20
    assert points[-1] == pytest.approx(512, rel=0.03)


def test_a_forecast_that_comes_late_is_refined_at_once(world: World) -> None:
    world.generate(200)
    world.hear(ramp())
    assert min(world.known_points()) >= 200


def test_every_fifty_tokens_the_rest_is_looked_at_anew(world: World) -> None:
    world.hear(ramp())
    before = world.known_points()
    world.generate(49)
    assert world.known_points() == before
    world.generate(50)
    assert min(world.known_points()) >= 50
    world.generate(100)
    assert min(world.known_points()) >= 100


def test_an_answer_that_outlives_its_points_is_refined_before_its_time(world: World) -> None:
    world.hear(ramp(20.0))
    last = sorted(world.known_points())[-1]
    world.generate(int(last) + 1)
    assert max(world.known_points()) > last + 1


def test_calibration_changes_what_is_refined_from_then_on(world: World) -> None:
    factors = no_factors() * 2
    world.forecasts.take(News((), factors))
    world.hear(ramp())
    assert max(world.known_points()) == pytest.approx(1024, rel=0.03)


def test_switched_off_the_manager_keeps_its_own_lengths(world: World) -> None:
    own = world.known_points()
    world.forecasts.use(is_used=False)
    world.hear(ramp())
    assert world.known_points() == own


def test_a_forecast_of_a_request_that_is_gone_is_let_go(world: World) -> None:
    world.hear(ramp(), key="gone")
    assert world.forecasts.state()["num_held"] == 0


@pytest.mark.parametrize("how", ["stop", "length", "abort", "vanished"])
def test_an_end_is_reported_and_all_is_forgotten(world: World, reasons: Any, how: str) -> None:
    world.hear(ramp())
    world.req.output_ids = [1] * 7
    world.req.finished_reason = {
        "stop": reasons.FINISH_MATCHED_TOKEN(matched=2),
        "length": reasons.FINISH_LENGTH(length=7),
        "abort": reasons.FINISH_ABORT("x"),
        "vanished": None,
    }[how]
    world.frames.ended("a", RequestState.ABORTED)
    world.forecasts.ended("a", world.req)
    assert world.client.endings == [("a", 7, how != "stop")]
    assert world.forecasts.state()["num_held"] == 0
    world.forecasts.progressed("a", 500)


def test_cues_travel_beside_the_terms_and_nobody_else_can_put_them_there() -> None:
    cues = Cues((1.0, 2.0), (3, 4))
    params: dict[str, Any] = {"custom_params": {wire.CUES_KEY: "forged", "theirs": 1}}
    wire.attach(params, TERMS, cues)
    assert wire.cues_in(params["custom_params"]) == cues
    assert params["custom_params"]["theirs"] == 1
    wire.attach(params, None)
    assert params["custom_params"] == {"theirs": 1}


@pytest.mark.parametrize("forged", [None, 3, {}, {wire.CUES_KEY: 7}, {wire.CUES_KEY: [["a"], 1]}])
def test_senseless_cues_are_none(forged: Any) -> None:
    assert wire.cues_in(forged) == Cues()


def test_a_stream_and_a_program_are_told_apart(module: Any) -> None:
    stream = module.facts_of(req(stream=True), RequestTerms(0.0, LatencySlo(1.0, 0.1)))
    assert (stream.is_latency, stream.is_program, stream.is_streamed) == (True, False, True)
    assert module.facts_of(req(max_new_tokens=None), TERMS).max_output_tokens == 1 << 30


def test_what_an_answer_looks_like_is_noted_at_each_mark_and_told_at_its_end(module: Any) -> None:
    frames, client = FrameManager(SchedulerConfig()), FakeClient()
    classes = np.zeros(8, dtype=np.uint8)
    forecasts = module.Forecasts(frames, client, classes)
    asked = req()
    frames.arrive("a", TERMS, input_tokens=30, max_output_tokens=1000)
    forecasts.arrived("a", asked, TERMS)
    forecasts.take(News((("a", ramp()),), None))
    for generated in range(1, 161):
        asked.output_ids.append(generated % 7)
        forecasts.progressed("a", generated)
    forecasts.ended("a", asked)
    assert len(client.progress) == 3


def test_a_tokenizer_without_a_vocabulary_is_no_trouble(module: Any) -> None:
    assert module.token_classes(None) is None
    assert module.token_classes(SimpleNamespace(get_vocab=lambda: {"a": 0})) is not None


# Bursts -------------------------------------------------------------------------------------------


class Crowd:
    """Many requests that were forecast together."""

    def __init__(self, module: Any, count: int, classes: Any = None) -> None:
        self.limit = module.REFINEMENTS_PER_PASS
        self.frames, self.client = FrameManager(SchedulerConfig()), FakeClient()
        self.forecasts = module.Forecasts(self.frames, self.client, classes)
        self.reqs = {f"r{number}": req(f"r{number}") for number in range(count)}
        for key, asked in self.reqs.items():
            self.frames.arrive(key, TERMS, input_tokens=30, max_output_tokens=1000)
            self.forecasts.arrived(key, asked, TERMS)
        self.forecasts.take(News(tuple((key, ramp()) for key in self.reqs)))

    def num_refinements(self) -> int:
        count: int = self.forecasts.state()["num_refinements"]
        return count

    def passes(self, generated: int) -> int:
        """Refinements of a pass after which all have so many tokens."""
        before = self.num_refinements()
        self.forecasts.take(News())
        for key, asked in self.reqs.items():
            asked.output_ids = [1] * generated
            self.frames.progressed(key, generated)
            self.forecasts.progressed(key, generated)
        return self.num_refinements() - before

    def is_refined(self, key: str, generated: int) -> bool:
        request = self.frames.get(key)
        assert request is not None
        return float(self.frames.table.points[request.row].min()) >= generated


def test_requests_that_pass_a_mark_together_are_refined_a_few_in_each_pass(module: Any) -> None:
    crowd = Crowd(module, 100)
    counts = [crowd.passes(generated) for generated in range(50, 56)]
    assert counts == [crowd.limit] * (100 // crowd.limit) + [100 % crowd.limit, 0, 0]
    assert all(crowd.is_refined(key, 50) for key in crowd.reqs)


def test_without_another_step_nothing_more_is_refined(module: Any) -> None:
    crowd = Crowd(module, 100)
    assert crowd.passes(50) == crowd.limit
    before = crowd.num_refinements()
    for generated in (60, 100, 400):
        for key in crowd.reqs:
            crowd.forecasts.progressed(key, generated)
    assert crowd.num_refinements() == before
    crowd.forecasts.take(News())
    crowd.forecasts.progressed("r99", 400)
    assert crowd.num_refinements() == before + 1


def test_looking_at_what_was_generated_counts_as_refining_does(module: Any) -> None:
    crowd = Crowd(module, 100, np.zeros(8, dtype=np.uint8))
    # Each look at a mark takes the place of a refinement.
    assert crowd.passes(50) == crowd.limit // 2
    for _ in range(6):
        crowd.passes(60)
    assert all(crowd.is_refined(key, 50) for key in crowd.reqs)
    for key, asked in crowd.reqs.items():
        crowd.forecasts.ended(key, asked)
        assert len(crowd.client.progress) == 1


def test_forecasts_that_have_come_are_used_however_many_they_are(module: Any) -> None:
    # A scheduler takes in one message at a time, and these have waited long enough.
    crowd = Crowd(module, 100)
    assert crowd.num_refinements() == crowd.forecasts.state()["num_forecasts"] == 100


# What nobody can forecast or use ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_new_tokens", "is_asked"),
    [(0, False), (1, False), ("below", False), ("least", True), (100, True), (None, True)],
)
def test_an_answer_of_a_few_tokens_at_most_is_not_asked_about(
    module: Any, max_new_tokens: Any, *, is_asked: bool
) -> None:
    least = module.MIN_OPEN_TOKENS
    limit = {"below": least - 1, "least": least}.get(max_new_tokens, max_new_tokens)
    client = FakeClient()
    forecasts = module.Forecasts(FrameManager(SchedulerConfig()), client)
    asked = req(max_new_tokens=limit)
    forecasts.arrived("a", asked, TERMS)
    assert ("a" in client.asked) == is_asked
    forecasts.progressed("a", 1)
    forecasts.ended("a", asked)
    assert (len(client.endings) == 1) == is_asked


def test_greedy_sampling_is_told_as_no_temperature(module: Any) -> None:
    assert module.facts_of(req(top_k=1, temperature=1.0), TERMS).temperature == 0
    assert module.facts_of(req(top_k=2, temperature=1.0), TERMS).temperature == 1
    assert module.facts_of(req(top_k=-1, temperature=0.5), TERMS).temperature == 0.5


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1e30], ids=["nan", "infinite", "negative"])
def test_a_forecast_that_the_frame_manager_cannot_use_is_counted_and_harms_nothing(
    world: World, wrong: float
) -> None:
    own = world.known_points()
    world.hear(np.full(NUM_POINTS, wrong, dtype=np.float32))
    for generated in range(1, 200):
        world.generate(generated)
    state = world.forecasts.state()
    if wrong < 0:
        # Longer than all its points: what is left is guessed, and is a length.
        assert state["num_unusable"] == 0
    else:
        assert 0 < state["num_unusable"] < 10
        assert world.known_points() == own
    # A good one is used as if nothing had been.
    unusable = state["num_unusable"]
    world.hear(ramp())
    assert min(world.known_points()) >= 199
    assert max(world.known_points()) == pytest.approx(512, rel=0.03)
    assert world.forecasts.state()["num_unusable"] == unusable


def test_nothing_is_unusable_as_long_as_all_goes_well(world: World) -> None:
    world.hear(ramp())
    for generated in range(1, 600):
        world.generate(generated)
        world.forecasts.take(News())
    assert world.forecasts.state()["num_unusable"] == 0
