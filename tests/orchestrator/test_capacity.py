"""How many groups may be open: bounded staleness, no waste, no deadlock."""

from hypothesis import given
from hypothesis import strategies as st

from mettle.orchestrator.capacity import Room

G = 4


def room(step, version, *, num_ready=0, num_running=0, share=1.0, max_steps=100, lag=1, staleness=2):
    made = Room(max_steps=max_steps, groups_per_batch=G, max_lag=lag, max_staleness=staleness, max_backfill=3.0)
    made.admitted_share = share
    return made.for_groups(step=step, version=version, num_ready=num_ready, num_running=num_running)


def test_at_the_start_one_batch_a_version_of_lag_and_one_more_may_be_open():
    assert room(1, 0, lag=0, staleness=0) == G
    assert room(1, 0, lag=1) == 2 * G


def test_a_group_too_many_would_be_too_stale():
    assert room(3, 1) == G
    assert room(3, 1, num_running=G) == 0
    assert room(4, 1) == 0


def test_the_last_steps_open_no_more_than_they_need():
    assert room(100, 99, max_steps=100) == G
    assert room(101, 100, max_steps=100) == 0


def test_groups_without_signal_are_made_up_for_before_they_come_back():
    assert room(3, 1, num_running=G, share=0.5) == G
    assert room(3, 1, num_running=G, share=0.5, staleness=1) == 0


@given(
    step=st.integers(1, 50),
    version=st.integers(0, 60),
    num_ready=st.integers(0, 20),
    num_running=st.integers(0, 20),
    share=st.floats(0, 1),
    lag=st.integers(0, 3),
    slack=st.integers(0, 3),
)
def test_whatever_is_opened_lands_within_the_bound(step, version, num_ready, num_running, share, lag, slack):
    found = room(
        step, version, num_ready=num_ready, num_running=num_running, share=share, lag=lag, staleness=lag + slack
    )
    if found:
        last_batch = step + (num_ready + num_running + found - 1) // G
        assert (last_batch - 1) - version <= lag + slack


@given(
    step=st.integers(1, 50),
    version=st.integers(0, 60),
    num_ready=st.integers(0, G - 1),
    share=st.floats(0, 1),
    lag=st.integers(0, 3),
)
def test_a_batch_that_may_be_shipped_can_always_be_filled(step, version, num_ready, share, lag):
    if version >= step - 1 - lag:
        assert room(step, version, num_ready=num_ready, share=share, lag=lag, staleness=lag) >= G - num_ready


def test_the_admitted_share_follows_what_comes_back():
    made = Room(max_steps=9, groups_per_batch=G, max_lag=1, max_staleness=1, max_backfill=1.0, decay=0.5)
    assert made.admitted_share == 1.0
    for _ in range(10):
        made.observe(is_admitted=False)
    assert made.admitted_share < 0.01
