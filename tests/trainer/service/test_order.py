"""The order of one model's operations: by number, whatever order they came in, and never stuck."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mettle.trainer.service.order import ModelOrder


@given(st.permutations(range(8)))
def test_operations_run_by_number_whatever_order_they_came_in(arrivals):
    order, ran = ModelOrder(), []
    for number in arrivals:
        order.add(number)
        while (ready := order.ready) is not None:
            ran.append(ready)
            order.finish(ready)
    assert ran == list(range(8))


@given(st.lists(st.tuples(st.sampled_from(["add", "wait"]), st.integers(0, 12)), max_size=60))
def test_nothing_runs_twice_or_out_of_order_and_nothing_waits_for_ever(events):
    order, now, seen, added = ModelOrder(), 0.0, [], set()
    for event, value in events:
        if event == "add" and not order.is_late(value):
            order.add(value)
            added.add(value)
        elif event == "wait":
            now += value
            seen += order.watch(now, gap_s=10.0)
        while (ready := order.ready) is not None:
            seen.append(ready)
            order.finish(ready)
    order.watch(now, gap_s=10.0)
    seen += order.watch(now + 10.0, gap_s=10.0)
    assert seen == sorted(added)


def test_a_number_that_does_not_come_is_given_up_after_the_limit_and_is_late_then():
    order = ModelOrder(last=0)
    order.add(2)
    order.add(3)
    assert (order.ready, order.watch(100.0, 60.0), order.watch(159.0, 60.0)) == (None, [], [])
    assert order.watch(160.0, 60.0) == [2, 3]
    assert order.is_late(1)
    order.add(4)
    assert order.ready == 4
