"""Many pattern graphs as a few arrays: near the truth, small, and added to, never changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from program_shapes import CODE_ERROR, MODEL, Part, chain, packed, shape_of

from graphs.patterns import (
    ATTRIBUTES,
    CALLS,
    INPUT,
    LONGEST,
    NEW,
    OUTPUT,
    TOOL,
    UNKNOWN,
    Names,
    PatternPack,
    codes_of,
    values_of,
)
from graphs.shape import ProgramShape, StageShape

if TYPE_CHECKING:
    from graphs.patterns import Coded

STAGE = StageShape(1, 0, 1, 100.0, 100.0, 100.0, 1.0)
COUNTS = st.integers(1, 2000)
TOKENS = st.floats(0, 1e6) | st.integers(0, 1_000_000).map(float)
STAGES = st.builds(
    StageShape,
    identity=st.integers(1, 6),
    role=st.integers(0, 3),
    num_calls=COUNTS,
    input_tokens=TOKENS,
    output_tokens=TOKENS,
    longest_tokens=TOKENS,
    tool_s=st.floats(0, 1e5),
    tools=st.integers(0, 2),
)
SHAPES = st.builds(
    ProgramShape,
    application=st.integers(0, 2),
    stages=st.lists(STAGES, min_size=1, max_size=6).map(tuple),
)

ARRAYS = ("offsets", "application", "tenant", "weight", "identity", "role", "tools", "codes")


def there_and_back(stage: StageShape) -> dict[str, float]:
    """The attributes of a stage after a pack has had them."""
    values = values_of(codes_of(stage).reshape(6, 1))[:, 0]
    names = ("num_calls", "input", "output", "longest", "tool_s", "new")
    return dict(zip(names, values.tolist(), strict=True))


def same(first: Coded, second: Coded) -> bool:
    return (
        first.identity.tolist() == second.identity.tolist()
        and first.role.tolist() == second.role.tolist()
        and first.tools.tolist() == second.tools.tolist()
        and first.codes.tolist() == second.codes.tolist()
        and first.application == second.application
    )


# Codes --------------------------------------------------------------------------------------------


@given(STAGES)
def test_what_is_coded_is_near_the_truth(stage: StageShape) -> None:
    found = there_and_back(stage)
    # In units of one call, one token and ten milliseconds.
    assert found["num_calls"] == pytest.approx(stage.num_calls, rel=CODE_ERROR, abs=CODE_ERROR)
    for name, value in (("output", stage.output_tokens), ("longest", stage.longest_tokens)):
        assert found[name] == pytest.approx(value, rel=CODE_ERROR, abs=2 * CODE_ERROR)
    assert abs(found["tool_s"] - stage.tool_s) <= CODE_ERROR * (stage.tool_s + 0.01)


@given(st.integers(1, 1), st.integers(0, 1_000_000))
def test_the_input_is_that_of_all_calls(num_calls: int, tokens: int) -> None:
    stage = msgspec.structs.replace(STAGE, num_calls=num_calls, input_tokens=float(tokens))
    assert there_and_back(stage)["input"] == pytest.approx(tokens, rel=CODE_ERROR, abs=0.08)


@given(st.integers(1, 500), st.integers(0, 20_000))
def test_the_input_of_several_calls_is_near_the_truth_too(num_calls: int, each: int) -> None:
    stage = msgspec.structs.replace(
        STAGE, num_calls=num_calls, input_tokens=float(num_calls * each)
    )
    found = there_and_back(stage)
    expected = num_calls * each
    # The errors of the count and of the input of one call.
    assert found["input"] == pytest.approx(expected, rel=2.1 * CODE_ERROR, abs=0.08 * num_calls)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 7, 10, 50, 100, 1000, 8192, 131_072, 1_000_000])
def test_every_number_of_tokens_is_within_its_error(tokens: int) -> None:
    stage = msgspec.structs.replace(STAGE, output_tokens=float(tokens))
    assert there_and_back(stage)["output"] == pytest.approx(tokens, rel=CODE_ERROR)


def test_nothing_is_nothing() -> None:
    found = there_and_back(StageShape(1, 0, 1, 0.0, 0.0, 0.0, 0.0))
    assert found == {"num_calls": 1, "input": 0, "output": 0, "longest": 0, "tool_s": 0, "new": 0}


def test_more_is_never_less() -> None:
    for attribute, field in ((OUTPUT, "output_tokens"), (LONGEST, "longest_tokens")):
        codes = [
            codes_of(msgspec.structs.replace(STAGE, **{field: value}))[attribute]
            for value in np.geomspace(1, 1e12, 300)
        ]
        assert codes == sorted(codes)
        assert len(set(codes)) > 100


@pytest.mark.parametrize("huge", [1e9, 1e15, 1e30, 1e300])
def test_what_is_beyond_all_measure_is_the_most_that_there_is(huge: float) -> None:
    found = there_and_back(StageShape(1, 0, 1, huge, huge, huge, huge))
    assert np.isfinite(list(found.values())).all()
    assert found["output"] > 1e7
    assert found["tool_s"] > 1e5


def test_the_codes_are_in_the_order_that_is_said() -> None:
    assert len(ATTRIBUTES) == 6
    assert [ATTRIBUTES[place] for place in (CALLS, OUTPUT, LONGEST, TOOL)] == [
        "num_calls",
        "output_tokens",
        "longest_tokens",
        "tool_s",
    ]
    for place, changes in (
        (CALLS, {"num_calls": 4, "input_tokens": 400.0, "new_tokens": 400.0}),
        (INPUT, {"input_tokens": 900.0, "new_tokens": 100.0}),
        (NEW, {"new_tokens": 20.0}),
        (OUTPUT, {"output_tokens": 900.0}),
        (LONGEST, {"longest_tokens": 900.0}),
        (TOOL, {"tool_s": 50.0}),
    ):
        changed = codes_of(msgspec.structs.replace(STAGE, **changes)) != codes_of(STAGE)
        assert np.flatnonzero(changed).tolist() == [place]


# Names --------------------------------------------------------------------------------------------


def test_a_name_has_one_index_and_keeps_it() -> None:
    names = Names()
    first, second = names.enter(1 << 62), names.enter(5)
    assert len({first, second, UNKNOWN}) == 3
    assert names.enter(1 << 62) == names.get(1 << 62) == first
    assert names.get(5) == second


def test_what_was_never_entered_is_unknown_and_so_is_nothing() -> None:
    names = Names()
    assert names.get(5) == UNKNOWN
    assert names.get(5) == UNKNOWN
    assert names.enter(0) == names.get(0) == UNKNOWN
    assert names.enter(6) != UNKNOWN


def test_of_very_many_names_the_new_ones_are_unknown() -> None:
    names = Names()
    found = [names.enter(name) for name in range(1, 70_000)]
    assert max(found) < 1 << 16
    assert names.enter(10**9) == names.get(10**9) == UNKNOWN
    assert names.get(1) == found[0] != UNKNOWN
    known = [index for index in found if index != UNKNOWN]
    assert len(set(known)) == len(known) > 60_000


# The pack -----------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(st.lists(SHAPES, min_size=1, max_size=12))
def test_each_pattern_is_what_was_put_in(shapes: list[ProgramShape]) -> None:
    pack = PatternPack(shapes, [float(number + 1) for number in range(len(shapes))])
    assert len(pack) == len(shapes)
    assert pack.weight.tolist() == [number + 1 for number in range(len(shapes))]
    num_stages = [len(shape.stages) for shape in shapes]
    assert np.diff(pack.offsets.astype(int)).tolist() == num_stages
    assert pack.codes.shape == (6, sum(num_stages))
    for index, shape in enumerate(shapes):
        found = pack.at(index)
        assert same(found, pack.encode(shape))
        start, end = (int(place) for place in pack.offsets[index : index + 2])
        assert found.codes.tolist() == pack.codes[:, start:end].tolist()
        assert found.identity.tolist() == pack.identity[start:end].tolist()
        assert found.application == pack.application[index]
        for place, stage in enumerate(shape.stages):
            assert found.identity[place] == pack.identities.get(stage.identity) != UNKNOWN
            assert found.role[place] == pack.roles.get(stage.role)
            assert found.tools[place] == pack.toolsets.get(stage.tools)
            assert found.codes[:, place].tolist() == codes_of(stage).tolist()


@settings(max_examples=30)
@given(st.lists(SHAPES, min_size=1, max_size=12))
def test_one_by_one_or_all_at_once_is_the_same(shapes: list[ProgramShape]) -> None:
    at_once, one_by_one = PatternPack(shapes, [2.0] * len(shapes)), PatternPack()
    for index, shape in enumerate(shapes):
        assert one_by_one.add(shape, 2.0) == index
    for name in (
        "offsets",
        "application",
        "tenant",
        "weight",
        "identity",
        "role",
        "tools",
        "codes",
    ):
        assert getattr(one_by_one, name).tolist() == getattr(at_once, name).tolist()
    assert one_by_one.num_bytes == at_once.num_bytes


def test_what_is_added_changes_nothing_that_was_there() -> None:
    pack = packed(chain(100, 200), chain(300))
    before = [pack.at(index) for index in range(2)]
    copies = [pack.encode(chain(100, 200)), pack.encode(chain(300))]
    pack.weight[0] = 17.0
    for number in range(2000):
        assert pack.add(chain(number + 1, 7, application=number), 1.0) == number + 2
    assert len(pack) == 2002
    assert pack.weight[0] == 17
    for index in range(2):
        assert same(before[index], copies[index])
        assert same(pack.at(index), pack.encode(chain(*((100, 200), (300,))[index])))


def test_a_weight_may_be_written_to() -> None:
    pack = PatternPack([chain(1), chain(2)], [1.0, 2.0])
    pack.weight[:] *= 0.5
    assert pack.weight.tolist() == [0.5, 1.0]


def test_a_program_that_is_not_in_the_pack_is_told_in_its_terms() -> None:
    pack = packed(shape_of(Part(role=3), application=5))
    found = pack.encode(shape_of(Part(model=99, role=4), Part(role=3), application=6))
    assert found.identity[1] == pack.identity[0] == pack.identities.get(MODEL)
    assert found.role[1] == pack.role[0]
    assert found.identity[0] not in pack.identity
    assert found.role[0] not in pack.role
    assert found.application not in pack.application
    assert len(pack) == 1
    assert pack.offsets.tolist() == [0, 1]


@pytest.mark.parametrize("use", ["add", "encode", "make"])
def test_a_program_without_a_stage_is_no_pattern(use: str) -> None:
    pack, empty = packed(chain(1)), ProgramShape(0, ())
    calls: dict[str, Any] = {
        "add": lambda: pack.add(empty, 1.0),
        "encode": lambda: pack.encode(empty),
        "make": lambda: PatternPack([empty], [1.0]),
    }
    with pytest.raises(ValueError, match=r"."):
        calls[use]()
    assert len(pack) == 1
    pack.add(chain(2), 1.0)
    assert len(pack) == 2


def test_an_empty_pack_has_no_patterns() -> None:
    pack = PatternPack()
    assert len(pack) == 0
    assert pack.offsets.tolist() == [0]
    assert pack.codes.shape == (6, 0)


# Size ---------------------------------------------------------------------------------------------


def real_ones() -> list[ProgramShape]:
    """Programs of the sizes of real ones: agents, trees of thought, research, chats with tools."""
    rng = np.random.default_rng(0)
    shapes = []
    for _ in range(100):
        shapes.append(shape_of(*[Part((40,) * 50)] * 8))
        shapes.append(shape_of(Part((200,) * 5), Part((5,) * 5), Part((400,) * 5), Part((5,) * 5)))
        shapes += [chain(*rng.integers(20, 200, rng.integers(5, 24)).tolist()) for _ in range(2)]
    shapes += [chain(*rng.integers(50, 900, 33).tolist()) for _ in range(25)]
    shapes += [chain(*rng.integers(20, 300, 22).tolist()) for _ in range(20)]
    shapes += [chain(*rng.integers(20, 2000, 9).tolist()) for _ in range(9)]
    return shapes


def test_a_pattern_of_a_real_program_is_at_most_a_fifth_of_a_kilobyte() -> None:
    shapes = real_ones()
    pack = packed(*shapes)
    assert pack.num_bytes / len(shapes) <= 200
    # A program of fifteen stages is, too.
    assert packed(chain(*[100] * 15)).num_bytes <= 200


def test_the_bytes_are_those_of_the_arrays_and_no_spare_ones() -> None:
    pack = packed(*real_ones())
    held = sum(getattr(pack, name).nbytes for name in ARRAYS)
    assert pack.num_bytes == held
    num_stages = int(pack.offsets[-1])
    assert held <= 12 * num_stages + 12 * len(pack) + 4
