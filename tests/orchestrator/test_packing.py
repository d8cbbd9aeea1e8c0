"""Packing: nothing lost, nothing over the limits, ranks in step, dummies that count for nothing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mettle.orchestrator.packing import dummy, pack
from mettle.records.tokens import PER_TOKEN_FIELDS, Sample


def sample(length, mark):
    floats = np.full(length, mark, np.float32)
    return Sample(
        np.full(length, mark, np.int32), np.arange(length) > 0, floats, np.full(length, mark, np.int32), floats, floats,
        floats, floats, floats, floats,
    )  # fmt: skip


lengths = st.lists(st.integers(2, 32), min_size=1, max_size=40)


@pytest.mark.parametrize("layout", ["padded", "packed"])
@given(sizes=lengths, num_ranks=st.integers(1, 5), max_rows=st.integers(1, 8))
def test_every_sample_is_in_one_micro_batch_within_the_limits(layout, sizes, num_ranks, max_rows):
    samples = [sample(length, mark) for mark, length in enumerate(sizes)]
    ranks = pack(samples, layout=layout, max_tokens=64, max_rows=max_rows, num_ranks=num_ranks)
    assert len(ranks) == num_ranks
    assert len({len(rank) for rank in ranks}) == 1
    found = []
    for micro in (micro for rank in ranks for micro in rank):
        if not micro.loss_mask.any():
            continue
        rows = micro.sequence_lengths.tolist()
        assert len(rows) <= max_rows
        assert (len(rows) * max(rows) if layout == "padded" else sum(rows)) <= 64
        start = 0
        for length in rows:
            found.append((int(micro.token_ids[start]), length))
            assert micro.position_ids[start : start + length].tolist() == list(range(length))
            start += length
    assert sorted(found) == list(enumerate(sizes))


@given(sizes=lengths, num_ranks=st.integers(2, 4))
def test_there_are_no_dummies_while_a_bin_can_be_split(sizes, num_ranks):
    samples = [sample(length, mark) for mark, length in enumerate(sizes)]
    ranks = pack(samples, layout="padded", max_tokens=256, max_rows=16, num_ranks=num_ranks)
    num_dummies = sum(not micro.loss_mask.any() for rank in ranks for micro in rank)
    assert num_dummies == 0 or all(len(micro.sequence_lengths) == 1 for rank in ranks for micro in rank)


def test_ranks_get_equal_work():
    samples = [sample(16, mark) for mark in range(64)]
    ranks = pack(samples, layout="packed", max_tokens=64, max_rows=64, num_ranks=4)
    loads = [sum(len(micro.token_ids) for micro in rank) for rank in ranks]
    assert max(loads) == min(loads)


def test_a_padded_micro_batch_holds_samples_of_like_length():
    samples = [sample(length, 0) for length in [30, 2, 30, 2, 30, 2]]
    ((first, second),) = pack(samples, layout="padded", max_tokens=90, max_rows=3, num_ranks=1)
    assert sorted([first.sequence_lengths.tolist(), second.sequence_lengths.tolist()]) == [[2, 2, 2], [30, 30, 30]]


def test_a_dummy_is_one_token_that_belongs_to_nothing():
    empty = dummy()
    assert len(empty.token_ids) == 1
    assert not empty.loss_mask.any()
    for name in ("rl_weights", "ce_weights", "ref_kl_weights", "advantages"):
        assert not getattr(empty, name).any()


def test_every_field_travels_with_its_token():
    ((micro,),) = pack([sample(3, 1), sample(5, 2)], layout="packed", max_tokens=9, max_rows=2, num_ranks=1)
    for name in PER_TOKEN_FIELDS:
        if name not in ("position_ids", "loss_mask"):
            assert getattr(micro, name).tolist() == [2] * 5 + [1] * 3
