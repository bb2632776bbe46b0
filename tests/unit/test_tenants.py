"""Counters of what tenants have been served (VTC)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler.tenants import Tenants


def served(**service: int) -> tuple[Tenants, dict[str, int]]:
    """Tenants with a live request each and so many input tokens of service; their indices."""
    tenants = Tenants()
    index = {name: tenants.join(name) for name in service}
    for name, tokens in service.items():
        tenants.serve(index[name], input_tokens=tokens)
    return tenants, index


def test_an_output_token_is_twice_the_service_of_an_input_token() -> None:
    tenants, index = served(a=0)
    tenants.serve(index["a"], input_tokens=10, output_tokens=5)
    assert tenants.service_of("a") == 20
    assert tenants.service()[index["a"]] == 20


def test_a_tenant_that_nobody_knows_has_had_nothing() -> None:
    assert Tenants().service_of("nobody") == 0
    assert len(Tenants()) == 0


def test_the_requests_of_one_tenant_add_up() -> None:
    tenants, index = served(a=10)
    assert tenants.join("a") == index["a"]
    tenants.serve(index["a"], input_tokens=10)
    assert tenants.service_of("a") == 20
    assert len(tenants) == 1


def test_a_newcomer_starts_level_with_the_least_served_active_one() -> None:
    tenants, _ = served(a=100, b=70)
    tenants.join("new")
    assert tenants.service_of("new") == 70


def test_one_that_comes_back_is_lifted_to_the_least_served_active_one() -> None:
    tenants, index = served(a=0, b=10)
    tenants.leave(index["b"])
    tenants.serve(index["a"], input_tokens=500)
    tenants.join("b")
    assert tenants.service_of("b") == 500


def test_one_that_comes_back_is_never_lowered() -> None:
    tenants, index = served(a=5, b=900)
    tenants.leave(index["b"])
    tenants.join("b")
    assert tenants.service_of("b") == 900


def test_an_idle_tenant_does_not_hold_the_others_down() -> None:
    tenants, index = served(idle=1, a=300)
    tenants.leave(index["idle"])
    tenants.join("new")
    assert tenants.service_of("new") == 300


def test_another_request_of_an_active_tenant_lifts_nobody() -> None:
    tenants, _ = served(a=1, b=900)
    tenants.join("a")
    assert tenants.service_of("a") == 1


def test_a_tenant_is_idle_only_when_its_last_request_has_ended() -> None:
    tenants, index = served(a=1)
    tenants.join("a")
    tenants.leave(index["a"])
    tenants.join("new")
    assert tenants.service_of("new") == 1


def test_of_idle_tenants_the_longest_idle_are_forgotten() -> None:
    tenants = Tenants(max_idle=2)
    index = {name: tenants.join(name) for name in "abc"}
    for name in "abc":
        tenants.serve(index[name], input_tokens=9)
    for name in "bac":
        tenants.leave(index[name])
    assert {name: tenants.service_of(name) for name in "abc"} == {"a": 9, "b": 0, "c": 9}
    assert len(tenants) == 2


def test_one_that_came_back_counts_as_idle_from_its_last_end() -> None:
    tenants = Tenants(max_idle=1)
    first, second = tenants.join("a"), tenants.join("b")
    tenants.serve(first, input_tokens=5)
    tenants.leave(first)
    tenants.join("a")
    tenants.leave(second)
    tenants.leave(first)
    assert tenants.service_of("a") == 5
    assert len(tenants) == 1


def test_who_takes_the_place_of_a_forgotten_one_starts_anew() -> None:
    tenants = Tenants(max_idle=0)
    index = tenants.join("a")
    tenants.serve(index, input_tokens=50)
    tenants.leave(index)
    assert tenants.join("b") == index
    assert tenants.service_of("b") == 0
    assert tenants.service_of("a") == 0


def test_many_tenants_keep_their_own_counters() -> None:
    tenants, _ = served(**{f"t{number}": number for number in range(100)})
    assert [tenants.service_of(f"t{number}") for number in (0, 15, 16, 99)] == [0, 15, 16, 99]
    assert tenants.service().shape == (100,)


operations = st.lists(
    st.tuples(st.sampled_from(["join", "leave", "serve"]), st.integers(0, 9), st.integers(0, 50)),
    max_size=80,
)


@given(operations=operations, max_idle=st.integers(0, 3))
def test_whoever_comes_and_goes_the_counters_are_those_of_a_plain_account(
    operations: list[tuple[str, int, int]], max_idle: int
) -> None:
    tenants = Tenants(max_idle=max_idle)
    index: dict[str, int] = {}
    live: dict[str, int] = {}
    account: dict[str, float] = {}
    for what, number, tokens in operations:
        name = f"t{number}"
        if what == "join":
            if name not in live:
                active = [account[other] for other in live]
                account[name] = max(account.pop(name, 0), min(active, default=0))
            index[name] = tenants.join(name)
            live[name] = live.get(name, 0) + 1
        elif name in live and what == "serve":
            tenants.serve(index[name], input_tokens=tokens, output_tokens=1)
            account[name] += tokens + 2
        elif name in live:
            tenants.leave(index[name])
            live[name] -= 1
            if not live[name]:
                del live[name]
                account[name] = account.pop(name)  # the latest idle
                idle = [other for other in account if other not in live]
                for oldest in idle[: max(len(idle) - max_idle, 0)]:
                    del account[oldest]
        assert {name: tenants.service_of(name) for name in account} == account
        assert len(tenants) == len(account) <= len(live) + max_idle
        assert len({index[name] for name in live}) == len(live)
