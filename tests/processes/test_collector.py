"""Garbage collections are rare while many rollouts are under way, and as they were afterwards."""

import gc

import pytest

from mettle.processes.collector import FULL_COLLECTION_EVERY, YOUNG_OBJECTS, quiet_collector


def test_the_collector_is_as_it_was_once_the_last_is_done():
    before = gc.get_threshold(), gc.get_freeze_count()
    with quiet_collector():
        with quiet_collector():
            assert gc.get_threshold()[2] >= FULL_COLLECTION_EVERY
        assert gc.get_threshold()[0] >= YOUNG_OBJECTS
        assert gc.get_threshold()[2] >= FULL_COLLECTION_EVERY
        assert gc.get_freeze_count() > 0
    assert (gc.get_threshold(), gc.get_freeze_count()) == before
    with pytest.raises(ZeroDivisionError), quiet_collector():
        _ = 1 / 0
    assert gc.get_threshold() == before[0]


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
