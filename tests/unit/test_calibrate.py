"""What ``bench calibrate`` makes of a served load: the replay, the figures, the keys."""

import math
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import msgspec
import pytest

from bench import calibrate, calibration, compound, pace, replay_served
from bench.answers import Answer
from bench.load import Offer, Result, Targets
from bench.replay import (
    TEMPLATE,
    Engine,
    Figures,
    binned,
    error,
    lengths_of,
    real_figures,
    replay,
    rows_of,
    simulated_figures,
    summarise,
    template_of,
)
from bench.simulations.analysts import analysts_of
from bench.step_load import Stream, by_kind, decode_rows
from core.slo import BestEffortSlo, CompoundSlo, DeadlineSlo, LatencySlo
from engine.simulator.measured import Measurement
from engine.simulator.shape import EngineShape
from engine.simulator.steps import LinearSteps, Step

TARGETS = Targets(1.0, ttft_s=2.0, tbt_s=0.2, deadline_s=10.0, tokens_per_s=100.0)
ENGINE = Engine(overhead_s=0.01)
LATE = Engine(overhead_s=0.01, late_tokens=1)


def answer(input_tokens=40, output_tokens=20, ending="finished", **more):
    fields = {"start_s": 1.0, "end_s": 3.0, "first_s": 1.5, "cached_tokens": 30, **more}
    return Answer(input_tokens=input_tokens, output_tokens=output_tokens, ending=ending, **fields)


def served(slo_type, *calls, start_s=1.0, met=True, goodput=60):
    whole = all(call.ending == "finished" for call in calls)
    output = sum(call.output_tokens for call in calls)
    ending = "finished" if whole else "dropped"
    return Result(slo_type, met, goodput, 0.5, 2.0, output, ending, start_s, calls)


def offer(slo_type="deadline", application=""):
    return Offer(1.0, slo_type, "Why?", 100, application=application)


def test_a_plain_request_is_replayed_with_its_own_counts_and_a_later_arrival():
    load = replay([offer()], [served("deadline", answer(50, 7))], [], TARGETS, 5.0, ENGINE)
    (program,) = load.workload.programs
    (call,) = program.stages[0].calls
    assert (call.input_tokens, call.output_tokens, call.max_output_tokens) == (50, 7, 100)
    assert program.arrival_s == pytest.approx(1.01)
    assert program.slo == DeadlineSlo(pytest.approx(9.99))
    assert (load.num_borrowed, load.num_guessed) == (0, 0)


def test_every_class_keeps_its_objective():
    offers = [offer("latency"), offer("deadline"), offer("best_effort"), offer("compound", "plan")]
    calls = [answer() for _ in range(4)]
    results = [served(one.slo_type, answer()) for one in offers[:3]] + [served("compound", *calls)]
    programs = replay(offers, results, [], TARGETS, 5.0, ENGINE).workload.programs
    kinds = [type(program.slo) for program in programs]
    assert kinds == [LatencySlo, DeadlineSlo, BestEffortSlo, CompoundSlo]
    assert programs[3].slo.deadline_s == pytest.approx(3 * 10.0 - 0.01)
    assert programs[3].application == "plan"
    assert [len(stage.calls) for stage in programs[3].stages] == [1, 2, 1]
    assert [stage.tool_s for stage in programs[3].stages] == [0.0, 0.01, 0.01]
    roles = [call.role for stage in programs[3].stages for call in stage.calls]
    assert roles == ["plan", "begin", "end", "title"]


def test_what_comes_a_step_late_has_a_token_more_that_is_due_when_the_one_before_is():
    load = replay([offer("latency")], [served("latency", answer())], [], TARGETS, 5.0, LATE)
    (program,) = load.workload.programs
    assert program.stages[0].calls[0].output_tokens == 21
    assert program.slo.target_ttft_s + program.slo.target_tbt_s == pytest.approx(1.99)


def test_lengths_that_are_not_known_here_are_those_of_another_run():
    mine, other = served("deadline", answer(0, 0, "dropped")), served("deadline", answer(50, 9))
    known = lengths_of(offer(), mine, [other])
    assert known.is_borrowed
    assert known.calls[0].output_tokens == 9
    load = replay([offer()], [mine], [[other]], TARGETS, 5.0, ENGINE)
    assert (load.num_borrowed, load.num_guessed) == (1, 0)


def test_lengths_that_nobody_knows_are_guessed_and_counted():
    partly = served("compound", answer(50, 9), answer(60, 0, "dropped"))
    load = replay([offer("compound", "two_views")], [partly], [], TARGETS, 5.0, ENGINE)
    assert load.num_guessed == 1
    calls = [call for stage in load.workload.programs[0].stages for call in stage.calls]
    assert [(call.input_tokens, call.output_tokens) for call in calls] == [(50, 9)] * 3
    nothing = served("deadline", answer(0, 0, "timeout"))
    assert replay([offer()], [nothing], [], TARGETS, 5.0, ENGINE).num_guessed == 1


def test_the_template_is_what_first_prompts_mostly_found_in_the_cache():
    run = [served("deadline", answer(cached_tokens=cached)) for cached in (0, 31, 31, 35)]
    assert template_of([run]) == 31
    assert template_of([[]]) == 0


def test_prompts_share_the_template_and_later_stages_their_first_one():
    calls = (answer(40, 20), answer(80, 20, cached_tokens=38))
    plain = [served("deadline", answer())] * 3
    load = replay(
        [offer("compound", "refine"), offer(), offer(), offer()],
        [served("compound", *calls), *plain],
        [],
        TARGETS,
        5.0,
        ENGINE,
    )
    program = next(one for one in load.workload.programs if one.application)
    first, second = (stage.calls[0] for stage in program.stages)
    assert (first.prefix, first.prefix_tokens) == (TEMPLATE, 30)
    assert first.leaves == second.prefix
    assert second.prefix_tokens == 38


def figures(tokens, **more):
    fields = {
        "request_goodput_per_s": 1.0,
        "attainment": {"latency": 0.5},
        "ttft_p50_s": 1.0,
        "ttft_p95_s": None,
        "tbt_p50_s": 0.1,
        "tbt_p95_s": 0.2,
        "output_tokens": 100,
        "end_s": 10.0,
        **more,
    }
    return Figures(token_goodput_per_s=tokens, **fields)


def test_summary_has_the_worst_error_and_whether_the_ranking_is_the_same():
    real = {"fcfs": figures(10.0), "edf": figures(20.0)}
    assert summarise(real, {"fcfs": figures(11.0), "edf": figures(19.0)}) == {
        "goodput_error_fraction_worst": 0.1,
        "same_ranking": 1.0,
    }
    swapped = summarise(
        real, {"fcfs": figures(21.0), "edf": figures(20.0), "x again": figures(1.0)}
    )
    assert swapped == {"goodput_error_fraction_worst": 1.1, "same_ranking": 0.0}


def test_errors_are_shares_of_the_real_figure():
    assert error(11.0, 10.0) == pytest.approx(0.1)
    assert error(None, 10.0) is None
    assert error(1.0, 0.0) is None
    assert error(0.0, 0.0) == 0.0


def test_rows_name_each_figure_once():
    rows = rows_of("edf", figures(10.0), figures(12.0))
    assert rows[0] == ["edf", "token goodput/s", 10.0, 12.0, "+20 %"]
    assert len({row[1] for row in rows}) == len(rows)
    assert next(row for row in rows if row[1] == "TTFT p95 s")[-1] == "-"


def test_real_figures_are_per_second_of_the_window_and_of_streams():
    stream = served("latency", answer(gaps_ms=(100, 100, 400)), goodput=20)
    late = served("deadline", answer(), met=False, goodput=0)
    found = real_figures([stream, late, served("best_effort", answer())], 10.0)
    assert found.token_goodput_per_s == pytest.approx(2.0)
    assert found.request_goodput_per_s == pytest.approx(0.1)
    assert found.attainment == {"latency": 1.0, "deadline": 0.0}
    assert found.tbt_p50_s == binned(0.1)
    assert found.tbt_p95_s == binned(0.4)


def test_the_same_load_simulated_gives_figures_without_the_extra_tokens():
    offers = [offer("latency"), offer("deadline"), offer("compound", "refine")]
    results = [served(one.slo_type, answer()) for one in offers[:2]]
    results.append(served("compound", answer(), answer()))
    steps = LinearSteps(constant_s=0.01, decode_s=0.001, prefill_s=0.001)
    shape = EngineShape(max_batch=4, kv_tokens=1000, chunk_tokens=256, mixes_chunks=False)
    for engine in (ENGINE, LATE):
        load = replay(offers, results, [], TARGETS, 5.0, engine)
        known = calibration.Known(shape, steps, engine, TARGETS, ())
        result = calibration.simulate(load.workload, "gmax", known, analysts_of("none", 1))
        found = simulated_figures(result, 5.0, engine)
        # 20 of the stream, 60 of the answer, 120 of the program.
        assert found.token_goodput_per_s == pytest.approx(200 / 5.0)
        assert found.output_tokens == 80
        assert set(found.attainment.values()) == {1.0}


def test_a_server_tells_its_shape():
    state = {"max_batch": 16, "total_kv_tokens": 500, "total_request_slots": 32}
    info = {"chunked_prefill_size": 1024, "disable_overlap_schedule": False}
    shape = calibrate.engine_shape(state, info)
    assert (shape.max_batch, shape.kv_tokens, shape.slots) == (16, 500, 32)
    assert (shape.chunk_tokens, shape.mixes_chunks) == (1024, False)
    whole = calibrate.engine_shape(state, {"chunked_prefill_size": -1, "max_prefill_tokens": 99})
    assert whole.chunk_tokens == 99


def test_decode_steps_are_seen_while_all_streams_decode():
    first = Stream(10, [0.1 * i for i in range(1, 20)])
    second = Stream(20, [0.1 * i for i in range(5, 24)])
    rows = decode_rows([first, second], window=4)
    assert rows
    for step, duration_s in rows:
        assert duration_s == pytest.approx(0.1)
        assert (step.num_decodes, step.prefill_tokens) == (2, 0)
        assert step.context_tokens + step.padding_tokens == 2 * max(
            step.context_tokens // 2, (step.context_tokens + step.padding_tokens) // 2
        )
    assert decode_rows([first, Stream(20, [5.0, 5.1])]) == []


def test_rows_are_told_apart_by_kind():
    rows = [Measurement(Step(1, 1, 0, 0), 0.1), Measurement(Step(0, 0, 0, 9), 0.1)]
    assert [(name, len(part)) for name, part in by_kind(rows)] == [("decodes", 1), ("prompts", 1)]


def test_bins_are_those_of_the_simulator():
    assert binned(None) == 0.0
    assert 0.1 <= binned(0.1) <= 0.113
    assert math.isfinite(binned(1e9))


def test_plans_of_programs_are_two_or_three_stages_of_one_or_two_calls():
    for stages in compound.APPLICATIONS.values():
        assert 2 <= len(stages) <= 3
        assert {len(stage) for stage in stages} <= {1, 2}


def test_a_run_of_serve_is_replayed_round_by_round(tmp_path, capsys):
    offers = [offer("latency"), offer("deadline"), offer("compound", "refine")]
    results = [served(one.slo_type, answer()) for one in offers[:2]]
    results.append(served("compound", answer(), answer()))
    run = {
        "targets": TARGETS,
        "seconds": 5.0,
        "offers": [offers, offers[:1]],
        "results": {"edf": [*results, results[0]], "gmax": [*results, results[0]]},
    }
    steps = LinearSteps(constant_s=0.01, decode_s=0.001)
    known = calibration.Known(EngineShape(kv_tokens=9000), steps, ENGINE, TARGETS, ())
    paths = {name: tmp_path / f"{name}.json" for name in ("served", "known", "out")}
    paths["served"].write_bytes(msgspec.json.encode(run))
    paths["known"].write_bytes(msgspec.json.encode({"known": known}))
    flags = ["--served", str(paths["served"]), "--known", str(paths["known"])]
    assert calibrate.main([*flags, "--analyst", "none", "--json", str(paths["out"])]) == 0
    summary = msgspec.json.decode(paths["out"].read_bytes())["summary"]
    assert set(summary) == {
        "goodput_error_fraction_worst",
        "same_ranking",
        "goodput_error_fraction_worst_round",
        "same_ranking_every_round",
    }
    text = capsys.readouterr().out
    assert all(name in text for name in ("edf #1", "edf #2", "gmax #2"))


def test_a_replay_of_a_run_needs_a_calibration(capsys):
    with pytest.raises(SystemExit):
        calibrate.main(["--served", "run.json"])
    assert "--known" in capsys.readouterr().err


def test_turns_rotate_as_serve_has_them():
    run = replay_served.Served(
        TARGETS, 5.0, [[], []], {"a": [], "b": [], "c": []}, paces={"a": [0.1, 0.2]}
    )
    assert [run.order(number) for number in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]
    assert (run.step_s("a", 1), run.step_s("a", 2), run.step_s("b", 0)) == (0.2, 0.0, 0.0)


def test_a_turn_on_a_slower_machine_is_simulated_with_slower_steps():
    steps = LinearSteps(constant_s=0.01, decode_s=0.002, context_s=1e-5, prefill_s=0.001)
    known = calibration.Known(
        EngineShape(kv_tokens=9000), steps, ENGINE, TARGETS, (0.02, 0.001, 1e-5, 0.0, 0.0)
    )
    reference_s = pace.reference_s(known.own_model_s)
    assert reference_s == pytest.approx(0.02 + 8 * 0.001 + 1200 * 1e-5)
    assert known.pace(1.5 * reference_s) == pytest.approx(1.5)
    assert known.pace(0.0) == 1.0
    load = replay([offer()], [served("deadline", answer())], [], TARGETS, 5.0, ENGINE)

    def busy_s(slower):
        none = analysts_of("none", 1)
        result = calibration.simulate(load.workload, "fcfs", known, none, slower)
        return result.replicas[0].busy_s

    assert busy_s(1.5) == pytest.approx(1.5 * busy_s(1.0))
    step = Step(3, 400, 20, 50, 90)
    assert steps.slower(1.5).seconds(step) == pytest.approx(1.5 * steps.seconds(step))


def test_no_pace_takes_the_machine_to_be_as_it_was(tmp_path, capsys):
    run = {
        "targets": TARGETS,
        "seconds": 5.0,
        "offers": [[offer()]],
        "results": {"edf": [served("deadline", answer())]},
        "paces": {"edf": [0.08]},
    }
    steps = LinearSteps(constant_s=0.01, decode_s=0.001)
    own = (0.04, 0.0, 0.0, 0.0, 0.0)
    known = calibration.Known(EngineShape(kv_tokens=9000), steps, ENGINE, TARGETS, own)
    paths = {name: tmp_path / f"{name}.json" for name in ("served", "known")}
    paths["served"].write_bytes(msgspec.json.encode(run))
    paths["known"].write_bytes(msgspec.json.encode({"known": known}))
    flags = ["--served", str(paths["served"]), "--known", str(paths["known"])]
    for more, said in (([], "2.000 times"), (["--no-pace"], "1.000 times")):
        assert calibrate.main([*flags, "--analyst", "none", *more]) == 0
        assert said in capsys.readouterr().out


class _Timer(BaseHTTPRequestHandler):
    """Fails the first time that it is asked."""

    asked = 0
    is_enough = threading.Event()

    def do_GET(self):
        type(self).asked += 1
        if self.asked >= 4:
            self.is_enough.set()
        body = b'{"step_time_coefficients_s": [0.01, 0.001, 0.0, 0.0, 0.0], "more": 1}'
        self.send_response(500 if self.asked == 1 else 200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def test_the_pace_is_watched_whatever_the_server_says():
    server = HTTPServer(("127.0.0.1", 0), _Timer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with pace.watched(f"http://127.0.0.1:{server.server_port}", every_s=0.01) as paces:
            assert _Timer.is_enough.wait(30)
    finally:
        server.shutdown()
        server.server_close()
    assert paces.median_s == pytest.approx(0.01 + 8 * 0.001)
    with pace.watched("http://127.0.0.1:9", every_s=10.0) as nobody:
        pass
    assert nobody.median_s == 0.0
