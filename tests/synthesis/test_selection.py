"""The best rollouts are kept, each other is counted by its reason, and sides stay."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.synthesis.conftest import row

from mettle.synthesis.config import Rules
from mettle.synthesis.selection import select


def test_the_best_of_each_task_is_kept_and_every_other_rollout_is_counted_once():
    rows = [
        row(0, "a", 0.6), row(0, "b", 0.9), row(0, "c", 0.2), row(0, "d", None),
        row(1, "x", 1.0, is_truncated=True), row(1, "y", 1.0), row(2, "z", 0.1),
    ]  # fmt: skip
    selection = select(rows, Rules(min_reward=0.5, held_out=0.0))
    assert [(kept.task, kept.chats[-1].messages[-1]["content"]) for kept in selection.train] == [
        ("t0", "b"),
        ("t1", "y"),
    ]
    assert selection.left_out == {
        "not among the best of its task": 1, "reward below the threshold": 2, "failed": 1, "cut off": 1,
    }  # fmt: skip
    assert selection.num_rollouts == len(rows) == len(selection.train) + sum(selection.left_out.values())


rollouts = st.lists(
    st.tuples(st.integers(0, 9), st.sampled_from(["a", "b", "c"]), st.none() | st.floats(0, 1)), max_size=40
)


@settings(max_examples=60, deadline=None)
@given(rollouts, st.randoms(use_true_random=False), st.integers(1, 3))
def test_the_order_in_which_rollouts_end_changes_nothing_that_is_kept(found, shuffler, best):
    rules = Rules(min_reward=0.3, best=best, held_out=0.5)
    rows = [row(task, said, reward) for task, said, reward in found]

    def kept(selection: Any) -> tuple[Any, ...]:
        sides = (selection.train, selection.held_out)
        return tuple(
            sorted((each.task, each.row["completion"][0]["content"], each.row["reward"]) for each in side)
            for side in sides
        )

    first = select(rows, rules)
    shuffled = list(rows)
    shuffler.shuffle(shuffled)
    assert kept(select(shuffled, rules)) == kept(first)
    assert not {each.task for each in first.train} & {each.task for each in first.held_out}


def test_a_task_stays_on_its_side_when_more_is_generated():
    rules = Rules(min_reward=0.5, held_out=0.3)
    few = select([row(task) for task in range(50)], rules)
    many = select([row(task) for task in range(200)], rules)
    assert {each.task for each in few.held_out} <= {each.task for each in many.held_out}
    assert 0.2 < len(many.held_out) / 200 < 0.4
