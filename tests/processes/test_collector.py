"""Garbage collections are rare while many rollouts are under way, and as they were afterwards."""

import gc

import pytest

from mettle.processes.collector import FULL_COLLECTION_EVERY, YOUNG_OBJECTS, quiet_collector


@pytest.fixture(params=[False, True], ids=["", "frozen before"])
def is_frozen(request):
    """Whether somebody else had set objects aside. Their number is no figure to compare: those that die leave it."""
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    if request.param:
        gc.freeze()
    yield request.param
    gc.unfreeze()
    if was_frozen:
        gc.freeze()


def test_the_collector_is_as_it_was_once_the_last_is_done(is_frozen):
    before = gc.get_threshold()
    with quiet_collector():
        with quiet_collector():
            assert gc.get_threshold()[2] >= FULL_COLLECTION_EVERY
        assert gc.get_threshold()[0] >= YOUNG_OBJECTS
        assert gc.get_threshold()[2] >= FULL_COLLECTION_EVERY
        assert gc.get_freeze_count() > 0
    assert gc.get_threshold() == before
    assert (gc.get_freeze_count() > 0) == is_frozen
    with pytest.raises(ZeroDivisionError), quiet_collector():
        _ = 1 / 0
    assert gc.get_threshold() == before


def test_rollouts_that_live_are_looked_at_a_few_times_and_not_with_each_one_more():
    collections = []

    def note(phase, info):
        collections.append((phase, info["generation"]))

    with quiet_collector():
        gc.callbacks.append(note)
        try:
            alive = [{"rollout": [{"turn": {}} for _ in range(10)]} for _ in range(2_000)]
        finally:
            gc.callbacks.remove(note)
    assert len(alive) == 2_000
    assert sum(phase == "start" for phase, _ in collections) <= 5  # 60 as Python begins


def test_a_collector_that_is_off_stays_off():
    threshold = gc.get_threshold()
    gc.set_threshold(0)
    try:
        with quiet_collector():
            assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*threshold)
