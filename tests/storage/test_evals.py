"""Evaluations in the store: what was planned, what is done, and what a kill or a full disk leaves."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time

import pytest

from mettle.errors import StorageError, UserError
from mettle.records.tasks import GroupRecord, RolloutRecord, TaskDraw
from mettle.storage import files
from mettle.storage.claim import FolderClaim
from mettle.storage.database import Database
from mettle.storage.evals import EvalPlan, EvalStore, read_evals
from mettle.storage.rollouts import read_rollout, rollout_rows
from mettle.storage.run_dir import RunDir
from mettle.storage.schema import MIGRATIONS
from mettle.storage.shards import ShardWriter

PLAN = EvalPlan("eval", "toy", 4, 8, model="m", metadata={"env_id": "toy"})


def rollout(example_id, position=0, reward: float | None = 1.0, **values) -> RolloutRecord:
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": f"answer {example_id}"}]
    failed = {} if reward is not None else {"error_kind": "provider", "error_type": "ModelError", "error": "gone"}
    return RolloutRecord(
        f"e1-{example_id}-{position}", reward, {"right": reward or 0.0}, said, num_prompt_messages=1,
        position=position, example_id=example_id, uid=f"u{example_id}", **failed, **values,
    )  # fmt: skip


def group(*rollouts: RolloutRecord) -> GroupRecord:
    first = rollouts[0]
    return GroupRecord(TaskDraw(-1, "toy", first.uid, 0, first.example_id), 0, rollouts)


@pytest.fixture
def run_dir(tmp_path) -> RunDir:
    return RunDir(tmp_path)


@pytest.fixture
def store(run_dir):
    database = Database(run_dir.ledger, MIGRATIONS)
    yield EvalStore(database, ShardWriter(run_dir.rollouts))
    database.close()


def opened(run_dir: RunDir) -> Database:
    return Database(run_dir.ledger, MIGRATIONS, is_read_only=True)


def test_an_unfinished_evaluation_says_how_much_of_it_is_there(store, run_dir):
    eval_id = store.begin(PLAN)
    store.add(eval_id, [group(rollout(0), rollout(0, 1, None)), group(rollout("b"))])
    (row,) = read_evals(opened(run_dir))
    assert (row.state, row.num_rollouts, row.num_errors, row.num_tasks) == ("running", 3, 1, 2)
    assert (row.planned_tasks, row.planned_rollouts, row.mean) == (4, 8, None)
    store.end(eval_id, mean=1.0, interval=(0.5, 1.0), metrics={"x": 2.0}, metadata={"env_id": "toy", "time": 1.0})
    (row,) = read_evals(opened(run_dir))
    assert (row.state, row.num_rollouts, row.num_errors, row.mean, row.ci_low) == ("finished", 3, 1, 1.0, 0.5)
    assert (row.metadata["time"], row.metrics) == (1.0, {"x": 2.0})


def test_rows_are_there_without_the_shards_and_records_with_them(store, run_dir):
    eval_id = store.begin(PLAN)
    record = rollout(
        3, 1, 0.5, answer="42", info={"deep": [1]}, columns={"turn": 2}, token_usage={"output_tokens": 7.0}
    )
    store.add(eval_id, [group(record)])
    (row,) = rollout_rows(opened(run_dir), eval_id)
    assert (row.example_id, row.uid, row.position, row.reward, row.num_turns) == (3, "u3", 1, 0.5, 1)
    assert (row.excerpt, row.output_tokens, row.num_tokens, row.metrics) == ("answer 3", 7.0, 7, {"right": 0.5})
    assert read_rollout(run_dir.rollouts, row) == record


def test_a_rollout_run_again_takes_the_place_of_the_one_that_failed(store, run_dir):
    eval_id = store.begin(PLAN)
    store.add(eval_id, [group(rollout(0, 0, None)), group(rollout(1))])
    assert store.begin(PLAN, eval_id) == eval_id
    store.add(eval_id, [group(rollout(0))])
    rows = rollout_rows(opened(run_dir), eval_id)
    assert [(row.example_id, row.reward) for row in rows] == [(1, 1.0), (0, 1.0)]


def test_whatever_a_rollout_holds_it_can_be_kept(store, run_dir):
    odd: dict = {"itself": None, "number": float("inf"), "object": object}
    odd["itself"] = odd
    messages = [{"role": "user", "content": "half \ud800 a pair"}, {"role": "assistant", "content": "\ud800\x00"}]
    record = RolloutRecord("r", None, {}, messages, columns=odd, error_kind="environment", error="bad \udfff")
    eval_id = store.begin(PLAN)
    store.add(eval_id, [group(record)])
    (row,) = rollout_rows(opened(run_dir), eval_id)
    assert row.error == "bad ?"
    assert read_rollout(run_dir.rollouts, row).messages == messages


def test_a_full_disk_leaves_what_was_there_and_says_so(store, run_dir, monkeypatch):
    eval_id = store.begin(PLAN)
    store.add(eval_id, [group(rollout(0))])

    def refuse(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refuse)
        with pytest.raises(StorageError, match="no space left while appending to"):
            store.add(eval_id, [group(rollout(1))])
    store.add(eval_id, [group(rollout(2))])
    rows = rollout_rows(opened(run_dir), eval_id)
    assert [read_rollout(run_dir.rollouts, row).example_id for row in rows] == [0, 2]
    assert files.FULL_BYTES > 0


def test_a_shard_that_was_cut_costs_the_rollouts_in_it_and_no_others(store, run_dir):
    eval_id = store.begin(PLAN)
    store.add(eval_id, [group(rollout(0))])
    store.add(eval_id, [group(rollout(1))])
    shard = run_dir.rollouts / "shard-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-20])
    first, second = rollout_rows(opened(run_dir), eval_id)
    assert read_rollout(run_dir.rollouts, first).example_id == 0
    with pytest.raises(StorageError, match="cut short"):
        read_rollout(run_dir.rollouts, second)
    store.add(eval_id, [group(rollout(1))])
    assert read_rollout(run_dir.rollouts, rollout_rows(opened(run_dir), eval_id)[-1]).example_id == 1


WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from tests.storage.test_evals import *
run_dir = RunDir(Path(sys.argv[1]))
store = EvalStore(Database(run_dir.ledger, MIGRATIONS), ShardWriter(run_dir.rollouts))
eval_id = store.begin(EvalPlan("eval", "toy", 10**6, 10**6))
for number in range(10**6):
    store.add(eval_id, [group(rollout(number))])
    print(number, flush=True)
"""


def test_what_was_told_as_kept_survives_kill_9(run_dir):
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(run_dir.path), root], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        while int(process.stdout.readline() or -1) < 40:
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        told = [int(line) for line in process.stdout.read().split()]
        process.wait()
        process.stdout.close()
        database = opened(run_dir)
        row = read_evals(database)[-1]
        rows = rollout_rows(database, row.eval_id)
        # One may be kept whose telling the kill forestalled.
        assert [found.example_id for found in rows] == list(range(len(rows)))
        assert len(rows) >= (told[-1] + 1 if told else 41)
        assert row.state == "running"
        assert read_rollout(run_dir.rollouts, rows[-1]).example_id == len(rows) - 1
        database.close()


def test_two_processes_do_not_write_to_one_folder(tmp_path):
    claim = FolderClaim(tmp_path)
    code = "import sys; from pathlib import Path; from mettle.storage.claim import FolderClaim; FolderClaim(Path(sys.argv[1]))"
    other = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False)
    assert "is being written to by another process" in other.stderr
    claim.release()
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True)


def test_a_place_that_cannot_be_written_is_said_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises((StorageError, UserError), match="cannot write to"):
        FolderClaim(tmp_path / "file" / "below")


def test_the_store_of_the_first_release_is_read_and_goes_on(tmp_path):
    run_dir = RunDir(tmp_path)
    connection = sqlite3.connect(run_dir.ledger)
    connection.executescript(MIGRATIONS[0] + "; PRAGMA user_version = 1")
    row = ("old", "eval", "toy", None, 1, 0, 0, 1.0, None, json.dumps({}), 1, 5, 0, 0, None, 0, None, None, 2.0)
    connection.execute(f"INSERT INTO rollouts VALUES ({', '.join('?' * 23)})", (*row, "shard-00000.bin", 0, 1, 0.0))
    connection.execute("INSERT INTO evals VALUES (1, 'baseline', 0, 'toy', 0, 0, 1, 1, 0, 1.0, 0.0, 1.0, '{}', 0.0)")
    connection.commit()
    connection.close()
    database = opened(run_dir)
    (found,) = read_evals(database)
    assert (found.state, found.planned_tasks, found.mean) == ("finished", None, 1.0)
    assert [(r.rollout_id, r.uid, r.excerpt, r.num_tokens) for r in rollout_rows(database, 1)] == [("old", None, "", 5)]
    database.close()
    grown = Database(run_dir.ledger, MIGRATIONS)
    assert [found.state for found in read_evals(grown)] == ["finished"]
    grown.close()


def test_ten_thousand_rollouts_are_listed_in_less_than_a_second(store, run_dir):
    eval_id = store.begin(PLAN)
    store.add(eval_id, [group(rollout(number)) for number in range(10_000)])
    started = time.process_time()
    assert len(rollout_rows(opened(run_dir), eval_id)) == 10_000
    assert time.process_time() - started < 1.0
