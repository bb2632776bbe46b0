"""Same inputs, same plans, byte for byte: also in another process with other hash seeds."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from toy_engine import Job, ToyEngine

from core.slo import BestEffortSlo, CompoundSlo, DeadlineSlo, LatencySlo, RequestTerms, Slo
from scheduler.config import SchedulerConfig
from scheduler.frame import FrameManager
from scheduler.policies import CANCEL_SUFFIX, POLICIES

ROOT = Path(__file__).parents[2]


def plans_digest(policy: str) -> str:
    """A hash over every plan of a run with all kinds of requests."""
    rng = random.Random(5)
    config = SchedulerConfig(policy=policy, frame_steps=10, frame_s=0.2, fairness=0.1)
    engine = ToyEngine(FrameManager(config), max_batch=4, total_kv=1500, total_slots=10)
    digest = hashlib.sha256()
    for index in range(300):
        if index % 3 == 0:
            slo: Slo = rng.choice(
                (
                    LatencySlo(1.0, 0.05),
                    DeadlineSlo(4.0),
                    CompoundSlo(8.0, f"p{index // 9}"),
                    BestEffortSlo(600.0),
                )
            )
            terms = RequestTerms(engine.now_s, slo, tenant=rng.choice("abc"))
            engine.arrive(Job(f"r{index}", terms, rng.randrange(5, 300), rng.randrange(1, 60), 80))
        plan = engine.step()
        digest.update(msgspec.json.encode(plan))
    return digest.hexdigest()


@pytest.mark.parametrize("policy", [n for n in POLICIES if not n.endswith(CANCEL_SUFFIX)])
def test_a_second_run_makes_the_same_plans(policy: str) -> None:
    assert plans_digest(policy) == plans_digest(policy)


def test_another_process_makes_the_same_plans() -> None:
    here = plans_digest("gmax")
    code = "import test_determinism as t; print(t.plans_digest('gmax'))"
    for seed in ("1", "2"):
        paths = (ROOT, ROOT / "tests/support", ROOT / "tests/golden")
        path = os.pathsep.join(str(part) for part in paths)
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": path}
        found = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
        )
        assert found.stdout.strip() == here
