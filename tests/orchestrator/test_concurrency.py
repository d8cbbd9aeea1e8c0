"""How many groups are open: down when the engine runs out of memory, once a burst, and up again when there is room."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mettle.orchestrator.concurrency import HOLD, Concurrency, EngineLoad

ROOMY = EngineLoad(num_running=8, num_waiting=0, kv_bytes=8_000, kv_budget_bytes=100_000)
FULL = EngineLoad(num_running=8, num_waiting=0, kv_bytes=99_000, kv_budget_bytes=100_000)


def preempting(count, load=FULL):
    return dataclasses.replace(load, num_preempted=count)


def test_without_pressure_the_limit_stays_at_the_most():
    machine = Concurrency(1, 16, 8)
    assert {machine.observe(ROOMY, 16) for _ in range(20)} == {16}


def test_a_burst_of_preemptions_takes_one_step_down():
    machine = Concurrency(1, 16, 8)
    machine.observe(preempting(0), 16)
    limits = [machine.observe(preempting(count), 16) for count in range(1, HOLD + 1)]
    assert limits == [12] * HOLD


def test_it_goes_on_down_while_it_is_still_too_much_and_never_below_the_fewest():
    machine = Concurrency(3, 16, 8)
    limit = 16
    for count in range(100):
        limit = machine.observe(preempting(count), limit)
    assert limit == 3


def test_it_comes_back_when_a_group_fits_again():
    machine = Concurrency(1, 8, 8)
    machine.observe(preempting(0), 8)
    assert machine.observe(preempting(1), 8) == 6
    limits = [machine.observe(preempting(1, ROOMY), machine.limit) for _ in range(HOLD + 10)]
    assert limits[HOLD - 1] == 6
    assert limits[-1] == 8


@pytest.mark.parametrize("load", [preempting(1, FULL), preempting(1, dataclasses.replace(ROOMY, num_waiting=3))])
def test_it_does_not_grow_where_another_group_would_not_fit_or_somebody_waits(load):
    machine = Concurrency(1, 8, 8)
    machine.observe(preempting(0), 8)
    machine.observe(preempting(1), 8)
    assert {machine.observe(load, machine.limit) for _ in range(HOLD + 10)} == {6}


def test_it_does_not_grow_while_something_else_holds_the_groups_back():
    machine = Concurrency(1, 8, 8)
    machine.observe(preempting(0), 8)
    machine.observe(preempting(1), 8)
    assert {machine.observe(preempting(1, ROOMY), 2) for _ in range(HOLD + 10)} == {6}


def test_an_engine_that_was_restarted_counts_anew_and_that_is_no_preemption():
    machine = Concurrency(1, 8, 8)
    machine.observe(preempting(50), 8)
    assert machine.observe(preempting(0), 8) == 8


def test_an_engine_that_tells_nothing_of_its_memory_changes_nothing():
    machine = Concurrency(1, 8, 8)
    silent = EngineLoad(8, 0, 0, 0)
    assert [machine.observe(dataclasses.replace(silent, num_preempted=n), 8) for n in range(5)] == [8] * 5


loads = st.builds(
    EngineLoad,
    num_running=st.integers(0, 64),
    num_waiting=st.integers(0, 8),
    kv_bytes=st.integers(0, 1000),
    kv_budget_bytes=st.sampled_from([0, 500, 1000]),
    num_preempted=st.integers(0, 50),
)


@given(st.lists(st.tuples(loads, st.integers(0, 20)), max_size=60), st.integers(1, 5), st.integers(5, 20))
def test_the_limit_never_leaves_its_bounds_and_moves_up_by_one(seen, lowest, highest):
    machine = Concurrency(lowest, highest, 4)
    for load, num_open in seen:
        before = machine.limit
        after = machine.observe(load, num_open)
        assert lowest <= after <= highest
        assert after <= before + 1


@given(st.integers(1, 12), st.integers(1, 4))
def test_under_a_constant_load_it_settles_at_what_fits(capacity, group_size):
    """An engine that holds `capacity` groups and preempts beyond: the limit ends within a quarter of that."""
    machine = Concurrency(1, 16, group_size)
    count, limits = 0, []
    for _ in range(400):
        num_open = machine.limit
        count += max(0, num_open - capacity)
        running = min(num_open, capacity) * group_size
        load = EngineLoad(running, 0, running * 10, capacity * group_size * 10, count)
        limits.append(machine.observe(load, num_open))
    assert max(limits[200:]) <= capacity
    assert min(limits[200:]) >= max(1, capacity * 9 // 16)
