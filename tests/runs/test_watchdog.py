"""The watchdog tells a stall once, acts when patience runs out, and then waits a fresh budget."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from mettle.runs.watchdog import Watchdog, wait_graph
from mettle.storage.journal import Wait


def wait(since: float = 0.0, edge: str = "batch", owner: str = "trainer", budget_s: float = 10.0) -> Wait:
    return Wait(owner, edge, "orchestrator ships step 4", since, budget_s, 1)


def test_a_wait_within_its_budget_is_no_stall():
    assert Watchdog().check([wait()], 10.0) == []


def test_a_stall_is_told_once_before_anything_is_restarted():
    watchdog = Watchdog()
    (stall,) = watchdog.check([wait()], 11.0)
    assert stall.restart is None
    assert watchdog.check([wait()], 12.0) == []


def test_when_patience_runs_out_the_awaited_process_is_named_and_gets_a_fresh_budget():
    watchdog = Watchdog()
    watchdog.check([wait()], 11.0)
    (stall,) = watchdog.check([wait()], 21.0)
    assert stall.restart == "orchestrator"
    assert watchdog.check([wait()], 30.0) == []
    assert watchdog.check([wait()], 42.0)[0].restart == "orchestrator"


def test_the_wait_graph_names_both_ends_and_the_time():
    lines = wait_graph([wait(), wait(since=-5.0, edge="weights", owner="orchestrator")], 2.0)
    assert lines == [
        "orchestrator --weights--> trainer: orchestrator ships step 4 (7 s of 10 s)",
        "trainer --batch--> orchestrator: orchestrator ships step 4 (2 s of 10 s)",
    ]


@given(st.lists(st.floats(0, 200), min_size=1, max_size=30))
def test_restarts_are_at_least_one_patience_apart(times):
    watchdog = Watchdog()
    acted = [now for now in sorted(times) for stall in watchdog.check([wait()], now) if stall.restart]
    assert all(later - earlier > 20.0 for earlier, later in itertools.pairwise(acted))
