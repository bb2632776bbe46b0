"""What ``bench storm`` and ``bench decode`` make of what they measured, and whose turn it is."""

import argparse

import pytest

from bench import decode, storm
from bench.answers import Answer
from bench.storm import Job, Outcome
from bench.turns import in_turn, median_ratio


def job(is_urgent=True, deadline_s=10.0):
    return Job(0.0, "text", 5, deadline_s, is_urgent)


def answer(took_s=5.0, ending="finished", start_s=2.0):
    return Answer(start_s, start_s + took_s, None, 100, 7, 0, ending)


def test_who_begins_moves_on_each_round():
    assert [in_turn("abc", number) for number in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]
    assert in_turn("abc", -1) == ["c", "a", "b"]
    assert in_turn([], 3) == []


def test_ratios_are_taken_round_by_round():
    assert median_ratio([2.0, 30.0, 4.0], [1.0, 10.0, 4.0]) == 2.0
    with pytest.raises(ValueError, match="shorter"):
        median_ratio([1.0, 2.0], [1.0])


@pytest.mark.parametrize(
    ("took_s", "ending", "is_met"),
    [(10.0, "finished", True), (10.1, "finished", False), (5.0, "cut", False)],
)
def test_an_answer_counts_whole_and_by_its_deadline(took_s, ending, is_met):
    assert storm.is_met(job(), answer(took_s, ending)) is is_met


def test_goodput_of_the_urgent_and_of_the_patient():
    rounds = [[job(), job(is_urgent=False)], [job(), job(is_urgent=False)]]
    played = [
        Outcome([answer(), answer(11.0)], {}),
        Outcome([answer(), answer()], {}),
    ]
    assert storm.goodput(rounds, played) == {"urgent": (2, 214), "patient": (1, 107)}
    slow = [Outcome([answer(20.0), answer()], {}), Outcome([answer(20.0), answer()], {})]
    summary = storm.summarise(rounds, {"swap": played, "stock": slow})
    assert summary == {
        "request_goodput_ratio_vs_stock": 1.5,
        "token_goodput_ratio_vs_stock": 1.5,
        "makespan_ratio_of_stock": round(44 / 20, 3),
    }


def storm_args(**changes):
    return argparse.Namespace(**{**vars(storm._parser().parse_args([])), **changes})


def test_a_storm_is_the_patient_at_once_and_bursts_while_they_run():
    args = storm_args(patient=3, bursts=2, burst=2, patience=2.0, haste=3.0)
    jobs = storm.make_jobs(args, (20.0, 4.0), seed=1)
    assert [(one.at_s, one.deadline_s) for one in jobs if not one.is_urgent] == [(0.0, 40.0)] * 3
    assert [(one.at_s, one.deadline_s) for one in jobs if one.is_urgent] == [
        (5.0, 12.0),
        (5.0, 12.0),
        (15.0, 12.0),
        (15.0, 12.0),
    ]
    assert len({one.prompt for one in jobs}) == len(jobs)
    assert jobs == storm.make_jobs(args, (20.0, 4.0), seed=1)


def test_the_pool_holds_the_patient_and_not_a_burst_beside_them():
    flags = storm._pool_flags(storm_args(patient=4, burst=2, prompt_tokens=900, patient_tokens=100))
    tokens = int(flags[flags.index("--max-total-tokens") + 1])
    assert 4 * (900 + 100) <= tokens < 4 * (900 + 100) + 900


def test_backends_are_compared_round_by_round():
    steps = {"16 x 64": {"torch_native": [0.2, 0.4, 0.9], "jitserve_cpu": [0.1, 0.1, 0.3]}}
    summary = decode._summary(["torch_native", "jitserve_cpu"], steps, {})
    assert summary == {"jitserve_cpu 16 x 64": 3.0}


def test_batches_that_spread_have_the_total_of_the_even_one():
    total = sum(decode.CASES["16 x 512"])
    assert sum(decode.CASES["8 x 64 + 8 x 960"]) == total
    assert abs(sum(decode.CASES["15 x 128 + 6,272"]) - total) <= 1
    assert set(decode.QUICK) <= set(decode.CASES)
