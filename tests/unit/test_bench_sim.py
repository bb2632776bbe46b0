"""The comparison in the simulator: its numbers, its memory, and a tiny grid end to end."""

import io
import json
import math

import msgspec
import pytest

from bench import sim
from bench.simulations import capacity, figures, pool, savings, tables, tasks
from bench.simulations.analysts import AnalystsOfRuns
from bench.simulations.capacity import Capacity, probe_of
from bench.simulations.cell import Cell, Engine, base_policy, cell_of, split_label
from bench.simulations.experiments import EXPERIMENTS
from bench.simulations.figures import figures_of, percentile
from bench.simulations.grid import Case, is_rival
from bench.simulations.options import Options
from bench.simulations.play import play
from bench.simulations.pool import Cache, Failed, run_all
from bench.simulations.progress import Progress
from bench.simulations.real import RealPrograms
from bench.simulations.statistics import interval, ratio
from bench.workloads import ClassShares, build, paper_spec
from core.clock import ManualClock
from core.slo import CompoundSlo
from engine.simulator.analysts import Pace
from engine.simulator.outcome import CallOutcome, EngineCounts, ProgramOutcome, SimResult
from engine.simulator.shape import EngineShape
from engine.simulator.steps import LinearSteps
from engine.simulator.workload import SimCall, SimProgram, SimStage
from scheduler.policies import gmax

TINY = paper_spec(2.0, 10.0, shares=ClassShares(compound=0))
COUNTS = EngineCounts(
    steps=10,
    busy_s=50.0,
    decode_tokens=9,
    prefill_tokens=30,
    cached_tokens=70,
    preemptions=1,
    parks=2,
    plans=3,
    mean_running=4.0,
)


# Statistics.


def test_an_interval_is_students():
    found = interval([1.0, 2.0, 3.0])
    # t(0.975, 2) = 4.3027, standard error 1/sqrt(3).
    assert found.mean == 2.0
    assert found.half == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)
    assert interval([5.0]) == (5.0, None)
    with pytest.raises(ValueError, match="at least one value"):
        interval([])


def test_ratios_are_paired_run_by_run():
    found = ratio([2.0, 30.0], [1.0, 10.0])
    assert found.mean == 2.5
    assert ratio([0.0], [0.0]).mean == 1.0
    assert ratio([1.0], [0.0]).text() == "inf"


def test_a_number_is_shown_with_its_uncertainty():
    assert interval([1.0, 2.0, 3.0]).text() == "2.00 ±2.5"
    assert interval([12345.0]).text() == "12345"
    assert interval([0.0]).text() == "0.00"


def test_a_percentile_is_a_nearest_rank_and_none_is_infinite():
    assert percentile([3.0, 1.0, 2.0, 4.0], 0.5) == 2.0
    assert percentile([3.0, 1.0, 2.0, 4.0], 0.95) == 4.0
    assert percentile([1.0, None, None], 0.3) == 1.0
    assert percentile([1.0, None, None], 0.5) is None
    assert percentile([], 0.5) is None


# Figures.


def _call(program, *, end="finished", arrival_s=0.0, first_s=1.0, end_s=3.0, tokens=11):
    return CallOutcome(
        program, 0, 0, end, None, arrival_s, first_s, first_s, end_s, 5, tokens, 0, 0.1, 0, 0, 0
    )


def _program(program, kind, *, arrival_s, end_s, complete=True, met=True, tokens=0, ttft_s=1.0):
    return ProgramOutcome(
        program, kind, "chatbot", arrival_s, end_s, complete, met, tokens, ttft_s, 0.0, 100
    )


def _result(programs, calls, **changes):
    result = SimResult(
        policy="gmax",
        workload="",
        window_s=120.0,
        end_s=200.0,
        programs=tuple(programs),
        calls=tuple(calls),
        replicas=(COUNTS,),
        tbt_edges_s=(0.1, 0.2, 0.3),
        tbt_counts=(5, 4, 0, 1),
    )
    return msgspec.structs.replace(result, **changes)


def test_figures_of_a_run_by_hand():
    programs = [
        _program(0, "latency", arrival_s=0.0, end_s=3.0, tokens=12),
        _program(1, "latency", arrival_s=70.0, end_s=200.0, complete=False, met=False, ttft_s=None),
        _program(2, "deadline", arrival_s=80.0, end_s=90.0, tokens=108, ttft_s=4.0),
        _program(3, "best_effort", arrival_s=80.0, end_s=81.0),
    ]
    calls = [
        _call(0),
        _call(1, end="dropped", arrival_s=70.0, first_s=None, end_s=72.5, tokens=0),
        # Half of its tokens after the first come after the window.
        _call(2, arrival_s=80.0, first_s=110.0, end_s=130.0, tokens=21),
        _call(3, arrival_s=80.0, first_s=81.0, end_s=81.0, tokens=1),
    ]
    found = figures_of(_result(programs, calls, plan_s=(0.001, 0.003)), {"ttft": 2000.0})
    assert found.token_goodput_per_s == 1.0
    assert found.request_goodput_per_s == 2 / 120
    assert found.attainment == pytest.approx(2 / 3)
    assert found.offered_tokens_per_s == 300 / 120
    assert found.throughput_per_s == (11 + 11 + 1) / 120
    assert (found.programs, found.calls) == (4, 4)
    assert found.classes["latency"].attainment == 0.5
    assert found.classes["latency"].ttft_p50_s == 1.0
    assert found.classes["latency"].ttft_p95_s is None
    assert found.classes["latency"].e2el_p95_s is None
    assert found.classes["deadline"].e2el_p95_s == 10.0
    assert (found.tbt_p50_s, found.tbt_p95_s) == (0.1, 0.3)
    assert (found.met_ttft_p95_s, found.accepted_ttft_p95_s) == (1.0, 1.0)
    assert (found.drops, found.drop_after_p50_s) == (1, 2.5)
    assert found.token_goodput_by_bin == (12 / 60, 108 / 60)
    assert found.request_goodput_by_bin == (1 / 60, 1 / 60)
    assert found.busy_fraction == 0.25
    assert (found.plan_p50_ms, found.plan_p99_ms) == (1.0, 3.0)
    assert found.by_flags.slo_attainment == 0.5
    again = msgspec.json.decode(msgspec.json.encode(found), type=figures.Figures)
    assert again == found


def test_every_figure_has_its_definition():
    known = {name for names in figures.DEFINITIONS for name in names.split(", ")}
    fields = {*figures.Figures.__struct_fields__, *figures.ClassFigures.__struct_fields__}
    explained_elsewhere = {"classes", "by_flags", "goodput_tokens_per_s"}
    for name in fields - known - explained_elsewhere:
        assert name in {"computed_prompt_tokens", "cached_prompt_tokens"}, name
    for experiment in EXPERIMENTS.values():
        assert experiment.paper
        assert experiment.title


# Labels and cells.


def test_a_label_is_a_policy_with_settings():
    assert split_label("ltr+cancel") == ("ltr+cancel", ())
    policy, settings = split_label("gmax:goodput=request:frame_steps=25:cutoff=0.8")
    assert policy == "gmax"
    assert settings == (("cutoff", 0.8), ("frame_steps", 25), ("goodput", "request"))


@pytest.mark.parametrize(
    ("label", "complaint"),
    [
        ("fifo", "policy must be one of"),
        ("gmax:frames=2", "a setting is FIELD=VALUE of SchedulerConfig, got 'frames=2'"),
        ("gmax:frame_steps", "a setting is FIELD=VALUE"),
        ("gmax:policy=fcfs", "a setting is FIELD=VALUE"),
        ("gmax:frame_steps=0", "frame_steps must be at least 1"),
    ],
)
def test_a_wrong_label_is_refused_with_a_reason(label, complaint):
    with pytest.raises(ValueError, match=complaint):
        split_label(label)


def test_policies_of_a_seed_have_the_same_workload_and_only_vllm_computes_prompts_first():
    case = Options(workload=TINY).case("1.5x", 1.5, 1.5)
    rate = Capacity(programs_per_s=2.0, calls_per_s=2.0, tokens_per_s=1.0, mean_running=1.0)
    cells = [case.cell(policy, 3, rate) for policy in ("gmax", "fcfs+cancel", "sarathi")]
    assert {cell.workload for cell in cells} == {msgspec.structs.replace(TINY, rate_per_s=3.0)}
    assert [cell.seed for cell in cells] == [3, 3, 3]
    assert [cell.engine.shape.mixes_chunks for cell in cells] == [True, False, True]
    assert build(cells[0].workload, 3) == build(cells[1].workload, 3)


def test_settings_are_gmaxs_alone_and_oracles_know_everything():
    case = Options(workload=TINY, settings=(("frame_steps", 20),)).case("1x", 1.0, 1.0)
    rate = Capacity(programs_per_s=2.0, calls_per_s=2.0, tokens_per_s=1.0, mean_running=1.0)
    assert case.cell("gmax", 1, rate).config.frame_steps == 20
    assert case.cell("gmax-paper", 1, rate).config.frame_steps == 50
    assert case.cell("gmax:frame_steps=30", 1, rate).config.frame_steps == 30
    assert case.cell("gmax-oracle", 1, rate).analyst == "known"
    assert case.cell("gmax", 1, rate).analyst == "noisy:0.6"


def test_rivals_are_others_with_fair_information():
    assert [is_rival(name) for name in ("ltr+cancel", "gmax-paper", "vtc")] == [True] * 3
    ours = ("gmax", "gmax:frame_steps=2", "gmax-no-jit", "gmax-oracle", "gmax-paper-oracle")
    assert not any(is_rival(name) for name in ours)
    assert base_policy("edf+cancel") == "edf"


def test_constants_of_a_study_are_put_back():
    before = gmax.CHANCE_POWER
    cell = cell_of("gmax:gmax.CHANCE_POWER=0.5:cutoff=0.5", TINY, 1, Engine(), "none")
    play(cell)
    assert before == gmax.CHANCE_POWER
    wrong = cell_of("gmax", TINY, 1, Engine(), "none", settings=(("gmax.NOTHING", 1.0),))
    with pytest.raises(ValueError, match=r"gmax\.NOTHING is no number"):
        play(wrong)


# Memory.


class Counted:
    """Stands for ``tasks.run``: a capacity that says how often it was asked."""

    def __init__(self):
        self.asked = []

    def __call__(self, task):
        self.asked.append(task)
        if task.programs == 13:
            raise ValueError("unlucky")
        return Capacity(
            programs_per_s=float(len(self.asked)), calls_per_s=1, tokens_per_s=1, mean_running=1
        )


def _probes(*sizes):
    return [probe_of(TINY, Engine(), size) for size in sizes]


def test_a_broken_off_grid_goes_on_where_it_was(tmp_path, monkeypatch):
    counted = Counted()
    monkeypatch.setattr(pool, "run", counted)
    path = tmp_path / "known" / "runs.jsonl"
    with pytest.raises(Failed, match=r"CapacityProbe.*unlucky"):
        run_all(_probes(1, 2, 13, 3), Cache(path), jobs=1)
    with path.open("ab") as file:
        file.write(b'{"key": "cut off in the mid')
    found = run_all(_probes(1, 2, 3), Cache(path), jobs=1)
    assert [task.programs for task in counted.asked] == [1, 2, 13, 3]
    assert [found[task].programs_per_s for task in _probes(1, 2, 3)] == [1.0, 2.0, 4.0]


def test_other_code_is_another_run_unless_any_will_do(tmp_path, monkeypatch):
    counted = Counted()
    monkeypatch.setattr(pool, "run", counted)
    path, probes = tmp_path / "runs.jsonl", _probes(1)
    run_all(probes, Cache(path), jobs=1)
    monkeypatch.setattr(pool, "code_of", lambda task: "changed since")
    kept = run_all(probes, Cache(path), jobs=1, any_code=lambda task: True)
    assert kept[probes[0]].programs_per_s == 1.0
    new = run_all(probes, Cache(path), jobs=1)
    assert new[probes[0]].programs_per_s == 2.0


def test_a_task_has_a_name_of_its_own():
    cells = [
        cell_of("gmax", TINY, 1, Engine(), "none"),
        cell_of("gmax", TINY, 2, Engine(), "none"),
        cell_of("sarathi", TINY, 1, Engine(), "none"),
        cell_of("gmax", TINY, 1, Engine(steps="llama-3.1-8b@a100"), "none"),
        cell_of("gmax", TINY, 1, Engine(), "none", replicas=2, dispatch="least-load"),
    ]
    assert len({tasks.key_of(cell) for cell in cells}) == len(cells)
    assert tasks.key_of(cells[0]) == tasks.key_of(cell_of("gmax", TINY, 1, Engine(), "none"))
    assert tasks.code_of(cells[0]) == tasks.code_of(cells[1])
    real = msgspec.structs.replace(cells[0], analyst="real")
    assert tasks.code_of(real) != tasks.code_of(cells[0])


def test_comments_and_docstrings_are_no_other_code(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "ROOT", tmp_path)
    file = tmp_path / "a.py"
    digests = []
    for text in (
        'def f():\n    """One."""\n    return 1\n',
        "def f():\n    # Two.\n    return 1\n",
    ):
        file.write_text(text)
        digests.append(tasks.digest.__wrapped__(("a.py",)))
    file.write_text("def f():\n    return 2\n")
    digests.append(tasks.digest.__wrapped__(("a.py",)))
    assert digests[0] == digests[1] != digests[2]


def test_processes_give_what_this_one_gives(tmp_path):
    cells = [cell_of(policy, TINY, 1, Engine(), "none") for policy in ("fcfs", "sarathi", "edf")]
    here = run_all(cells, Cache(None), jobs=1)
    there = run_all(cells, Cache(None), jobs=2)
    for cell in cells:
        one, two = (
            msgspec.structs.replace(found[cell], plan_p50_ms=0, plan_p99_ms=0)
            for found in (here, there)
        )
        assert one == two


def test_progress_is_told_in_plain_lines_where_nothing_can_be_written_over():
    out, clock = io.StringIO(), ManualClock()
    bar = Progress(out, "sim", clock)
    bar.begin(100.0, num_known=2)
    clock.advance(20.0)
    bar.done(10.0)
    clock.advance(40.0)
    bar.done(40.0)
    bar.end()
    assert out.getvalue().splitlines() == [
        "sim: 2 known already",
        "sim: 50 %, 2 runs in 1:00, 1:00 left",
    ]


# Capacity and savings.


def test_capacity_of_an_engine_that_can_be_reckoned(monkeypatch):
    # A step of 0.1 s whatever is in it, four at a time: 40 tokens a second.
    monkeypatch.setattr(capacity, "steps_of", lambda name: LinearSteps(constant_s=0.1))
    shape = EngineShape(max_batch=4, chunk_tokens=100_000)
    spec = paper_spec(1.0, shares=ClassShares(latency=0, compound=0))
    found = capacity.measure(probe_of(spec, Engine(shape=shape), 40))
    assert found.tokens_per_s == pytest.approx(40.0, rel=0.05)
    assert found.calls_per_s == pytest.approx(found.programs_per_s)
    assert found.mean_running > 3.5


def test_the_probe_is_of_the_mix_alone():
    fast = paper_spec(3.0, 100.0, slo_scale=2.0)
    slow = paper_spec(1.0, 50.0)
    assert probe_of(fast, Engine()) == probe_of(slow, Engine())
    assert probe_of(TINY, Engine()) != probe_of(slow, Engine())


def test_half_an_engine_is_saved_where_half_of_it_does_as_much():
    curve = [(0.5, 0.5), (1.0, 1.0), (2.0, 1.0), (4.0, 1.0)]
    assert savings.at(curve, 0.25) == 0.25
    assert savings.at(curve, 0.75) == 0.75
    assert savings.at(curve, 9.0) == 1.0
    assert savings.saved_fraction(curve, 0.5, demand=2.0) == pytest.approx(0.5)
    assert savings.saved_fraction(curve, 1.5, demand=2.0) == pytest.approx(-0.5)
    # At a quarter of an engine its load would be 8: beyond what is known.
    assert savings.saved_fraction(curve, 0.1, demand=2.0) == pytest.approx(0.5)


def test_the_load_up_to_which_most_is_met():
    curve = [(0.5, 1.0), (1.0, 0.95), (1.5, 0.85)]
    assert savings.load_at(curve, 0.9) == pytest.approx(1.25)
    assert savings.load_at(curve, 0.5) == 1.5
    assert savings.load_at([(1.0, 0.8)], 0.9) == 0.0


def test_quarters_of_a_window():
    assert tables.in_quarters([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]) == [1.5, 3.5, 5.5, 7.5]
    assert tables.in_quarters([1.0]) == [1.0] * 4


# The project's own analysts.


def test_the_real_matcher_foresees_what_it_has_seen():
    stages = tuple(
        SimStage(calls=(SimCall(input_tokens=50, output_tokens=tokens, role=role),), tool_s=1.0)
        for role, tokens in (("plan", 20), ("act", 200), ("write", 400))
    )
    analyst, pace = RealPrograms(), Pace(0.02, 1e-4)
    for index in range(5):
        arrival_s = 100.0 * index
        program = SimProgram(
            arrival_s=arrival_s,
            application="agent",
            slo=CompoundSlo(60.0, str(index)),
            stages=stages,
        )
        first = analyst.stage_began(index, program, 0, arrival_s, pace)
        assert (first is None) == (index == 0)
        between = analyst.stage_ended(index, program, 0, arrival_s + 1, pace)
        for stage in (1, 2):
            analyst.stage_began(index, program, stage, arrival_s + 2 * stage, pace)
            if stage == 1:
                analyst.stage_ended(index, program, stage, arrival_s + 3, pace)
        analyst.ended(index, program, is_complete=True)
    assert first.future_output_tokens == pytest.approx(600, rel=0.2)
    assert arrival_s < first.stage_due_s < arrival_s + 60.0
    assert between.next_call_s == pytest.approx(arrival_s + 2.0, abs=0.5)


def test_the_real_forest_learns_from_what_ends():
    found = play(cell_of("gmax", TINY, 1, Engine(), "real"))
    assert found.attainment > 0.5


def test_what_analysts_have_learnt_lasts_from_run_to_run():
    stages = tuple(
        SimStage(calls=(SimCall(input_tokens=50, output_tokens=tokens, role=role),))
        for role, tokens in (("plan", 20), ("write", 400))
    )
    analysts, pace = AnalystsOfRuns("real", 1), Pace(0.02, 1e-4)

    def run(num, *, ends):
        _, programs = analysts.of_next_run()
        for index in range(num):
            slo = CompoundSlo(60.0, str(index))
            program = SimProgram(arrival_s=5.0 * index, application="agent", slo=slo, stages=stages)
            first = programs.stage_began(index, program, 0, 5.0 * index, pace)
            if ends:
                programs.stage_ended(index, program, 0, 5.0 * index + 1, pace)
                programs.stage_began(index, program, 1, 5.0 * index + 1, pace)
                programs.ended(index, program, is_complete=True)
        return first, programs

    assert run(1, ends=False)[0] is None
    # The program that the first run left behind is no part of the second, whose index is the same.
    assert run(1, ends=True)[0] is None
    known, programs = run(1, ends=False)
    assert known.future_output_tokens == pytest.approx(400, rel=0.2)
    assert len(programs._tracker) == 1
    assert len(analysts.of_next_run()[1]._tracker) == 0


def test_only_what_learns_for_long_is_kept_between_runs():
    analysts = AnalystsOfRuns("noisy:0.6", 1)
    assert analysts.of_next_run()[1] is not analysts.of_next_run()[1]
    with pytest.raises(ValueError, match="analyst must be"):
        AnalystsOfRuns("psychic", 1)


# End to end.


@pytest.mark.parametrize("is_quick", [True, False])
@pytest.mark.parametrize("name", sorted(EXPERIMENTS))
def test_every_experiment_has_cases_with_names_of_their_own(name, is_quick):
    cases = EXPERIMENTS[name].cases(Options(is_quick=is_quick))
    assert len({case.name for case in cases}) == len(cases) > 0
    assert all(isinstance(case, Case) for case in cases)
    rate = Capacity(programs_per_s=2.0, calls_per_s=2.0, tokens_per_s=1.0, mean_running=1.0)
    for case in cases:
        for policy in EXPERIMENTS[name].policies:
            assert isinstance(case.cell(policy, 1, rate), Cell)
            assert case.cell(policy, 1, rate).config


def _main(tmp_path, *args):
    small = ["--window", "15", "--seeds", "2", "--probe", "20", "--jobs", "1"]
    kept = ["--cache", str(tmp_path / "c.jsonl"), "--json", str(tmp_path / "out.json")]
    assert sim.main([*args, *small, *kept, "--plots", str(tmp_path)]) == 0
    return json.loads((tmp_path / "out.json").read_text())


def test_a_tiny_grid_from_the_command_line(tmp_path, capsys):
    told = _main(
        tmp_path,
        *("table", "--loads", "1.5", "--policies", "gmax,sarathi,ltr+cancel,gmax-oracle"),
        *("--goodput", "ttft:2000", "tpot:100"),
    )
    summary = told["summary"]
    assert summary["seeds"] == 2
    assert summary["best_other_token"] in ("sarathi", "ltr+cancel")
    wanted = {"oracle_gap_fraction", "throughput_ratio_vs_sarathi", "upper_bound_share"}
    for level in ("token", "request"):
        names = ("sarathi", "ltr+cancel", "gmax-oracle", "best_other")
        wanted |= {f"{level}_goodput_ratio_vs_{name}" for name in names}
    assert wanted <= set(summary)
    assert 0 < summary["upper_bound_share"] <= 1
    assert len(told["runs"]) == 8
    out = capsys.readouterr().out
    for text in ("Paper: ", "Ours: ", "token_goodput_per_s: ", "slo_attainment: ", "capacity"):
        assert text in out
    assert (tmp_path / "table-token.svg").read_text().startswith("<svg")


def test_a_wrong_argument_is_one_line(tmp_path, capsys):
    assert sim.main(["--policies", "fifo", "--cache", str(tmp_path / "c")]) == 2
    assert "policy must be one of" in capsys.readouterr().err
    assert sim.main(["--set", "frames=2", "--cache", str(tmp_path / "c")]) == 2
    for name in ("oracle", "noisy", "noisy:much", "noisy:-1"):
        assert sim.main(["--analyst", name, "--cache", str(tmp_path / "c")]) == 2
        assert f"analyst must be noisy:SIGMA, known, none or real, got '{name}'" in (
            capsys.readouterr().err
        )
    assert sim.main(["--engine", "h100", "--cache", str(tmp_path / "c")]) == 2
    assert "engine must be" in capsys.readouterr().err
