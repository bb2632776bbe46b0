"""Nothing starves: an explicit bound in frames, under a load that would starve it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from toy_engine import Job, ToyEngine

from core.slo import BestEffortSlo, DeadlineSlo, LatencySlo, RequestTerms, Slo
from scheduler.config import SchedulerConfig
from scheduler.frame import FrameManager
from scheduler.policies import POLICIES

STARVATION_FREE = [name for name, make in POLICIES.items() if make().traits.is_starvation_free]
FRAME_STEPS = 10
STARVATION_FRAMES = 30


def test_every_variant_of_gmax_has_the_bound() -> None:
    assert {name for name in POLICIES if name.startswith("gmax")} == set(STARVATION_FREE)


@given(
    policy=st.sampled_from(STARVATION_FREE),
    slo=st.sampled_from([BestEffortSlo(600.0), DeadlineSlo(0.05), LatencySlo(0.01, 0.001)]),
    num_passed_over=st.integers(1, 6),
    better=st.sampled_from([DeadlineSlo(60.0), DeadlineSlo(30.0)]),
    input_tokens=st.integers(1, 2000),
)
@settings(max_examples=15, deadline=None)
def test_the_oldest_passed_over_starts_within_the_bound(
    policy: str, slo: Slo, num_passed_over: int, better: Slo, input_tokens: int
) -> None:
    """Of the passed-over ones one for 64 places, here one, goes first at a time.

    So the k-th starts at most ``starvation_frames`` + k times one's frames after it came.
    """
    config = SchedulerConfig(
        policy=policy,
        frame_steps=FRAME_STEPS,
        frame_s=3600.0,
        starvation_frames=STARVATION_FRAMES,
    )
    engine = ToyEngine(FrameManager(config), max_batch=4, total_kv=50_000, total_slots=64)

    def one_step_later(index: int) -> None:
        # Twice what four places give, all of it worth more and in time.
        engine.arrive(Job(f"r{index}", RequestTerms(engine.now_s, better), 400, 8, 8))
        engine.step()

    for index in range(40):
        one_step_later(-1 - index)
    names = [f"passed over {index}" for index in range(num_passed_over)]
    for name in names:
        engine.arrive(Job(name, RequestTerms(engine.now_s, slo), input_tokens, FRAME_STEPS, 4096))
    frames_each = 3
    bound = STARVATION_FRAMES + num_passed_over * frames_each + 3
    for index in range(bound * FRAME_STEPS):
        one_step_later(index)
    started = [name for name in names if name in engine.ended or name in engine.running]
    assert started == names
