"""What simulated schedulers are told, how good it is and when it comes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from simulated import DEADLINE, PROGRAM, STREAM, call, program, request, simulate, stage, workload

from core.slo import CompoundSlo, DeadlineSlo, RequestTerms
from engine.simulator.analysts import (
    KnownLengths,
    KnownPrograms,
    NoisyLengths,
    Pace,
    ProgramHabits,
    UnawareOfLengths,
    UnawareOfPrograms,
    ahead_of,
)
from engine.simulator.job import Job
from engine.simulator.shape import EngineShape
from engine.simulator.workload import SimProgram
from scheduler.frame import FrameManager

PACE = Pace(step_s=0.02, prefill_s=1e-4)


def job_of(asked: SimProgram, serial: int = 0) -> Job:
    only = asked.stages[0].calls[0]
    terms = RequestTerms(asked.arrival_s, asked.slo)
    return Job(serial, only, terms, program=serial, stage=0, place=0)


class Listening(UnawareOfLengths):
    """Says 50 tokens to everything and remembers what it was told."""

    def __init__(self, latency_s: float = 0.0, refine_every_tokens: int = 0) -> None:
        self.latency_s = latency_s
        self.refine_every_tokens = refine_every_tokens
        self.asked: list[int] = []
        self.marks: dict[int, list[int]] = {}
        self.over: list[tuple[int, int, bool]] = []

    def forecast(self, job: Job, program: SimProgram) -> Any:
        self.asked.append(job.serial)
        return np.array([50.0])

    def refined(self, job: Job, generated_tokens: int) -> Any:
        self.marks.setdefault(job.serial, []).append(generated_tokens)
        return np.array([60.0])

    def ended(self, job: Job, *, is_finished: bool) -> None:
        self.over.append((job.serial, job.generated, is_finished))


# Latency ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("latency_s", [0.0, 0.005, 0.3])
def test_a_forecast_comes_after_its_latency(latency_s: float) -> None:
    """The audit's clock stands at the last step that ended or began before."""
    run = simulate(
        workload(request(10, 200, slo=DeadlineSlo(9.0)), request(10, 90, at_s=0.1)),
        lengths=Listening(latency_s),
    )
    (_, first_s), (_, second_s) = run.forecasts
    step_s = 0.03
    assert latency_s - step_s <= first_s <= latency_s
    assert 0.1 + latency_s - step_s <= second_s <= 0.1 + latency_s


@pytest.mark.parametrize("latency_s", [0.0, 0.5])
def test_no_plan_knows_of_a_forecast_that_has_not_come(latency_s: float) -> None:
    """SJF puts the shorter one first once it is told, and in order of arrival before."""
    long, short = {"application": "long"}, {"application": "short"}

    class ByName(UnawareOfLengths):
        def forecast(self, job: Job, program: SimProgram) -> Any:
            return np.array([300.0 if program.application == "long" else 5.0])

    lengths = ByName()
    lengths.latency_s = latency_s
    run = simulate(
        workload(
            request(10, 20, slo=DeadlineSlo(60.0), **long),
            request(10, 20, slo=DeadlineSlo(60.0), **short),
        ),
        EngineShape(max_batch=1),
        policy="sjf",
        lengths=lengths,
    )
    first = min(run.result.calls, key=lambda row: row.first_token_s or 0.0)
    assert first.program == (1 if latency_s == 0 else 0)


def test_news_of_a_call_that_has_ended_changes_nothing() -> None:
    plain = simulate(workload(request(10, 5), request(10, 5, at_s=0.5)))
    late = simulate(
        workload(request(10, 5), request(10, 5, at_s=0.5)), lengths=Listening(latency_s=0.4)
    )
    assert len(late.forecasts) == 2
    assert late.result.calls == plain.result.calls


def test_news_of_a_call_that_has_ended_does_not_prolong_the_simulation() -> None:
    work = workload(request(10, 5, slo=DeadlineSlo(5.0)))
    late = simulate(work, lengths=Listening(latency_s=3.0))
    assert late.result.end_s == simulate(work).result.end_s


def test_every_call_is_forecast_and_reported_once() -> None:
    heard = Listening(refine_every_tokens=20)
    run = simulate(
        workload(
            request(10, 65),
            program(stage(call(10, 5), call(10, 30)), stage(call(900, 5)), at_s=0.5),
            request(10, 7, at_s=0.6),
        ),
        EngineShape(kv_tokens=800),
        lengths=heard,
    )
    fits = [row for row in run.result.calls if row.reason != "does_not_fit"]
    assert len(heard.asked) == len(set(heard.asked)) == len(fits) == 4
    assert len(heard.over) == len({serial for serial, _, _ in heard.over})
    over = sorted(item for item in heard.over if item[0] in heard.asked)
    assert over == [(0, 65, True), (1, 5, True), (2, 30, True), (3, 7, True)]
    assert heard.marks == {0: [20, 40, 60], 2: [20]}


def test_a_late_first_forecast_does_not_replace_a_newer_one() -> None:
    heard = Listening(latency_s=0.5, refine_every_tokens=20)
    run = simulate(workload(request(10, 90, slo=DEADLINE)), lengths=heard)
    assert heard.marks == {0: [20, 40, 60, 80]}
    assert len(run.forecasts) == 4


def test_who_is_never_to_ask_again_is_not_asked() -> None:
    heard = Listening(refine_every_tokens=0)
    simulate(workload(request(10, 65)), lengths=heard)
    assert heard.marks == {}


# Lengths ------------------------------------------------------------------------------------------


def _coverage(sigma: float) -> tuple[float, float]:
    """Share of answers within the 0.9 and the 0.5 quantile, after a warm-up of 400."""
    rng = np.random.default_rng(5)
    analyst = NoisyLengths(sigma, seed=3)
    high, middle = [], []
    for index in range(2400):
        role = ("a", "b")[index % 2]
        length = int(np.clip(np.exp(rng.normal(5.0 + (role == "b"), 0.8)), 8, 4096))
        job = job_of(request(10, length, call_fields={"role": role}), index)
        points = analyst.forecast(job, request(10, length, call_fields={"role": role}))
        assert np.all(np.diff(points) >= 0)
        if index >= 400:
            high.append(length <= np.quantile(points, 0.9))
            middle.append(length <= np.quantile(points, 0.5))
        job.generated = length
        analyst.ended(job, is_finished=True)
    return float(np.mean(high)), float(np.mean(middle))


@pytest.mark.parametrize("sigma", [0.1, 0.3, 1.0, 3.0, 30.0])
def test_a_noisy_forecaster_is_calibrated(sigma: float) -> None:
    high, middle = _coverage(sigma)
    assert high == pytest.approx(0.9, abs=0.025)
    assert middle == pytest.approx(0.5, abs=0.035)


def test_noise_widens_the_forecast() -> None:
    widths = []
    for sigma in (0.01, 0.1, 0.5, 2.0):
        points = NoisyLengths(sigma, 1).forecast(job_of(request(10, 300)), request(10, 300))
        widths.append(np.log(points[-1] / points[0]))
    assert widths == sorted(widths)
    assert widths[0] < 0.1


def test_without_noise_it_is_the_truth() -> None:
    analyst = NoisyLengths(0.0, seed=1)
    for index, length in enumerate([1, 2, 77, 4096, 77]):
        asked = request(10, length)
        job = job_of(asked, index)
        assert analyst.forecast(job, asked) == pytest.approx(length, rel=1e-9)
        job.generated = length
        analyst.ended(job, is_finished=True)


def test_no_forecast_is_above_the_limit_or_below_a_token() -> None:
    analyst = NoisyLengths(3.0, seed=1)
    for index in range(50):
        asked = request(10, 3, call_fields={"max_output_tokens": 20})
        points = analyst.forecast(job_of(asked, index), asked)
        assert points.min() >= 1
        assert points.max() <= 20


def test_what_did_not_finish_is_not_learnt() -> None:
    def last_points(is_finished: bool) -> Any:
        analyst = NoisyLengths(5.0, seed=1)
        for index in range(50):
            job = job_of(request(10, 4000), index)
            analyst.forecast(job, request(10, 4000))
            job.generated = 5
            analyst.ended(job, is_finished=is_finished)
        return np.median(analyst.forecast(job_of(request(10, 4000), 99), request(10, 4000)))

    assert last_points(is_finished=True) < 20 < last_points(is_finished=False)


def test_known_lengths_are_the_truth() -> None:
    assert KnownLengths().forecast(job_of(request(10, 33)), request(10, 33)).tolist() == [33.0]


def test_the_oracle_runs_the_shorter_one_first() -> None:
    run = simulate(
        workload(request(10, 90, slo=DeadlineSlo(60.0)), request(10, 10, slo=DeadlineSlo(60.0))),
        EngineShape(max_batch=1),
        policy="sjf",
        lengths=KnownLengths(),
    )
    assert run.call(1).end_s < (run.call(0).first_token_s or 0.0)


# Programs -----------------------------------------------------------------------------------------

STAGES = (
    stage(call(100, 10), call(50, 40), tool_s=0.0),
    stage(call(300, 20, prefix=1, prefix_tokens=120), call(80, 60), tool_s=2.0),
    stage(call(500, 30, prefix=2, prefix_tokens=400), tool_s=0.5),
)


def test_what_is_ahead_adds_up() -> None:
    ahead = ahead_of(STAGES[1:])
    assert ahead.stages == 2
    assert ahead.input_tokens == 300 + 80 + 500
    assert ahead.new_tokens == 180 + 80 + 100
    assert ahead.output_tokens == 20 + 60 + 30
    assert ahead.stage_tokens == 60 + 30
    assert ahead.tool_s == 2.5
    assert ahead.next_tool_s == 2.0
    assert ahead.next_input_tokens == 380
    assert set(ahead_of(())) == {0.0}


def test_known_programs_tell_the_true_rest() -> None:
    asked = program(*STAGES, at_s=3.0)
    outlook = KnownPrograms().stage_began(0, asked, 0, 3.0, PACE)
    assert outlook.future_input_tokens == 880
    assert outlook.future_new_tokens == 360
    assert outlook.future_output_tokens == 110
    assert outlook.future_stage_tokens == 90
    assert outlook.future_tool_s == 2.5
    last = KnownPrograms().stage_began(0, asked, 2, 9.0, PACE)
    assert last.future_output_tokens == last.future_tool_s == last.future_stage_tokens == 0
    assert last.stage_due_s == pytest.approx(63.0)


def test_known_programs_between_two_stages() -> None:
    asked = program(*STAGES, at_s=3.0)
    outlook = KnownPrograms().stage_ended(0, asked, 0, 5.0, PACE)
    assert outlook.next_call_s == 7.0
    assert outlook.next_input_tokens == 380
    assert outlook.future_input_tokens == 880
    assert outlook.future_output_tokens == 110
    assert outlook.future_stage_tokens == 90


def test_the_sub_deadline_shares_out_what_is_left() -> None:
    """docs/metrics.md: b + (D - b) t_s / t_rest, where nothing is prompts."""
    pace = Pace(step_s=0.02, prefill_s=0.0)
    asked = program(*STAGES, at_s=3.0)
    outlook = KnownPrograms().stage_began(0, asked, 0, 3.0, pace)
    live_s, later_s = 40 * 0.02, 90 * 0.02 + 2.5
    assert outlook.stage_due_s == pytest.approx(3.0 + 60 * live_s / (live_s + later_s))
    outlook = KnownPrograms().stage_began(0, asked, 1, 20.0, pace)
    live_s, later_s = 60 * 0.02, 30 * 0.02 + 0.5
    assert outlook.stage_due_s == pytest.approx(20.0 + 43 * live_s / (live_s + later_s))


def test_the_sub_deadline_counts_the_prompts_of_the_live_stage() -> None:
    """docs/metrics.md: the time of a stage has its new input in it."""
    asked = program(stage(call(10_000, 10)), stage(call(10_000, 10)))
    outlook = KnownPrograms().stage_began(0, asked, 0, 0.0, PACE)
    assert outlook.stage_due_s == pytest.approx(30.0)


def test_habits_of_programs_that_repeat_are_the_truth() -> None:
    habits, known = ProgramHabits(), KnownPrograms()
    asked = program(*STAGES, at_s=3.0)
    assert habits.stage_began(0, asked, 0, 3.0, PACE) is None
    for index in range(150):
        habits.ended(index, asked, is_complete=True)
        for number in range(3):
            foreseen = habits.stage_began(0, asked, number, 4.0, PACE)
            truth = known.stage_began(0, asked, number, 4.0, PACE)
            assert _figures(foreseen) == pytest.approx(_figures(truth), abs=1e-4)
        foreseen = habits.stage_ended(0, asked, 0, 4.0, PACE)
        truth = known.stage_ended(0, asked, 0, 4.0, PACE)
        assert _figures(foreseen) == pytest.approx(_figures(truth), abs=1e-4)


def _figures(outlook: Any) -> list[float]:
    assert outlook is not None
    return [getattr(outlook, name) or 0.0 for name in outlook.__struct_fields__]


def test_habits_of_one_application_say_nothing_of_another() -> None:
    habits = ProgramHabits()
    habits.ended(0, program(*STAGES), is_complete=True)
    other = program(*STAGES, application="other")
    assert habits.stage_began(1, other, 0, 0.0, PACE) is None


def test_habits_do_not_learn_from_what_failed() -> None:
    habits = ProgramHabits()
    habits.ended(0, program(*STAGES), is_complete=False)
    assert habits.stage_began(1, program(*STAGES), 0, 0.0, PACE) is None


def test_habits_are_means() -> None:
    habits = ProgramHabits()
    for output in (10, 30):
        asked = program(stage(call(1, 5)), stage(call(1, output), tool_s=1.0))
        habits.ended(0, asked, is_complete=True)
    outlook = habits.stage_began(1, program(*STAGES), 0, 0.0, PACE)
    assert outlook is not None
    assert outlook.future_output_tokens == pytest.approx(20, rel=0.02)
    assert outlook.future_tool_s == pytest.approx(1.0)


class Recording(UnawareOfPrograms):
    """What happens to programs, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, int]] = []

    def stage_began(
        self, index: int, program: SimProgram, stage: int, now_s: float, pace: Pace
    ) -> None:
        assert pace.step_s > 0
        assert pace.prefill_s >= 0
        self.events.append(("began", index, stage))

    def stage_ended(
        self, index: int, program: SimProgram, stage: int, now_s: float, pace: Pace
    ) -> None:
        self.events.append(("ended", index, stage))

    def ended(self, index: int, program: SimProgram, *, is_complete: bool) -> None:
        self.events.append(("complete" if is_complete else "failed", index, -1))


def test_what_is_told_of_a_program() -> None:
    heard = Recording()
    simulate(workload(program(*STAGES)), programs=heard)
    assert heard.events == [
        ("began", 0, 0),
        ("ended", 0, 0),
        ("began", 0, 1),
        ("ended", 0, 1),
        ("began", 0, 2),
        ("complete", 0, -1),
    ]


def test_requests_are_no_programs() -> None:
    heard = Recording()
    simulate(workload(request(10, 5, slo=STREAM)), programs=heard)
    assert heard.events == []


def test_a_program_that_does_not_fit_is_over_last_of_all() -> None:
    heard = Recording()
    simulate(
        workload(program(stage(call(900, 5)), slo=PROGRAM)),
        EngineShape(kv_tokens=500),
        programs=heard,
    )
    assert heard.events == [("began", 0, 0), ("failed", 0, -1)]


def test_news_of_a_stage_that_is_over_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[float] = []
    inner = FrameManager.expect

    def expect(self: Any, tenant: str, program_id: str, outlook: Any) -> None:
        if outlook is not None:
            told.append(outlook.future_input_tokens)
        inner(self, tenant, program_id, outlook)

    monkeypatch.setattr(FrameManager, "expect", expect)
    slow = KnownPrograms()
    slow.latency_s = 1.0
    quick = program(stage(call(10, 2)), stage(call(20, 2)), stage(call(30, 200)), slo=PROGRAM)
    simulate(workload(quick), programs=slow)
    assert told == [0.0]


def test_a_call_has_its_own_role() -> None:
    roles: list[tuple[str, str]] = []

    class Roles(UnawareOfLengths):
        def forecast(self, job: Job, program: SimProgram) -> None:
            assert isinstance(job.terms.slo, CompoundSlo)
            roles.append((job.call.role, job.terms.slo.node))

    asked = program(stage(call(10, 5, role="plan"), call(10, 5, role="search")))
    simulate(workload(asked), lengths=Roles())
    assert roles == [("plan", "plan"), ("search", "search")]


def test_a_deadline_is_the_programs_own() -> None:
    """Every call's terms end when the program is due."""
    seen: list[float] = []

    class Terms(UnawareOfLengths):
        def forecast(self, job: Job, program: SimProgram) -> None:
            slo = job.terms.slo
            assert isinstance(slo, CompoundSlo)
            assert slo.program_id == "0"
            seen.append(job.terms.arrival_s + slo.deadline_s)

    simulate(workload(program(*STAGES, at_s=1.0)), lengths=Terms())
    assert seen == pytest.approx([61.0] * 5)
