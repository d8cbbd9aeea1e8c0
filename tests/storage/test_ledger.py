"""The ledger's accounts: transitions, replay, and what survives."""

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mettle.errors import StorageError
from mettle.records.tasks import DropReason, GroupRecord, RolloutRecord, TaskState, Turn
from mettle.records.versions import CanaryCheck, WeightVersion
from mettle.storage.database import RETRY_S, DatabaseBusy, transaction_soon
from mettle.storage.ledger import TRANSITIONS, Ledger
from mettle.storage.shards import ShardWriter, read_group


def rollout(name: str, reward: float | None = 0.5) -> RolloutRecord:
    turn = Turn(
        0, np.array([259, 97, 257, 260], np.int32), np.array([97, 257], np.int32),
        np.array([-0.1, -0.2], np.float32), np.array([3, 4], np.int32),
    )  # fmt: skip
    return RolloutRecord(
        name, reward, {"position": 0.5}, [{"role": "user", "content": "a"}], (turn,), "max_turns_reached"
    )


@pytest.fixture
def ledger(tmp_path):
    opened = Ledger(tmp_path / "run.db")
    yield opened
    opened.close()


def scored(ledger, tmp_path, count):
    writer = ShardWriter(tmp_path / "rollouts")
    draws = ledger.draw_tasks([("words", f"uid-{i}", 0, i) for i in range(count)])
    for draw in draws:
        ledger.dispatch(draw.draw_id)
        group = GroupRecord(draw, 0, (rollout(f"{draw.draw_id}-a", 1.0), rollout(f"{draw.draw_id}-b", 0.0)))
        ledger.record_scored(group, writer.append(group))
    return draws


def ship(ledger, step, draws):
    ledger.ship(
        step, f"digest-{step}", [d.draw_id for d in draws],
        num_sequences=2, num_tokens=8, staleness=(0.0, 0), orchestrator_state={"cursor": step},
    )  # fmt: skip


def test_a_task_goes_from_pending_to_trained_once(ledger, tmp_path):
    draws = scored(ledger, tmp_path, 2)
    ship(ledger, 1, draws)
    weights = WeightVersion(1, "weights/v1", "abc")
    assert ledger.record_trained(1, weights, [d.draw_id for d in draws])
    assert ledger.trained_more_than_once() == 0
    assert ledger.task_counts() == {"trained": 2}
    assert ledger.newest_version().weights == weights


def test_a_replay_counts_a_training_and_moves_no_task_twice(ledger, tmp_path):
    ship(ledger, 1, scored(ledger, tmp_path, 1))
    assert ledger.record_trained(1, WeightVersion(1, "weights/v1", "abc"), [1])
    assert ledger.record_trained(1, WeightVersion(1, "weights/v1", "abc"), [1])
    assert not ledger.record_trained(1, WeightVersion(1, "weights/v1", "other"), [1])
    assert ledger.trained_more_than_once() == 0
    assert ledger.batch(1).trainings == 3
    assert ledger.task_counts() == {"trained": 1}


def test_a_task_in_two_batches_or_twice_in_one_was_trained_more_than_once(ledger, tmp_path):
    draws = [draw.draw_id for draw in scored(ledger, tmp_path, 5)]
    held = {1: [draws[0], draws[1]], 2: [draws[2], draws[1]], 3: [draws[3], draws[3]], 4: [draws[4]]}
    with ledger.database.transaction() as connection:
        for step, draw_ids in held.items():
            connection.execute(
                "UPDATE tasks SET state = 'trained' WHERE draw_id IN (?, ?)", (draw_ids[0], draw_ids[-1])
            )
            connection.execute(
                "INSERT INTO batches (step, digest, num_sequences, num_tokens, staleness_mean, staleness_max,"
                " orchestrator_state, shipped_at, trainings) VALUES (?, 'x', 1, 1, 0, 0, '{}', 0, 1)", (step,)
            )  # fmt: skip
    for step, draw_ids in held.items():
        ledger.record_trained(step, WeightVersion(step, f"weights/v{step}", "abc"), draw_ids)
    assert ledger.trained_more_than_once() == 2


def test_what_was_trained_before_it_was_noted_is_not_called_none(ledger, tmp_path):
    ship(ledger, 1, scored(ledger, tmp_path, 2))
    ledger.record_trained(1, WeightVersion(1, "weights/v1", "abc"), [1])
    assert ledger.trained_more_than_once() is None


def test_a_step_has_one_batch(ledger, tmp_path):
    draws = scored(ledger, tmp_path, 2)
    ship(ledger, 1, draws[:1])
    with pytest.raises(StorageError, match="already has a batch"):
        ship(ledger, 1, draws[1:])
    assert ledger.task_counts() == {"scored": 1, "shipped": 1}


def test_a_refused_shipment_changes_nothing(ledger, tmp_path):
    draws = scored(ledger, tmp_path, 2)
    ledger.drop(draws[1].draw_id, DropReason.STALE)
    with pytest.raises(StorageError, match="is dropped and cannot become shipped"):
        ship(ledger, 1, draws)
    assert ledger.batch(1) is None
    assert ledger.task_counts() == {"dropped:stale": 1, "scored": 1}


def test_an_acknowledgement_of_older_bytes_does_not_count(ledger):
    first, again = WeightVersion(1, "weights/v1", "abc"), WeightVersion(1, "weights/v1", "def")
    ledger.publish(first)
    ledger.acknowledge(first, None, 1.0)
    assert ledger.version(1).acked_at is not None
    ledger.publish(again)
    assert ledger.version(1).acked_at is None


def test_a_group_comes_back_as_it_was_written(ledger, tmp_path):
    (draw,) = scored(ledger, tmp_path, 1)
    ((draw_id, ref),) = ledger.scored_groups()
    group = read_group(tmp_path / "rollouts", ref)
    assert draw_id == draw.draw_id
    assert group.draw == draw
    assert group.rewards == [1.0, 0.0]
    assert group.rollouts[0].turns[0].versions.tolist() == [3, 4]
    assert group.rollouts[0].version_range == (3, 4)


def test_past_draws_are_those_of_one_environment_in_order(ledger, tmp_path):
    scored(ledger, tmp_path, 2)
    ledger.draw_tasks([("other", "u", 0, 7), ("words", "uid-9", 0, 9)])
    assert ledger.past_draws("words") == [(0, 0.5), (1, 0.5), (9, None)]


def test_a_shard_cut_short_is_an_error_that_names_it(ledger, tmp_path):
    scored(ledger, tmp_path, 1)
    ((_, ref),) = ledger.scored_groups()
    path = tmp_path / "rollouts" / ref.shard
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(StorageError, match="cut short"):
        read_group(tmp_path / "rollouts", ref)


def test_a_full_disk_is_one_clear_line(ledger):
    ledger.database._connection.execute("PRAGMA max_page_count = 1")
    ledger.database._connection.execute(f"PRAGMA max_page_count = {ledger.database.value('PRAGMA page_count')}")
    with pytest.raises(StorageError, match=r"no space left.*nothing committed is lost"):
        ledger.journal.event("test", "fill", "x" * 4_000_000)
    assert ledger.task_counts() == {}


def test_a_connection_that_does_not_block_says_at_once_that_another_one_writes(ledger, tmp_path):
    quick = Ledger(tmp_path / "run.db", is_blocking=False)
    with ledger.database.transaction():
        with pytest.raises(DatabaseBusy):
            quick.journal.set_fact("key", 1)
        assert quick.journal.fact("key") is None  # reading waits for nobody
    quick.journal.set_fact("key", 2)
    assert ledger.journal.fact("key") == 2
    quick.close()


async def test_a_coroutine_that_wants_to_write_lets_the_loop_go_on_while_another_process_does(ledger, tmp_path):
    quick = Ledger(tmp_path / "run.db", is_blocking=False)

    async def write():
        async with transaction_soon(quick.database):
            quick.journal.set_fact("key", 1)

    with ledger.database.transaction():
        writing = asyncio.create_task(write())
        for _ in range(5):
            await asyncio.sleep(RETRY_S)  # the loop comes round
        assert not writing.done()
    await writing
    assert ledger.journal.fact("key") == 1

    async def fail():
        async with transaction_soon(quick.database):
            quick.journal.set_fact("key", 2)
            raise KeyError

    with pytest.raises(KeyError):
        await fail()
    assert ledger.journal.fact("key") == 1
    quick.close()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(list(TaskState)), max_size=8))
def test_only_listed_transitions_are_possible(tmp_path_factory, states):
    ledger = Ledger(tmp_path_factory.mktemp("ledger") / "run.db")
    (draw,) = ledger.draw_tasks([("e", "u", 0, 0)])
    current = TaskState.PENDING
    for state in states:
        with ledger.database.transaction() as connection:
            if state in TRANSITIONS[current]:
                ledger._move(connection, draw.draw_id, state)
                current = state
            else:
                with pytest.raises(StorageError, match="cannot become"):
                    ledger._move(connection, draw.draw_id, state)
    assert [d.draw_id for d in ledger.tasks_in(current)] == [draw.draw_id]
    ledger.close()


class Clock:
    """Says a later second each time."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_attempts_are_counted_and_what_came_to_nothing_is_pending_again(ledger):
    draws = ledger.draw_tasks([("words", f"uid-{i}", 0, i) for i in range(3)])
    assert [ledger.attempts(draw.draw_id) for draw in draws] == [0, 0, 0]
    for draw in draws:
        ledger.dispatch(draw.draw_id)
    ledger.put_back([draws[0].draw_id, draws[2].draw_id])
    ledger.dispatch(draws[2].draw_id)
    assert [ledger.attempts(draw.draw_id) for draw in draws] == [1, 1, 2]
    assert ledger.tasks_in(TaskState.PENDING) == [draws[0]]
    assert ledger.tasks_in(TaskState.IN_FLIGHT) == draws[1:]
    assert ledger.attempts(99) == 0


def test_a_task_that_nobody_drew_moves_nowhere(ledger):
    with pytest.raises(StorageError, match="task draw 7 is not in the ledger"):
        ledger.dispatch(7)


def test_a_row_is_drawn_once_in_an_epoch(ledger):
    (first,) = ledger.draw_tasks([("words", "u", 0, 0)])
    with pytest.raises(StorageError):
        ledger.draw_tasks([("words", "new", 0, 1), ("words", "u", 0, 0)])
    assert ledger.tasks_in(TaskState.PENDING) == [first], "all of them or none"
    assert len(ledger.draw_tasks([("words", "u", 1, 0), ("other", "u", 0, 0)])) == 2


def record(ledger, tmp_path, *rewards, drop=None):
    number = sum(ledger.task_counts().values())
    (draw,) = ledger.draw_tasks([("words", f"uid-{number}", 0, number)])
    ledger.dispatch(draw.draw_id)
    group = GroupRecord(draw, 2, tuple(rollout(f"{draw.draw_id}-{i}", reward) for i, reward in enumerate(rewards)))
    ref = ShardWriter(tmp_path / "rollouts").append(group)
    ledger.record_scored(group, ref, drop=drop)
    return draw, ref


def test_a_scored_group_has_the_mean_and_the_spread_of_the_rewards_that_there_are(ledger, tmp_path):
    draw, ref = record(ledger, tmp_path, 1.0, None, 0.5)
    row = ledger.database.row("SELECT * FROM groups WHERE draw_id = ?", (draw.draw_id,))
    assert (row["reward_mean"], row["reward_std"]) == (0.75, 0.25)
    assert (row["shard"], row["offset"], row["length"]) == (ref.shard, ref.offset, ref.length)
    assert ledger.scored_groups() == [(draw.draw_id, ref)]
    nothing, _ = record(ledger, tmp_path, None, None)
    row = ledger.database.row("SELECT * FROM groups WHERE draw_id = ?", (nothing.draw_id,))
    assert (row["reward_mean"], row["reward_std"]) == (None, None)


def test_a_group_can_be_scored_and_dropped_in_one(ledger, tmp_path):
    draw, _ = record(ledger, tmp_path, 1.0, 1.0, drop=DropReason.ZERO_ADVANTAGE)
    assert ledger.task_counts() == {f"dropped:{DropReason.ZERO_ADVANTAGE.value}": 1}
    assert ledger.scored_groups() == []
    assert ledger.past_draws("words") == [(0, 1.0)]
    with pytest.raises(StorageError, match="is dropped and cannot become shipped"):
        ship(ledger, 1, [draw])


def test_a_batch_is_what_was_shipped_and_the_last_is_that_of_the_highest_step(tmp_path):
    ledger = Ledger(tmp_path / "run.db", clock=Clock())
    assert ledger.last_batch() is None
    assert ledger.batches() == []
    draws = scored(ledger, tmp_path, 3)
    for step in (2, 1, 10):
        ledger.ship(
            step, f"digest-{step}", [draws.pop().draw_id], num_sequences=2, num_tokens=8, staleness=(0.5, 3),
            orchestrator_state={"cursor": step},
        )  # fmt: skip
    assert [batch.step for batch in ledger.batches()] == [1, 2, 10]
    last = ledger.last_batch()
    assert last == ledger.batch(10)
    assert (last.digest, last.num_sequences, last.num_tokens) == ("digest-10", 2, 8)
    assert (last.staleness_mean, last.staleness_max, last.orchestrator_state) == (0.5, 3, {"cursor": 10})
    assert (last.trained_at, last.weights_digest, last.trainings) == (None, None, 0)
    assert ledger.batch(1).shipped_at < last.shipped_at
    assert [row["step"] for row in ledger.database.rows("SELECT DISTINCT step FROM rollouts ORDER BY step")] == [
        1,
        2,
        10,
    ]
    ledger.close()


def test_training_a_step_moves_its_own_tasks_and_no_others(ledger, tmp_path):
    draws = scored(ledger, tmp_path, 3)
    ship(ledger, 1, draws[:2])
    ship(ledger, 2, draws[2:])
    assert ledger.record_trained(1, WeightVersion(1, "weights/v1", "abc"), [d.draw_id for d in draws[:2]])
    assert ledger.task_counts() == {"shipped": 1, "trained": 2}
    assert (ledger.batch(1).trainings, ledger.batch(2).trainings) == (1, 0)
    assert (ledger.batch(1).weights_digest, ledger.batch(2).weights_digest) == ("abc", None)
    assert ledger.batch(1).trained_at is not None
    with pytest.raises(StorageError, match="step 3 was trained but never shipped"):
        ledger.record_trained(3, WeightVersion(3, "weights/v3", "x"), [])
    assert [row.weights.version for row in ledger.versions()] == [1]


def test_versions_come_in_order_and_the_newest_is_the_highest(tmp_path):
    ledger = Ledger(tmp_path / "run.db", clock=Clock())
    assert (ledger.newest_version(), ledger.version(0), ledger.versions()) == (None, None, [])
    for version in (0, 10, 2):
        ledger.publish(WeightVersion(version, f"weights/v{version}", f"digest-{version}"))
    assert [row.weights.version for row in ledger.versions()] == [0, 2, 10]
    newest = ledger.newest_version()
    assert newest.weights == WeightVersion(10, "weights/v10", "digest-10")
    assert (newest.acked_at, newest.canary, newest.update_ms) == (None, None, None)
    assert ledger.version(2).published_at > newest.published_at
    ledger.close()


def test_an_acknowledgement_has_its_canary_where_there_was_one(ledger):
    for version in (1, 2):
        ledger.publish(WeightVersion(version, "w", f"digest-{version}"))
    ledger.acknowledge(WeightVersion(1, "w", "digest-1"), CanaryCheck(1, 0.25, 0.5, 64), 12.5)
    ledger.acknowledge(WeightVersion(2, "w", "digest-2"), None, 3.0)
    first, second = ledger.versions()
    assert (first.canary.version, first.canary.mean_abs_diff, first.canary.max_abs_diff) == (1, 0.25, 0.5)
    assert first.canary.num_tokens == 0, "the ledger keeps the figures and not how many they are of"
    assert (first.update_ms, second.update_ms, second.canary) == (12.5, 3.0, None)
    assert second.acked_at is not None
    ledger.publish(WeightVersion(1, "w", "other"))
    assert ledger.version(1).canary is None, "it was of other weights"


def test_a_reader_sees_what_was_written_and_writes_nothing(ledger, tmp_path):
    scored(ledger, tmp_path, 1)
    reader = Ledger(tmp_path / "run.db", is_read_only=True)
    assert reader.task_counts() == {"scored": 1}
    with pytest.raises(StorageError):
        reader.draw_tasks([("words", "new", 0, 1)])
    reader.close()


def test_the_newest_figures_and_names_are_found_without_reading_all(tmp_path):
    ledger = Ledger(tmp_path / "run.db")
    journal = ledger.journal
    assert (journal.metric_names(), journal.latest()) == ([], {})
    for step in (3, 1, 2):
        journal.record_metrics(step, {"b": step * 1.5, "a/x": 1.0} if step < 3 else {"b": step * 1.5})
    assert journal.metric_names() == ["a/x", "b"]
    assert journal.latest() == {"a/x": (2, 1.0), "b": (3, 4.5)}
    assert journal.metric("b", after=1) == [(2, 3.0), (3, 4.5)]
    ledger.close()


def test_the_newest_acknowledged_version_is_of_the_weights_that_are_published(ledger):
    assert ledger.newest_acknowledged() is None
    for version in (0, 1, 2):
        weights = WeightVersion(version, f"weights/v{version}", f"digest-{version}")
        ledger.publish(weights)
        if version < 2:
            ledger.acknowledge(weights, None, 1.0)
    assert ledger.newest_acknowledged() == 1
    ledger.publish(WeightVersion(1, "weights/v1", "other bytes"))
    assert ledger.newest_acknowledged() == 0
