"""Which replica takes a request: the least loaded, unless another knows its prompt and has room."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mettle.inference.routing import Affinity


def test_a_later_turn_goes_where_the_first_one_went() -> None:
    affinity = Affinity()
    first = list(range(40))
    assert affinity.choose(first, {0: 3, 1: 1}) == 1
    assert affinity.choose([*first, *range(100, 130)], {0: 0, 1: 5}) == 1


def test_affinity_gives_way_to_load() -> None:
    affinity = Affinity(slack=4)
    assert affinity.choose((1, 2), {0: 0, 1: 1}) == 0
    assert affinity.choose((1, 2), {0: 4, 1: 0}) == 0
    assert affinity.choose((1, 2), {0: 5, 1: 0}) == 1


def test_a_replica_that_is_gone_is_not_chosen() -> None:
    affinity = Affinity()
    assert affinity.choose((1,), {0: 0, 1: 9}) == 0
    assert affinity.choose((1,), {1: 9}) == 1


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), max_size=40))
def test_no_replica_gets_further_ahead_than_the_slack(asked: list[list[int]]) -> None:
    affinity, loads = Affinity(slack=3), dict.fromkeys(range(3), 0)
    for prompt in asked:
        chosen = affinity.choose(prompt, loads)
        assert loads[chosen] <= min(loads.values()) + 3
        loads[chosen] += 1
