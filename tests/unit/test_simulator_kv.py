"""The KV pool of a simulated replica: what is shared, what is kept and what goes first."""

from __future__ import annotations

import pytest
from simulated import DEADLINE, call, request, simulate, workload

from engine.simulator.kv import KvPool
from engine.simulator.shape import EngineShape
from engine.simulator.workload import SimCall


def prompt_of(name: int, tokens: int, rest: int = 10) -> SimCall:
    return call(tokens + rest, 5, prefix=name, prefix_tokens=tokens)


def run_through(pool: KvPool, asked: SimCall, answer_tokens: int = 5) -> None:
    """A request from its place to its end."""
    hit = pool.begin(asked, asked.input_tokens)
    hit = pool.share(asked, hit)
    pool.grow(answer_tokens)
    pool.end(asked, hit, asked.input_tokens + answer_tokens)


def is_cached(pool: KvPool, name: int, tokens: int) -> bool:
    return pool.cached(prompt_of(name, tokens)) > 0


def test_a_text_in_use_stays_though_it_is_the_oldest() -> None:
    pool = KvPool(200)
    used = prompt_of(1, 50)
    hit = pool.share(used, pool.begin(used, 60))
    run_through(pool, prompt_of(2, 50))
    assert pool.available_tokens == 200 - 60
    pool.grow(140)
    assert is_cached(pool, 1, 50)
    assert not is_cached(pool, 2, 50)
    assert pool.available_tokens == 0
    with pytest.raises(ValueError, match="fit"):
        pool.grow(1)
    pool.give_up(used, hit, 200)
    assert pool.available_tokens == 200


def test_of_unused_texts_the_longest_unused_goes_first() -> None:
    pool = KvPool(200)
    for name in (1, 2, 3):
        run_through(pool, prompt_of(name, 50))
    run_through(pool, prompt_of(1, 50))
    pool.grow(60)
    assert [is_cached(pool, name, 50) for name in (1, 2, 3)] == [True, False, True]


def test_a_text_is_unused_from_the_end_of_its_last_use() -> None:
    pool = KvPool(200)
    slow = prompt_of(1, 50)
    hit = pool.share(slow, pool.begin(slow, 60))
    run_through(pool, prompt_of(2, 50))
    pool.end(slow, hit, 60)
    pool.grow(120)
    assert [is_cached(pool, name, 50) for name in (1, 2)] == [True, False]


def test_a_chain_goes_from_its_end() -> None:
    pool = KvPool(300)
    first = call(60, 5, prefix=1, prefix_tokens=50, leaves=10)
    run_through(pool, first)
    second = call(85, 5, prefix=10, prefix_tokens=65, leaves=11)
    run_through(pool, second)
    assert [is_cached(pool, *text) for text in ((1, 50), (10, 65), (11, 90))] == [True] * 3
    pool.grow(300 - 90 + 1)
    assert [is_cached(pool, *text) for text in ((1, 50), (10, 65), (11, 90))] == [
        True,
        True,
        False,
    ]
    pool.grow(25)
    assert [is_cached(pool, *text) for text in ((1, 50), (10, 65))] == [True, False]


def test_two_that_compute_the_same_text_hold_it_once_afterwards() -> None:
    pool = KvPool(200)
    one, other = prompt_of(1, 50), prompt_of(1, 50)
    pool.begin(one, 60)
    pool.begin(other, 60)
    assert (pool.own_tokens, pool.available_tokens) == (120, 80)
    assert pool.share(one, 0) == 50
    assert pool.share(other, 0) == 50
    assert (pool.own_tokens, pool.available_tokens) == (20, 130)
    pool.end(one, 50, 60)
    assert pool.available_tokens == 140
    pool.give_up(other, 50, 60)
    assert (pool.own_tokens, pool.available_tokens) == (0, 200)


def test_without_a_cache_nothing_is_kept() -> None:
    pool = KvPool(200, has_cache=False)
    asked = call(60, 5, prefix=1, prefix_tokens=50, leaves=2)
    hit = pool.begin(asked, 60)
    assert (hit, pool.share(asked, hit)) == (0, 0)
    pool.end(asked, 0, 60)
    assert pool.available_tokens == 200
    assert not is_cached(pool, 1, 50)
    assert not is_cached(pool, 2, 60)


def test_who_does_not_fit_beside_the_text_it_uses_is_refused_and_nothing_changes() -> None:
    pool = KvPool(200)
    run_through(pool, prompt_of(1, 100))
    pool.grow(90)
    with pytest.raises(ValueError, match="fit"):
        pool.begin(prompt_of(1, 100, rest=20), 120)
    assert (pool.own_tokens, pool.available_tokens) == (90, 110)


def test_two_calls_that_leave_the_same_name_do_not_make_tokens_out_of_nothing() -> None:
    """The second one's context is longer, and most of it is another text."""
    pool = KvPool(200)
    run_through(pool, call(5, 5, leaves=9))
    run_through(pool, prompt_of(1, 100))
    again = call(110, 5, prefix=1, prefix_tokens=100, leaves=9)
    hit = pool.share(again, pool.begin(again, 110))
    pool.end(again, hit, 110)
    assert pool.available_tokens == 200
    pool.grow(200)
    assert pool.available_tokens == 0


def test_a_cached_text_is_no_room_for_the_prompt_that_uses_it() -> None:
    asked = [(66, 47, 0.1, 3, 60), (158, 47, 0.2, 1, 140), (140, 40, 0.32, 3, 60)]
    asked.append((130, 45, 0.42, 3, 60))
    run = simulate(
        workload(
            *(
                request(
                    size,
                    output,
                    at_s=at_s,
                    call_fields={
                        "prefix": name,
                        "prefix_tokens": tokens,
                        "max_output_tokens": output,
                    },
                )
                for size, output, at_s, name, tokens in asked
            )
        ),
        EngineShape(max_batch=4, kv_tokens=300),
        policy="edf",
        config={"frame_steps": 5},
    )
    assert {row.end for row in run.result.calls} == {"finished"}


def test_one_alone_needs_no_text_that_is_longer_than_its_prefix() -> None:
    pool = KvPool(130)
    run_through(pool, prompt_of(1, 60))
    asked = call(60, 40, prefix=1, prefix_tokens=20)
    hit = pool.share(asked, pool.begin(asked, 60))
    assert (hit, pool.available_tokens) == (20, 130 - 60 - 40)
    pool.grow(30)
    pool.detach(asked, hit)
    assert (pool.own_tokens, pool.available_tokens) == (90, 40)
    pool.grow(10)
    assert not is_cached(pool, 1, 60)
    pool.end(asked, 0, 100)
    assert (pool.own_tokens, pool.available_tokens) == (0, 130)


@pytest.mark.parametrize("mixes_chunks", [True, False])
@pytest.mark.parametrize("kv_tokens", [100, 101, 110, 130, 159, 160])
@pytest.mark.parametrize("prefix_tokens", [1, 10, 59])
def test_a_long_text_stops_nobody_who_uses_a_part_of_it(
    kv_tokens: int, prefix_tokens: int, mixes_chunks: bool
) -> None:
    run = simulate(
        workload(
            request(70, 5, call_fields={"prefix": 1, "prefix_tokens": 60}),
            request(
                60,
                40,
                at_s=1.0,
                slo=DEADLINE,
                call_fields={"prefix": 1, "prefix_tokens": prefix_tokens},
            ),
        ),
        EngineShape(kv_tokens=kv_tokens, mixes_chunks=mixes_chunks),
    )
    assert {row.end for row in run.result.calls} == {"finished"}
    assert run.call(1).num_preemptions == 0
    assert run.call(1).first_scheduled_s == 1.0


def test_a_busy_pool_of_shared_prompts_ends_empty() -> None:
    run = simulate(
        workload(
            *(
                request(
                    100 + index % 7,
                    20,
                    at_s=index * 0.01,
                    slo=DEADLINE,
                    call_fields={"prefix": 1 + index % 3, "prefix_tokens": 60 + index % 3},
                )
                for index in range(30)
            )
        ),
        EngineShape(max_batch=8, kv_tokens=1000),
    )
    assert {row.end for row in run.result.calls} == {"finished"}
    assert run.result.replicas[0].cached_tokens > 0
