"""Parents inferred from prompts: who begins with an earlier prompt and holds its answer."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs.links import BLOCK_TOKENS, MAX_BLOCKS, MAX_CALLS, PrefixLinks, prefix_hashes

TOKENS = st.integers(0, 150_000)


def text(seed: int, length: int) -> list[int]:
    """Tokens of some text."""
    rng = random.Random(seed)
    return [rng.randrange(50_000) for _ in range(length)]


def arrive(links: PrefixLinks, node: int, tokens: list[int]) -> tuple[int, ...]:
    return links.arrived(node, prefix_hashes(tokens), len(tokens))


SYSTEM = text(0, 3 * BLOCK_TOKENS + 5)
ANSWER = text(1, 40)


# Numbers for prefixes -----------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, BLOCK_TOKENS - 1, BLOCK_TOKENS, 5 * BLOCK_TOKENS + 3])
def test_there_is_a_number_for_each_whole_block(length: int) -> None:
    assert prefix_hashes(text(5, length)).shape == (length // BLOCK_TOKENS,)


def test_of_a_very_long_prompt_the_rest_is_not_looked_at() -> None:
    most = MAX_BLOCKS * BLOCK_TOKENS
    long = text(5, most + 500)
    assert prefix_hashes(long).shape == (MAX_BLOCKS,)
    assert (prefix_hashes(long) == prefix_hashes(long[:most])).all()


@settings(max_examples=50)
@given(st.lists(TOKENS, max_size=130), st.lists(TOKENS, max_size=70))
def test_a_longer_prompt_s_numbers_begin_with_the_shorter_one_s(
    tokens: list[int], more: list[int]
) -> None:
    short, long = prefix_hashes(tokens), prefix_hashes(tokens + more)
    assert (long[: len(short)] == short).all()


@settings(max_examples=50)
@given(st.lists(TOKENS, min_size=BLOCK_TOKENS, max_size=130), st.data())
def test_another_token_changes_every_number_from_its_block_on(
    tokens: list[int], data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(tokens) - 1))
    changed = tokens.copy()
    changed[place] += data.draw(st.integers(1, 1000))
    before, after = prefix_hashes(tokens), prefix_hashes(changed)
    first = place // BLOCK_TOKENS
    assert (before[:first] == after[:first]).all()
    assert (before[first:] != after[first:]).all()


def test_the_order_of_tokens_counts() -> None:
    tokens = text(5, 2 * BLOCK_TOKENS)
    swapped = [*tokens[1::-1], *tokens[2:]]
    assert (prefix_hashes(tokens) != prefix_hashes(swapped)).all()
    blocks = tokens[BLOCK_TOKENS:] + tokens[:BLOCK_TOKENS]
    assert (prefix_hashes(tokens) != prefix_hashes(blocks)).all()


def test_the_same_token_again_and_again_has_its_own_number_at_each_length() -> None:
    for token in (0, 1, 2, 150_000):
        found = prefix_hashes([token] * (10 * BLOCK_TOKENS))
        assert len(set(found.tolist())) == 10


# Links --------------------------------------------------------------------------------------------


def test_a_prompt_with_an_earlier_prompt_and_its_answer_continues_it() -> None:
    links = PrefixLinks()
    assert arrive(links, 1, SYSTEM) == ()
    links.ended(1, len(ANSWER))
    assert arrive(links, 2, SYSTEM + ANSWER + text(2, 10)) == (1,)


def test_the_same_prompt_again_continues_nothing() -> None:
    links = PrefixLinks()
    arrive(links, 1, SYSTEM)
    links.ended(1, 10)
    assert arrive(links, 2, SYSTEM) == ()


def test_a_prompt_too_short_for_the_answer_continues_nothing() -> None:
    links = PrefixLinks()
    arrive(links, 1, SYSTEM)
    links.ended(1, 100)
    assert arrive(links, 2, SYSTEM + text(2, 40)) == ()


def test_a_prompt_must_be_longer_than_what_it_continues() -> None:
    links = PrefixLinks()
    arrive(links, 1, SYSTEM)
    links.ended(1, len(ANSWER))
    assert arrive(links, 2, SYSTEM + ANSWER) == ()
    assert arrive(links, 3, [*SYSTEM, *ANSWER, 5]) == (1,)


def test_a_prompt_that_begins_otherwise_continues_nothing() -> None:
    links = PrefixLinks()
    arrive(links, 1, SYSTEM)
    links.ended(1, 10)
    assert arrive(links, 2, text(3, 10) + SYSTEM + ANSWER) == ()


def test_nothing_continues_a_call_that_still_runs() -> None:
    # Its answer cannot be in any prompt: this one only shares its beginning.
    links = PrefixLinks()
    arrive(links, 1, SYSTEM)
    assert arrive(links, 2, SYSTEM + ANSWER) == ()


def test_calls_side_by_side_on_one_few_shot_prompt_continue_nothing() -> None:
    # The questions are all that differs, in less than a block.
    links = PrefixLinks()
    for node in range(20):
        question = text(100 + node, 3 + node)
        assert arrive(links, node, SYSTEM + question) == ()


def test_the_longest_prompt_that_it_begins_with_counts() -> None:
    links = PrefixLinks()
    second = SYSTEM + ANSWER + text(2, 70)
    third = second + text(3, 50)
    arrive(links, 1, SYSTEM)
    links.ended(1, len(ANSWER))
    assert arrive(links, 2, second) == (1,)
    links.ended(2, 40)
    assert arrive(links, 3, third) == (2,)
    links.ended(3, 5)
    # And another branch from the first.
    assert arrive(links, 4, SYSTEM + ANSWER + text(9, 80)) == (1,)


def test_branches_are_told_apart() -> None:
    links = PrefixLinks()
    branches = {node: SYSTEM + text(node, 2 * BLOCK_TOKENS) for node in (1, 2, 3)}
    for node, tokens in branches.items():
        arrive(links, node, tokens)
    for node in branches:
        links.ended(node, 30)
    for node, tokens in branches.items():
        assert arrive(links, 10 + node, tokens + text(20 + node, 60)) == (node,)


def test_of_several_samples_of_one_prompt_any_may_be_the_parent() -> None:
    links = PrefixLinks()
    for node in (1, 2, 3):
        assert arrive(links, node, SYSTEM) == ()
    for node in (1, 2, 3):
        links.ended(node, len(ANSWER))
    found = arrive(links, 4, SYSTEM + ANSWER + text(2, 40))
    assert found
    assert set(found) <= {1, 2, 3}


def test_a_prompt_without_a_whole_block_is_the_beginning_of_nothing() -> None:
    links = PrefixLinks()
    short = text(0, BLOCK_TOKENS - 1)
    arrive(links, 1, short)
    links.ended(1, 5)
    assert arrive(links, 2, text(1, 200)) == ()
    assert arrive(links, 3, []) == ()


def test_the_end_of_a_call_that_is_not_known_is_no_trouble() -> None:
    links = PrefixLinks()
    links.ended(99, 5)
    arrive(links, 1, SYSTEM)
    links.ended(99, 5)
    links.ended(1, len(ANSWER))
    assert arrive(links, 2, SYSTEM + ANSWER + text(2, 10)) == (1,)


def test_only_the_latest_calls_are_compared_with() -> None:
    links = PrefixLinks()
    prompts = [text(number, 2 * BLOCK_TOKENS) for number in range(3 * MAX_CALLS)]
    for node, tokens in enumerate(prompts):
        arrive(links, node, tokens)
        links.ended(node, 10)
    assert arrive(links, 1000, prompts[0] + text(7, 50)) == ()
    last = len(prompts) - 1
    assert arrive(links, 1001, prompts[last] + text(7, 50)) == (last,)


def test_a_very_long_prompt_is_continued_by_a_longer_one() -> None:
    links = PrefixLinks()
    long = text(5, MAX_BLOCKS * BLOCK_TOKENS + 300)
    arrive(links, 1, long)
    links.ended(1, 50)
    assert arrive(links, 2, long + text(6, 100)) == (1,)
    other = [long[0] + 1, *long[1:]]
    assert arrive(links, 3, other + text(6, 100)) == ()


@settings(max_examples=60)
@given(
    st.integers(BLOCK_TOKENS, 3 * BLOCK_TOKENS),
    st.lists(st.tuples(st.integers(0, 80), st.integers(1, 80)), min_size=1, max_size=6),
    st.integers(0, 1000),
)
def test_every_turn_of_a_conversation_continues_the_one_before(
    first: int, turns: list[tuple[int, int]], seed: int
) -> None:
    links, rng = PrefixLinks(), random.Random(seed)
    prompt = [rng.randrange(50_000) for _ in range(first)]
    assert arrive(links, 0, prompt) == ()
    for node, (answer, question) in enumerate(turns, start=1):
        links.ended(node - 1, answer)
        # Beside it something else runs, of which nothing is continued.
        noise = arrive(links, 100 + node, [rng.randrange(50_000) for _ in range(100)])
        assert noise == ()
        prompt = prompt + [rng.randrange(50_000) for _ in range(answer + question)]
        assert arrive(links, node, prompt) == (node - 1,)


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 200), st.integers(0, 3), st.booleans()),
        max_size=20,
    )
)
def test_links_lead_to_calls_that_have_ended_and_are_no_longer_than_the_prompt(
    happened: list[tuple[int, int, int, bool]],
) -> None:
    links = PrefixLinks()
    length_of: dict[int, int] = {}
    ended: set[int] = set()
    texts = [text(seed, 200) for seed in range(4)]
    for node, length, seed, is_end in happened:
        if is_end and node in length_of:
            links.ended(node, length)
            length_of[node] += 0 if node in ended else length
            ended.add(node)
        elif not is_end and node not in length_of:
            for parent in arrive(links, node, texts[seed][:length]):
                assert parent != node
                assert parent in ended
                assert length_of[parent] < length
            length_of[node] = length
