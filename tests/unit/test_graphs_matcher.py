"""Matching: scores that grow by a term, patterns that are pruned, and what is still to come."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from program_shapes import CODE_ERROR, PACE, Part, chain, packed, seconds_of, shape_of

from graphs.matcher import (
    FEW_PATTERNS_DOUBT,
    FORGETTING,
    MAX_PENALTY,
    MIN_OF_APPLICATION,
    ROLE_PENALTY,
    SIGMA_OCTAVES,
    TOOLS_PENALTY,
    TOP,
    Match,
    Remaining,
)
from graphs.patterns import PatternPack
from graphs.shape import ProgramShape, StageShape

NUMBERS = [name for name in Remaining.__struct_fields__ if name != "num_patterns"]


def followed(pack: PatternPack, *stages: StageShape, application: int = 0) -> Match:
    """A match after these stages are over."""
    match = Match(pack, application)
    for stage in stages:
        match.close_stage(stage)
    return match


def seen(match: Match, opened: StageShape | None = None) -> Remaining:
    found = match.outlook(PACE, opened)
    assert found is not None
    return found


def near(value: float) -> Any:
    """What a pack makes of a sum of numbers."""
    return pytest.approx(value, rel=2.5 * CODE_ERROR, abs=1e-3)


def opening(part: Part, num_arrived: int = 1) -> StageShape:
    """A stage of which so many calls have arrived and none has ended."""
    return StageShape(
        identity=part.model,
        role=part.role,
        num_calls=num_arrived,
        input_tokens=float(part.input_tokens * num_arrived),
        output_tokens=0.0,
        longest_tokens=0.0,
        tool_s=part.tool_s,
        tools=part.shape().tools,
    )


PLAN = Part((150,), 400)
WORK = Part((300, 100, 200), 1000, tool_s=2.0, model=8)
MERGE = Part((500,), 3000, tool_s=0.5)
TREE = (PLAN, WORK, MERGE)


@pytest.fixture
def tree() -> PatternPack:
    """One pattern whose numbers can be worked out by hand."""
    return packed(shape_of(*TREE))


# What is still to come ----------------------------------------------------------------------------


def test_before_anything_is_known_all_is_to_come(tree: PatternPack) -> None:
    found = seen(Match(tree))
    assert found.num_patterns == 1
    assert found.stages == pytest.approx(3)
    assert found.calls == near(5)
    assert found.input_tokens == near(400 + 3000 + 3000)
    assert found.output_tokens == near(150 + 600 + 500)
    assert found.longest_tokens == near(150 + 300 + 500)
    assert found.tool_s == near(2.5)
    assert found.later_s == near(sum(seconds_of(part.shape()) for part in TREE))
    assert found.stage_s == found.missing_calls == 0
    assert found.missing_input_tokens == found.missing_output_tokens == 0


def test_between_two_stages_those_after_are_to_come(tree: PatternPack) -> None:
    found = seen(followed(tree, PLAN.shape()))
    assert found.stages == pytest.approx(2)
    assert found.calls == near(4)
    assert found.input_tokens == near(3000 + 3000)
    assert found.output_tokens == near(600 + 500)
    assert found.longest_tokens == near(300 + 500)
    assert found.tool_s == near(2.5)
    assert found.next_tool_s == near(2.0)
    assert found.later_s == near(seconds_of(WORK.shape()) + seconds_of(MERGE.shape()))


@pytest.mark.parametrize("num_arrived", [1, 2, 3])
def test_of_an_open_stage_the_calls_that_have_not_arrived_are_missing(
    tree: PatternPack, num_arrived: int
) -> None:
    # The outlook's input is that of the stage's first call.
    opened = msgspec.structs.replace(opening(WORK, num_arrived), input_tokens=1000.0)
    found = seen(followed(tree, PLAN.shape()), opened)
    missing = 3 - num_arrived
    assert found.missing_calls == pytest.approx(missing, abs=0.15)
    assert found.missing_input_tokens == pytest.approx(1000 * missing, abs=250)
    assert found.missing_output_tokens == pytest.approx(200 * missing, abs=60)
    # The stage itself is not to come.
    assert found.stages == pytest.approx(1)
    assert found.calls == near(1)
    assert found.output_tokens == near(500)
    assert found.longest_tokens == near(500)
    assert found.tool_s == near(0.5)
    # The tools before it have run.
    assert found.stage_s == near(seconds_of(WORK.shape()) - 2.0)
    assert found.later_s == near(seconds_of(MERGE.shape()))


def test_more_calls_than_the_pattern_has_are_not_missing(tree: PatternPack) -> None:
    opened = msgspec.structs.replace(opening(WORK, 9), input_tokens=1000.0)
    found = seen(followed(tree, PLAN.shape()), opened)
    assert found.missing_calls == 0
    assert found.missing_input_tokens == found.missing_output_tokens == 0


def test_during_the_last_stage_nothing_is_to_come(tree: PatternPack) -> None:
    found = seen(followed(tree, PLAN.shape(), WORK.shape()), opening(MERGE))
    assert found.stage_s == near(seconds_of(MERGE.shape()) - 0.5)
    assert found.stages == found.later_s == found.calls == found.output_tokens == 0
    assert found.tool_s == found.missing_calls == found.next_tool_s == 0


def test_after_the_last_stage_nothing_is_to_come(tree: PatternPack) -> None:
    found = seen(followed(tree, *(part.shape() for part in TREE)))
    assert all(getattr(found, name) == 0 for name in NUMBERS)


def test_a_stage_more_than_any_pattern_has_fits_nothing(tree: PatternPack) -> None:
    match = followed(tree, *(part.shape() for part in TREE))
    assert match.outlook(PACE, opening(PLAN)) is None
    match.close_stage(PLAN.shape())
    assert len(match) == 0
    assert match.best() == -1
    assert match.outlook(PACE) is None
    match.close_stage(PLAN.shape())
    assert match.outlook(PACE, opening(PLAN)) is None


def test_an_empty_pack_fits_nothing() -> None:
    match = Match(PatternPack())
    assert len(match) == 0
    assert match.best() == -1
    assert match.outlook(PACE) is None
    assert match.outlook(PACE, opening(PLAN)) is None
    match.close_stage(PLAN.shape())
    assert match.best() == -1


def test_times_are_at_the_pace_that_is_asked_for(tree: PatternPack) -> None:
    slow = msgspec.structs.replace(PACE, step_s=10 * PACE.step_s)
    found = Match(tree).outlook(slow)
    assert found is not None
    assert found.later_s == near(sum(seconds_of(part.shape(), slow) for part in TREE))
    assert found.later_s > 5 * seen(Match(tree)).later_s


def test_patterns_that_fit_alike_count_alike() -> None:
    # The same first stage, then one more or three more.
    found = seen(followed(packed(chain(100, 200), chain(100, *[200] * 3)), *chain(100).stages))
    assert found.stages == pytest.approx(2)
    assert found.output_tokens == near(400)


def test_before_anything_is_known_patterns_count_by_how_often_they_were_seen() -> None:
    found = seen(Match(PatternPack([chain(100, 200), chain(100, *[200] * 3)], [3.0, 1.0])))
    assert found.stages == pytest.approx((3 * 2 + 1 * 4) / 4)


@pytest.mark.parametrize("num_over", [1, 2, 4])
def test_seen_often_counts_as_much_as_being_there_as_often(num_over: int) -> None:
    # Whether equal programs were merged into one pattern is no matter of theirs.
    often, once = chain(*[100] * 5), chain(*[100] * 9)
    merged = PatternPack([often, once], [30.0, 1.0])
    apart = packed(*[often] * 30, once)
    stages = often.stages[:num_over]
    expected = seen(followed(apart, *stages)).stages
    assert expected == pytest.approx((30 * (5 - num_over) + 9 - num_over) / 31)
    assert seen(followed(merged, *stages)).stages == pytest.approx(expected)


def test_the_tool_before_the_next_stage_is_that_of_those_that_have_a_next_stage() -> None:
    pack = packed(chain(100), shape_of(Part((100,)), Part((100,), tool_s=10.0)))
    found = seen(followed(pack, *chain(100).stages))
    assert found.stages == pytest.approx(0.5)
    assert found.next_tool_s == near(10)


def test_what_fits_better_counts_more() -> None:
    pack = packed(chain(100, 1000), chain(800, 10, 10, 10))
    expected = [seen(followed(pack, chain(tokens).stages[0])).stages for tokens in (100, 800)]
    assert expected[0] < 2 < expected[1]
    assert expected[0] >= 1
    assert expected[1] <= 3


def test_the_opening_of_a_stage_says_something_already() -> None:
    # After the same beginning one reads much and the other little.
    pack = packed(
        shape_of(Part(), Part((50,), 20_000), Part((50,))),
        shape_of(Part(), Part((900,), 100), *[Part((900,))] * 5),
    )
    match = followed(pack, Part().shape())
    assert seen(match, opening(Part(input_tokens=20_000))).output_tokens < 1000
    assert seen(match, opening(Part(input_tokens=100))).output_tokens > 2000
    # And asking has not changed the match.
    assert seen(match).stages == pytest.approx(4)


def test_many_patterns_are_a_mixture_of_the_likeliest() -> None:
    near_ones = [chain(100, 300) for _ in range(TOP)]
    far_ones = [chain(6000, *[300] * 9) for _ in range(5 * TOP)]
    found = seen(followed(packed(*near_ones, *far_ones), chain(100).stages[0]))
    assert found.num_patterns == 6 * TOP
    assert found.stages == pytest.approx(1, abs=0.01)


# Scores -------------------------------------------------------------------------------------------


def likeness(first: StageShape, second: StageShape) -> float:
    """Logarithm of the kernels' product, from the numbers themselves."""

    def attributes(stage: StageShape) -> np.ndarray:
        each = stage.input_tokens / stage.num_calls
        tool = stage.tool_s / 0.01
        values = [stage.num_calls, each, stage.output_tokens, stage.longest_tokens, tool]
        return np.log2(1 + np.array(values))

    octaves = attributes(first) - attributes(second)
    penalties = np.minimum(0.5 * (octaves / SIGMA_OCTAVES) ** 2, MAX_PENALTY)
    other_role = ROLE_PENALTY * (first.role != second.role)
    other_tools = TOOLS_PENALTY * (first.tools != second.tools)
    return -float(penalties.sum()) - other_role - other_tools


def from_scratch(pattern: ProgramShape, stages: tuple[StageShape, ...]) -> float:
    score = 0.0
    for mine, theirs in zip(stages, pattern.stages, strict=False):
        score = FORGETTING * score + likeness(mine, theirs)
    return score


def some_program(rng: np.random.Generator, num_stages: int) -> ProgramShape:
    parts = []
    for _ in range(num_stages):
        outputs = tuple(rng.integers(10, 2000, rng.integers(1, 6)).tolist())
        tool_s = float(rng.exponential(3)) * int(rng.integers(0, 2))
        role = int(rng.integers(1, 3))
        tools = (1, 2)[: int(rng.integers(0, 3))]
        input_tokens = int(rng.integers(50, 5000))
        parts.append(Part(outputs, input_tokens, tool_s=tool_s, role=role, tools=tools))
    return shape_of(*parts)


@pytest.mark.parametrize("seed", range(5))
def test_the_likeliest_pattern_is_that_of_the_scores_computed_anew(seed: int) -> None:
    rng = np.random.default_rng(seed)
    patterns = [some_program(rng, 6) for _ in range(60)]
    pack, match = packed(*patterns), None
    stages = some_program(rng, 6).stages
    match = Match(pack)
    for number in range(1, 6):
        match.close_stage(stages[number - 1])
        scores = [from_scratch(pattern, stages[:number]) for pattern in patterns]
        assert len(match) == 60
        # Codes are a tenth of an octave apart: what is so near the best may be the best.
        assert scores[match.best()] >= max(scores) - 0.35


def test_a_program_seen_before_is_recognised_at_once() -> None:
    rng = np.random.default_rng(1)
    patterns = [some_program(rng, 5) for _ in range(100)]
    pack = packed(*patterns)
    for index in range(0, 100, 7):
        match = followed(pack, *patterns[index].stages[:2])
        assert match.best() == index


def test_what_came_last_says_most() -> None:
    pack = packed(chain(100, 4000, 1), chain(4000, 100, 1))
    assert followed(pack, *chain(100, 100).stages).best() == 1
    assert followed(pack, *chain(4000, 4000).stages).best() == 0


def test_a_stage_later_the_score_is_that_of_a_match_from_the_beginning() -> None:
    rng = np.random.default_rng(2)
    patterns = [some_program(rng, int(rng.integers(2, 8))) for _ in range(80)]
    pack, stages = packed(*patterns), some_program(rng, 8).stages
    going = Match(pack)
    for number in range(8):
        # Whatever it is asked in between.
        going.outlook(PACE)
        going.outlook(PACE, stages[number])
        going.best()
        going.close_stage(stages[number])
        fresh = followed(pack, *stages[: number + 1])
        assert len(going) == len(fresh)
        assert going.best() == fresh.best()
        assert going.outlook(PACE) == fresh.outlook(PACE)
        assert going.outlook(PACE, stages[0]) == fresh.outlook(PACE, stages[0])


def test_of_what_fits_alike_what_was_seen_most_is_the_likeliest() -> None:
    pack = PatternPack([chain(100, 200), chain(100, 200, 300), chain(100, 200)], [1.0, 5.0, 2.0])
    assert Match(pack).best() == 1
    assert followed(pack, *chain(100, 200).stages).best() == 1


def test_patterns_that_are_added_meanwhile_are_no_trouble() -> None:
    pack = packed(*[chain(100, 200)] * 3)
    match = followed(pack, chain(100).stages[0])
    for number in range(500):
        pack.add(chain(100, 300 + number, 5), 1.0)
    assert 3 <= len(match) <= 503
    assert match.outlook(PACE) is not None
    match.close_stage(chain(200).stages[0])
    assert match.best() >= 0
    assert len(Match(pack)) == 503


# Pruning ------------------------------------------------------------------------------------------


def test_patterns_of_another_model_at_a_stage_are_pruned() -> None:
    pack = packed(
        *[shape_of(Part(), Part(model=8), Part())] * 3,
        *[shape_of(Part(), Part(model=9), *[Part()] * 8)] * 100,
    )
    match = followed(pack, Part().shape())
    assert len(match) == 103
    match.close_stage(Part(model=8).shape())
    assert len(match) == 3
    assert seen(match).num_patterns == 3
    assert seen(match).stages == pytest.approx(1)


def test_what_is_pruned_does_not_come_back() -> None:
    pack = packed(shape_of(Part(model=8), *[Part()] * 2), shape_of(Part(model=9), *[Part()] * 9))
    match = followed(pack, Part(model=8).shape(), Part().shape())
    assert len(match) == 1
    assert match.best() == 0
    assert seen(match).stages == pytest.approx(1)


def test_while_a_stage_is_open_another_model_counts_already() -> None:
    pack = packed(
        *[shape_of(Part(), Part(model=8), Part())] * 3,
        *[shape_of(Part(), Part(model=9), *[Part()] * 8)] * 3,
    )
    match = followed(pack, Part().shape())
    found = seen(match, opening(Part(model=8)))
    assert found.stages == pytest.approx(1)
    assert found.num_patterns == 3
    # It has not been pruned yet.
    assert seen(match, opening(Part(model=9))).stages == pytest.approx(8)


def test_patterns_that_end_before_this_stage_are_pruned() -> None:
    pack = packed(*[chain(100)] * 30, *[chain(100, 100)] * 30, *[chain(*[100] * 6)] * 3)
    match = followed(pack, chain(100).stages[0])
    assert len(match) == 63
    assert len(followed(pack, *chain(100, 100).stages)) == 33
    match = followed(pack, *chain(100, 100, 100).stages)
    assert len(match) == 3
    assert seen(match).stages == pytest.approx(3)


def test_a_model_that_no_pattern_has_prunes_none() -> None:
    pack = packed(*[chain(100, 200, 300)] * 100)
    match = followed(pack, Part(model=12345).shape())
    assert len(match) == 100
    assert seen(match).stages == pytest.approx(2)


def test_other_tools_at_a_stage_prune_nothing_and_count_less() -> None:
    pack = packed(
        *[shape_of(Part(), Part(tools=(1, 2)), Part())] * 10,
        *[shape_of(Part(), Part(tools=(1,)), *[Part()] * 8)] * 10,
    )
    found = {}
    for tools in ((2, 1), (1,), ()):
        match = followed(pack, Part().shape(), Part(tools=tools).shape())
        assert len(match) == 20
        found[tools] = seen(match).stages
    assert found[2, 1] < found[()] < found[1,]
    assert found[()] == pytest.approx(4.5)


def test_another_role_at_a_stage_prunes_nothing_and_counts_much_less() -> None:
    pack = packed(
        *[shape_of(Part(), Part(role=5), Part())] * 10,
        *[shape_of(Part(), Part(role=6), *[Part()] * 8)] * 10,
    )
    for role, expected in ((5, 1.0), (6, 8.0)):
        match = followed(pack, Part().shape(), Part(role=role).shape())
        assert len(match) == 20
        assert seen(match).stages == pytest.approx(expected, abs=0.6)
    untold = followed(pack, Part().shape(), Part().shape())
    assert seen(untold).stages == pytest.approx(4.5)


# Applications -------------------------------------------------------------------------------------


def of_two_applications(num_own: int) -> PatternPack:
    own = [chain(100, 200, 200, application=5)] * num_own
    return packed(*own, *[chain(100, *[200] * 9, application=6)] * 200)


def test_with_enough_patterns_of_its_own_application_only_those_count() -> None:
    pack = of_two_applications(MIN_OF_APPLICATION)
    match = Match(pack, application=5)
    assert len(match) == MIN_OF_APPLICATION
    assert seen(match).stages == pytest.approx(3)
    match.close_stage(chain(100).stages[0])
    assert seen(match).stages == pytest.approx(2)


def test_with_too_few_patterns_of_its_own_application_all_count() -> None:
    match = Match(of_two_applications(MIN_OF_APPLICATION - 1), application=5)
    assert len(match) == 200 + MIN_OF_APPLICATION - 1


@pytest.mark.parametrize("application", [0, 77])
def test_without_an_application_that_is_known_all_count(application: int) -> None:
    assert len(Match(of_two_applications(20), application)) == 220


# Whatever comes -----------------------------------------------------------------------------------

AMOUNTS = st.sampled_from([0.0, 1.0, 1e-9, 37.0, 5e4, 1e9, 1e15, 1e30])
STAGES = st.builds(
    StageShape,
    identity=st.integers(1, 3),
    role=st.integers(0, 2),
    num_calls=st.sampled_from([1, 2, 7, 3000]),
    tools=st.integers(0, 2),
    input_tokens=AMOUNTS,
    output_tokens=AMOUNTS,
    longest_tokens=AMOUNTS,
    tool_s=AMOUNTS,
)
SHAPES = st.builds(
    ProgramShape,
    application=st.integers(0, 2),
    stages=st.lists(STAGES, min_size=1, max_size=4).map(tuple),
)
WEIGHTS = st.sampled_from([0.0, 1e-30, 0.001, 1.0, 1e6])


@settings(max_examples=150)
@given(
    patterns=st.lists(st.tuples(SHAPES, WEIGHTS), max_size=8),
    copies=st.sampled_from([1, 5, 40]),
    stages=st.lists(STAGES, max_size=6),
    application=st.integers(0, 3),
)
def test_nothing_that_is_told_is_ever_below_zero_or_no_number(
    patterns: list[tuple[ProgramShape, float]],
    copies: int,
    stages: list[StageShape],
    application: int,
) -> None:
    shapes = [shape for shape, _ in patterns] * copies
    pack = PatternPack(shapes, [weight for _, weight in patterns] * copies)
    match = Match(pack, application)
    for stage in [*stages, None]:
        for opened in (None, stage):
            found = match.outlook(PACE, opened)
            if found is None:
                continue
            assert 0 < found.num_patterns <= len(pack)
            for name in NUMBERS:
                value = getattr(found, name)
                assert math.isfinite(value), name
                assert value >= 0, name
            assert found.longest_tokens <= max(found.output_tokens, found.longest_tokens)
        assert -1 <= match.best() < len(pack)
        assert (match.best() >= 0) == (len(match) > 0)
        if stage is not None:
            before = len(match)
            match.close_stage(stage)
            assert len(match) <= before


# How sure the rest is.


def test_the_doubt_is_how_far_the_patterns_are_apart() -> None:
    # Both fit alike after the first stage; what follows is 100 or 300 tokens long.
    pack = PatternPack([chain(50, 100), chain(50, 300)], [1000.0, 1000.0])
    found = seen(followed(pack, chain(50).stages[0]))
    assert found.longest_tokens == near(200)
    assert found.spread_tokens == pytest.approx(100, rel=0.06)


def test_one_program_seen_once_is_little_to_go_by_and_often_seen_it_is_certain() -> None:
    once = seen(followed(PatternPack([chain(50, 200)], [1.0]), chain(50).stages[0]))
    often = seen(followed(PatternPack([chain(50, 200)], [10_000.0]), chain(50).stages[0]))
    assert once.spread_tokens == pytest.approx(FEW_PATTERNS_DOUBT * 200, rel=0.06)
    assert often.spread_tokens == pytest.approx(0.005 * 200, rel=0.06)


def test_at_the_end_there_is_nothing_to_doubt() -> None:
    pack = packed(chain(50, 200))
    match = followed(pack, chain(50).stages[0])
    assert seen(match, opening(Part((200,)))).spread_tokens == 0.0
