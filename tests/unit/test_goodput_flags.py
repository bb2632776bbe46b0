import argparse

import pytest

from bench import goodput
from bench.goodput import Timing, evaluate, parse


def test_targets_are_milliseconds_by_metric():
    assert parse(["ttft:2000", "tpot:100.5", "e2el:2e4"]) == {
        "ttft": 2000.0,
        "tpot": 100.5,
        "e2el": 20000.0,
    }
    assert parse([]) == {}


@pytest.mark.parametrize(
    ("pairs", "complaint"),
    [
        (["ttft"], "expected KEY:VALUE, such as ttft:2000, got 'ttft'"),
        (["itl:5"], "KEY must be one of ttft, tpot, e2el, got 'itl:5'"),
        (["TTFT:5"], "KEY must be one of"),
        (["tpot:fast"], "VALUE must be a number of milliseconds, got 'tpot:fast'"),
        (["tpot:"], "VALUE must be a number of milliseconds, got 'tpot:'"),
        (["e2el:0"], "above 0, got 'e2el:0'"),
        (["e2el:-1"], "above 0"),
        (["e2el:nan"], "above 0"),
        (["e2el:inf"], "above 0"),
        (["ttft:1", "ttft:2"], "ttft is given twice, with 'ttft:2'"),
    ],
)
def test_what_is_no_target_is_refused_with_its_text(pairs, complaint):
    with pytest.raises(ValueError, match=complaint.replace("(", r"\(")):
        parse(pairs)


def test_the_flag_complains_as_argparse_does(capsys):
    parser = argparse.ArgumentParser()
    goodput.add_argument(parser)
    assert parser.parse_args([]).goodput == []
    assert parser.parse_args(["--goodput", "ttft:1", "tpot:2"]).goodput == ["ttft:1", "tpot:2"]
    with pytest.raises(SystemExit):
        parser.parse_args(["--goodput", "itl:5"])
    assert "KEY must be one of ttft, tpot, e2el" in capsys.readouterr().err


def test_time_per_token_leaves_the_first_one_out():
    assert Timing(1.0, 3.0, 5).tpot_s == 0.5
    assert Timing(1.0, 1.0, 1).tpot_s == 0.0
    assert Timing(None, 1.0, 0).tpot_s == 0.0


def test_a_good_request_meets_every_target_and_each_metric_is_counted_by_itself():
    calls = [
        Timing(0.1, 1.1, 11),  # meets all: 100, 100, 1100 ms
        Timing(0.3, 1.3, 11),  # first token late
        Timing(0.1, 2.1, 11),  # tokens slow, and so the whole
        Timing(0.1, 0.2, 11, is_complete=False),
        Timing(None, 5.0, 0, is_complete=False),
    ]
    found = evaluate(calls, {"ttft": 200.0, "tpot": 150.0, "e2el": 2000.0}, 10.0, goodput_tokens=50)
    assert found.request_goodput == 0.1
    assert found.slo_attainment == 0.2
    assert found.slo_attainment_by_metric == {"ttft": 0.4, "tpot": 0.4, "e2el": 0.4}
    assert found.token_goodput == 5.0
    assert found.goodput_slos_ms == {"ttft": 200.0, "tpot": 150.0, "e2el": 2000.0}


def test_a_target_is_met_when_it_is_reached_exactly():
    found = evaluate([Timing(0.25, 1.0, 2)], {"ttft": 250.0}, 1.0, goodput_tokens=0)
    assert found.slo_attainment == 1.0


def test_of_no_calls_nothing_is_good():
    found = evaluate([], {"ttft": 1.0}, 1.0, goodput_tokens=0)
    assert (found.request_goodput, found.slo_attainment) == (0.0, 0.0)
    assert found.slo_attainment_by_metric == {"ttft": 0.0}
    with pytest.raises(ValueError, match="duration above 0"):
        evaluate([], {}, 0.0, goodput_tokens=0)


def test_every_field_has_its_definition():
    assert set(goodput.Goodput.__struct_fields__) == set(goodput.DEFINITIONS)
