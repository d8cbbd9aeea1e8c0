"""Costs are dealt equally many to each rank, with sums about as equal as can be."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mettle.trainer.dealing import deal


def heaviest(costs, dealt):
    return max(costs[members].sum() for members in dealt)


@given(st.integers(1, 8), st.integers(0, 8), st.integers(0, 10**6))
def test_every_cost_is_dealt_once_and_each_rank_has_equally_many_costliest_first(num_ranks, rounds, seed):
    costs = np.random.default_rng(seed).exponential(1.0, num_ranks * rounds).round(1)
    dealt = deal(costs, num_ranks)
    assert sorted(i for members in dealt for i in members) == list(range(len(costs)))
    assert {len(members) for members in dealt} == {rounds}
    assert all(costs[members].tolist() == sorted(costs[members], reverse=True) for members in dealt)
    assert dealt == deal(costs, num_ranks)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_the_heaviest_rank_is_within_a_few_per_cent_of_the_best_there_is(seed):
    costs = np.random.default_rng(seed).uniform(0.3, 1.0, 8)
    best = min(
        max(costs[list(chosen)].sum(), costs.sum() - costs[list(chosen)].sum())
        for chosen in itertools.combinations(range(8), 4)
    )
    assert heaviest(costs, deal(costs, 2)) <= 1.05 * best


def test_passes_of_many_sizes_come_within_a_thousandth_of_the_mean_on_32_ranks():
    for seed in range(5):
        costs = np.random.default_rng(seed).uniform(500, 1000, 256)
        assert heaviest(costs, deal(costs, 32)) <= 1.001 * costs.sum() / 32


def test_what_cannot_be_dealt_equally_is_refused():
    with pytest.raises(ValueError, match="5 costs cannot be dealt equally to 2 ranks"):
        deal(np.ones(5), 2)
