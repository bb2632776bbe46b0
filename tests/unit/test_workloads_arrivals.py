"""Arrival processes and trace files."""

import gzip
import json

import numpy as np
import pytest

from bench.workloads import traces
from bench.workloads.arrivals import (
    AzureLike,
    Gamma,
    Poisson,
    ServeGenArrivals,
    Surge,
    TraceArrivals,
    draw,
)
from bench.workloads.command import burstiness

WINDOW_S = 2000.0


def drawn(spec, rate=5.0, window_s=WINDOW_S, seed=3):
    return draw(spec, rate, window_s, np.random.default_rng(seed))


@pytest.fixture
def azure(tmp_path):
    """Ten bursts of ten requests: a burst lasts 0.9 s, the next begins 10 s after it began."""
    path = tmp_path / "azure.csv"
    lines = [
        f"{burst * 10 + place / 10},{100 + place},{place}"
        for burst in range(10)
        for place in range(10)
    ]
    path.write_text("\n".join(["arrival_s,input_tokens,output_tokens", *lines]) + "\n")
    return path


@pytest.fixture
def mooncake(tmp_path):
    path = tmp_path / "mooncake.jsonl.gz"
    rows = [
        {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]},
        {"timestamp": 0, "input_length": 700, "output_length": 6, "hash_ids": [3, 4]},
        {"timestamp": 3000, "input_length": 1500, "output_length": 7, "hash_ids": [1, 2, 5]},
        {"timestamp": 6000, "input_length": 1300, "output_length": 8, "hash_ids": [1, 2, 5]},
        {"timestamp": 6000, "input_length": 100, "output_length": 9, "hash_ids": [1, 2, 5]},
    ]
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


@pytest.fixture
def servegen(tmp_path):
    path = tmp_path / "clients.json.gz"
    lengths = {"0": {"input_tokens": [10, 20], "output_tokens": [30]}}
    clients = [
        {
            "windows": [[0, 20.0, 1.0, "Gamma", 1.0, 9.9], [600, 60.0, 3.0, "Gamma", 0.11, 0.2]],
            "lengths": lengths,
        },
        {"windows": [[0, 10.0, 2.0, "Weibull", 0.5, 0.05]], "lengths": lengths},
    ]
    with gzip.open(path, "wt") as file:
        json.dump({"pool": {"window_s": 600, "clients": clients}}, file)
    return path


@pytest.mark.parametrize("spec", [Poisson(), Gamma(cv=2.0), AzureLike()])
def test_the_mean_rate_is_the_wanted_one(spec):
    times = drawn(spec)
    assert len(times) == pytest.approx(5.0 * WINDOW_S, rel=0.06)


@pytest.mark.parametrize("spec", [Poisson(), Gamma(), AzureLike(), Surge()])
@pytest.mark.parametrize("rate", [0.001, 3.0])
def test_arrivals_are_in_order_and_in_the_window(spec, rate):
    times = drawn(spec, rate, 7.3)
    assert list(times) == sorted(times)
    assert all(0 <= at_s < 7.3 for at_s in times)


def test_poisson_gaps_are_as_long_as_they_vary():
    assert burstiness(drawn(Poisson()), WINDOW_S)["gap_cv"] == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("cv", [0.5, 3.0])
def test_gamma_gaps_have_their_cv(cv):
    assert burstiness(drawn(Gamma(cv=cv)), WINDOW_S)["gap_cv"] == pytest.approx(cv, rel=0.1)


def test_like_azure_is_as_bursty_as_azure():
    measured = [burstiness(drawn(AzureLike(), 5.53, 3500.0, seed), 3500.0) for seed in range(8)]
    mean = {name: np.mean([one[name] for one in measured]) for name in measured[0]}
    assert mean["gap_cv"] == pytest.approx(1.09, rel=0.05)
    assert mean["dispersion_1s"] == pytest.approx(1.38, rel=0.1)
    assert mean["dispersion_10s"] == pytest.approx(3.86, rel=0.2)
    assert mean["dispersion_60s"] == pytest.approx(16.1, rel=0.35)


def test_a_surge_is_five_times_as_fast_for_its_part_of_the_window():
    times = drawn(Surge(start=0.4, length=0.1))
    within = (times >= 0.4 * WINDOW_S) & (times < 0.5 * WINDOW_S)
    assert within.sum() == pytest.approx(5 * 5.0 * 0.1 * WINDOW_S, rel=0.05)
    assert (~within).sum() == pytest.approx(5.0 * 0.9 * WINDOW_S, rel=0.05)


def test_a_surge_ends_within_the_window():
    with pytest.raises(ValueError, match="within the window"):
        Surge(start=0.95, length=0.1)


def test_a_cv_is_above_zero():
    with pytest.raises(ValueError, match="cv"):
        Gamma(cv=0.0)


@pytest.mark.parametrize("num", [7, 100, 777])
def test_a_trace_is_cut_or_told_again_to_have_the_wanted_rate(azure, num):
    times = drawn(TraceArrivals(path=str(azure)), num / 50.0, 50.0)
    assert len(times) == num


def test_bursts_of_a_trace_keep_their_size(azure):
    times = drawn(TraceArrivals(path=str(azure)), 100 / 50.0, 50.0)
    gaps = np.diff(times)
    assert (gaps > 10 * np.median(gaps)).sum() in (9, 10)


def test_requests_of_one_step_of_mooncake_are_spread_over_it(mooncake):
    assert traces.read(mooncake).arrival_s.tolist() == [0.0, 1.5, 3.0, 6.0, 7.5]


def test_equal_blocks_of_mooncake_are_a_prefix_of_the_first_that_had_them(mooncake):
    found = [(one.prefix, one.prefix_tokens) for one in traces.read(mooncake).requests]
    assert found == [(0, 0), (0, 0), (1, 1024), (3, 1300), (3, 100)]


def test_a_trace_of_simultaneous_arrivals_is_refused(tmp_path):
    path = tmp_path / "flat.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n1,2,3\n1,2,3\n")
    with pytest.raises(ValueError, match="at once"):
        traces.read(path)


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ("x,1,2", "float"),
        ("3.0,1", "int"),
        ("3.0,-1,2", "0 or more"),
        ("nan,1,2", "number of seconds"),
        ("1.0,1,2", "above"),
    ],
)
def test_a_broken_row_is_named(tmp_path, row, what):
    path = tmp_path / "broken.csv"
    path.write_text(f"arrival_s,input_tokens,output_tokens\n2.0,1,2\n{row}\n4.0,1,2\n")
    with pytest.raises(ValueError, match=rf"broken\.csv, line 3: .*{what}"):
        traces.read(path)


def test_a_broken_line_of_mooncake_is_named(tmp_path):
    path = tmp_path / "broken.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": []}\n{\n')
    with pytest.raises(ValueError, match=r"broken\.jsonl, line 2: "):
        traces.read(path)


def test_a_torn_archive_is_named(mooncake):
    mooncake.write_bytes(mooncake.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"mooncake\.jsonl\.gz"):
        traces.read(mooncake)


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "trace.txt"
    path.write_text("")
    with pytest.raises(ValueError, match=r"\.csv, \.jsonl"):
        traces.read(path)


def test_servegen_rates_are_scaled_and_keep_their_proportions(servegen):
    spec = ServeGenArrivals(path=str(servegen), pool="pool")
    times = drawn(spec, 10.0, 1200.0)
    assert len(times) == pytest.approx(12_000, rel=0.06)
    # 30 requests a second in the first ten minutes, 60 in the second.
    assert (times < 600).sum() == pytest.approx(4_000, rel=0.06)


def test_servegen_days_follow_each_other(servegen):
    spec = ServeGenArrivals(path=str(servegen), pool="pool", start_s=86_400.0 - 600.0)
    times = drawn(spec, 10.0, 1200.0)
    assert times.min() >= 600.0


def test_a_part_of_the_day_in_which_nobody_sends_is_refused(servegen):
    spec = ServeGenArrivals(path=str(servegen), pool="pool", start_s=50_000.0)
    with pytest.raises(ValueError, match="no client"):
        drawn(spec, 10.0, 600.0)


@pytest.mark.parametrize(
    ("window", "what"), [([0, 1.0, 1.0, "Normal", 1.0, 1.0], "Weibull"), ([0, 1.0], "unpack")]
)
def test_a_broken_client_of_servegen_is_named(tmp_path, window, what):
    path = tmp_path / "clients.json"
    client = {"windows": [window], "lengths": {"0": {"input_tokens": [1], "output_tokens": [1]}}}
    path.write_text(json.dumps({"pool": {"window_s": 600, "clients": [client]}}))
    with pytest.raises(ValueError, match=rf"clients\.json, pool pool, client 0: .*{what}"):
        traces.read_servegen(path, "pool")


def test_a_pool_that_servegen_lacks_is_named(servegen):
    with pytest.raises(ValueError, match="other"):
        traces.read_servegen(servegen, "other")
