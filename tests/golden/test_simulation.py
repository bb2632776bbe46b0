"""The simulator's runs are the same to the byte, here and in other processes."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from bench.simulations.cell import Engine, cell_of
from bench.simulations.play import simulate
from bench.workloads import Poisson, paper_spec
from engine.simulator.outcome import SimResult
from engine.simulator.shape import EngineShape

ROOT = Path(__file__).resolve().parents[2]
OVERLOAD = paper_spec(6.0, 10.0, slo_scale=0.3, arrivals=Poisson())
"""Four times what the engine can do, for a short while."""
SMALL = Engine(shape=EngineShape(kv_tokens=20_000, max_batch=32))
"""KV is short as well: requests are parked and preempted."""


def _run(policy: str, engine: Engine = SMALL, **more: object) -> SimResult:
    return simulate(cell_of(policy, OVERLOAD, 7, engine, "noisy:0.6", **more))


def _digest(result: SimResult) -> str:
    return hashlib.sha256(msgspec.msgpack.encode(result)).hexdigest()


@pytest.mark.parametrize("policy", ["gmax", "fcfs", "gmax-paper", "gmax-oracle"])
def test_a_run_is_the_same_to_the_byte(policy: str) -> None:
    assert _digest(_run(policy)) == _digest(_run(policy))


def test_several_engines_are_the_same_to_the_byte_too() -> None:
    more = {"replicas": 2, "dispatch": "power-of-2"}
    assert _digest(_run("gmax", **more)) == _digest(_run("gmax", **more))


def test_other_processes_with_other_hash_seeds_give_the_same_bytes() -> None:
    program = "import test_simulation as own; print(own._digest(own._run('gmax')))"
    folders = os.pathsep.join((str(ROOT), str(Path(__file__).parent)))
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": folders},
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert digests == {_digest(_run("gmax"))}


def test_the_engine_is_short_of_everything() -> None:
    counts = _run("gmax").replicas[0]
    assert counts.preemptions > 0
    assert counts.parks > 0


def test_gmax_beats_first_come_first_served_in_an_overload() -> None:
    ours, theirs = (_run(policy, Engine()).programs for policy in ("gmax", "fcfs"))
    assert sum(one.goodput_tokens for one in ours) > sum(one.goodput_tokens for one in theirs)
    assert sum(one.met for one in ours) > 1.2 * sum(one.met for one in theirs)
