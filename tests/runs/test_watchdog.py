"""The watchdog tells a stall once, restarts what is awaited once, and leaves time for recovery."""

from hypothesis import given
from hypothesis import strategies as st

from mettle.runs.watchdog import Watchdog, wait_graph
from mettle.storage.journal import Wait


def wait(since: float = 0.0, edge: str = "batch", owner: str = "trainer", budget_s: float = 100.0) -> Wait:
    return Wait(owner, edge, "orchestrator ships step 4", since, budget_s, 1)


def test_a_wait_well_within_its_budget_is_no_stall():
    assert Watchdog().check([wait()], 25.0) == []


def test_a_stall_is_told_once_before_anything_is_restarted():
    watchdog = Watchdog()
    (stall,) = watchdog.check([wait()], 26.0)
    assert stall.restart is None
    assert watchdog.check([wait()], 27.0) == []


def test_at_half_of_the_budget_the_awaited_process_is_restarted_once():
    watchdog = Watchdog()
    watchdog.check([wait()], 26.0)
    (stall,) = watchdog.check([wait()], 51.0)
    assert stall.restart == "orchestrator"
    assert watchdog.check([wait()], 99.0) == []


def test_a_later_wait_of_the_same_owner_is_a_wait_of_its_own():
    watchdog = Watchdog()
    watchdog.check([wait()], 51.0)
    (stall,) = watchdog.check([wait(since=100.0)], 151.0)
    assert stall.restart == "orchestrator"


def test_a_wait_on_nothing_that_can_be_restarted_is_only_told():
    watchdog = Watchdog()
    (stall,) = watchdog.check([wait(edge="evaluation")], 99.0)
    assert stall.restart is None
    assert watchdog.check([wait(edge="evaluation")], 100.0) == []


def test_the_wait_graph_names_both_ends_and_the_time():
    lines = wait_graph([wait(), wait(since=-5.0, edge="weights", owner="orchestrator")], 2.0)
    assert lines == [
        "orchestrator --weights--> trainer: orchestrator ships step 4 (7 s of 100 s)",
        "trainer --batch--> orchestrator: orchestrator ships step 4 (2 s of 100 s)",
    ]


@given(st.lists(st.floats(0, 200), min_size=1, max_size=30))
def test_whenever_it_looks_a_wait_is_acted_on_at_most_once(times):
    watchdog = Watchdog()
    stalls = [stall for now in sorted(times) for stall in watchdog.check([wait()], now)]
    assert sum(stall.restart is not None for stall in stalls) == int(max(times) > 50.0)
    assert len(stalls) <= 2
