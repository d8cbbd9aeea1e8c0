"""In which order groups are trained, and which seed samples them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mettle.orchestrator.batcher import Batcher, ReadyGroup
from mettle.orchestrator.rollouts import group_seed
from mettle.orchestrator.shipping import assemble
from mettle.records.tokens import COLUMNS, Sample
from mettle.storage.batches import read_batch, write_batch


def ready(draw_id, version=0):
    given_columns = {
        name: np.full((3, 1) if column.is_wide else 3, draw_id, column.dtype) for name, column in COLUMNS.items()
    }
    given_columns |= {"versions": np.full(3, version, np.int32), "loss_mask": np.ones(3, bool)}
    return ReadyGroup.of(draw_id, [Sample(**given_columns)])


@given(st.permutations(range(6)))
def test_a_batch_stands_in_the_order_of_its_draws_whichever_came_back_first(order):
    batcher = Batcher(6, 1, max_backfill=1.0)
    for draw_id in order:
        batcher.add(ready(draw_id))
    assert [group.draw_id for group in batcher.take()] == [0, 1, 2, 3, 4, 5]


def test_the_stalest_groups_leave_first_and_stand_in_the_order_of_their_draws():
    batcher = Batcher(2, 2, max_backfill=1.0)
    for draw_id, version in ((1, 2), (5, 0), (3, 1)):
        batcher.add(ready(draw_id, version))
    assert [group.draw_id for group in batcher.take()] == [3, 5]


def test_the_same_groups_are_the_same_file(tmp_path):
    first, path = write_batch(tmp_path, assemble(3, [ready(1), ready(2)]))
    second, _ = write_batch(tmp_path, assemble(3, [ready(1), ready(2)]))
    assert first == second == path.stem
    assert write_batch(tmp_path, assemble(4, [ready(1), ready(2)]))[0] != first
    assert read_batch(tmp_path, first).draw_ids == (1, 2)


def test_a_group_has_a_seed_of_its_own_for_each_attempt_within_63_bits():
    seeds = {
        group_seed(root, name, attempt) for root in (0, 1) for name in ("t1", "t2", "e0-x-1") for attempt in (0, 1)
    }
    assert len(seeds) == 12
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert group_seed(0, "t1") == group_seed(0, "t1", 0)
