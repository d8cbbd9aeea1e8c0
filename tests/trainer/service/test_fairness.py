"""Deficit round robin: equal shares of owners, whatever they ask for."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from mettle.trainer.service.fairness import DeficitRoundRobin, Wish

QUANTUM = 100


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 1000)), min_size=2, max_size=4),
    st.randoms(use_true_random=False),
)
def test_owners_with_work_get_equal_shares_whatever_their_models_and_passes(owners, rng):
    """Each owner has a few models whose passes cost up to a maximum of its own."""
    fair = DeficitRoundRobin(QUANTUM)
    served: Counter[str] = Counter()
    wishes = {
        f"{name}:{i}": Wish(str(name), rng.randint(1, largest))
        for name, (num_models, largest) in enumerate(owners)
        for i in range(num_models)
    }
    for _ in range(300):
        model = fair.pick(wishes)
        owner = wishes[model].owner
        served[owner] += wishes[model].cost
        wishes[model] = Wish(owner, rng.randint(1, owners[int(owner)][1]))
    slack = sum(num_models * (QUANTUM + largest) for num_models, largest in owners)
    assert max(served.values()) - min(served[str(name)] for name in range(len(owners))) <= slack


def test_who_has_nothing_to_do_saves_nothing_up():
    fair = DeficitRoundRobin(QUANTUM)
    for _ in range(50):
        fair.pick({"a": Wish("a", 10)})
    order = [fair.pick({"a": Wish("a", 100), "b": Wish("b", 100)}) for _ in range(6)]
    assert sorted(order) == ["a"] * 3 + ["b"] * 3
