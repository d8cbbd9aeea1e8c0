"""The dispatcher's accounting: one ending for each group, permits equal open groups."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mettle.orchestrator.dispatcher import Blame, Dispatcher, Ending
from mettle.records.tasks import TaskDraw


def draw(draw_id):
    return TaskDraw(draw_id, "words", f"u{draw_id}", 0, draw_id)


@given(st.lists(st.tuples(st.sampled_from(["take", *Ending]), st.integers(0, 5), st.floats(0, 5)), max_size=60))
def test_every_group_ends_once_and_permits_are_those_of_open_groups(moves):
    dispatcher = Dispatcher(3)
    dispatcher.wait([draw(i) for i in range(8)])
    now, opened, ended = 0.0, 0, 0
    for move, which, seconds in moves:
        now += seconds
        if move == "take":
            for task in dispatcher.take(dispatcher.num_permits, now):
                dispatcher.open(task, 0, now)
                opened += 1
        elif dispatcher.num_open:
            group = dispatcher.open_groups()[which % dispatcher.num_open]
            dispatcher.end(group.draw.draw_id, move)
            ended += 1
            if move is Ending.PUT_BACK:
                dispatcher.wait([group.draw], due=now + 1.0)
        assert dispatcher.num_open == opened - ended
        assert dispatcher.num_open + dispatcher.num_permits == 3
        assert sum(dispatcher.endings.values()) == ended
    assert dispatcher.num_opened == opened


def test_a_group_cannot_end_twice():
    dispatcher = Dispatcher(1)
    dispatcher.open(draw(1), 0, 0.0)
    dispatcher.end(1, Ending.SCORED)
    with pytest.raises(AssertionError, match="ended without being open"):
        dispatcher.end(1, Ending.CANCELLED)


def test_nothing_opens_without_a_permit_or_twice():
    dispatcher = Dispatcher(1)
    dispatcher.open(draw(1), 0, 0.0)
    with pytest.raises(AssertionError, match="open already"):
        dispatcher.open(draw(1), 0, 0.0)
    with pytest.raises(AssertionError, match="without a permit"):
        dispatcher.open(draw(2), 0, 0.0)


def test_tasks_wait_for_their_time_and_go_oldest_first():
    dispatcher = Dispatcher(9)
    dispatcher.wait([draw(3), draw(1)])
    dispatcher.wait([draw(2)], due=5.0)
    assert [t.draw_id for t in dispatcher.take(9, 0.0)] == [1, 3]
    assert dispatcher.next_due == 5.0
    assert dispatcher.take(9, 4.9) == []
    assert [t.draw_id for t in dispatcher.take(9, 5.0)] == [2]


def test_failures_are_forgotten_once_a_task_is_scored():
    dispatcher = Dispatcher(1)
    blamed = [Blame.TASK, Blame.WORKER, Blame.RUN, Blame.TASK]
    assert [dispatcher.count_failure(1, blame) for blame in blamed] == [1, 1, 1, 2]
    assert dispatcher.failures(1) == {Blame.TASK: 2, Blame.WORKER: 1, Blame.RUN: 1}
    dispatcher.open(draw(1), 0, 0.0)
    dispatcher.end(1, Ending.SCORED)
    assert dispatcher.failures(1) == {}
