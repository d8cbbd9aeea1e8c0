"""The database: what was accepted and what came of it outlives a crash, and nobody sees another's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from mettle.trainer.service.records import AdapterSpec, Operation, Outcome, Sampler, SavedWeights, TrainedModel
from mettle.trainer.service.store import Store

SPEC = AdapterSpec(4, 0)


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def store(tmp_path):
    found = Store(tmp_path / "service.db", Clock())
    found.add_session("s", "ann", {"tags": []})
    found.add_model(TrainedModel("s:train:0", "s", "ann", "org/tiny", SPEC, {}, 1.0, 1.0, -1, -1, ""))
    yield found
    found.database.close()


def operation(number, kind="forward_backward", body=b"data", model="s:train:0"):
    return Operation(f"{model}:{number}", kind, "ann", "s", model, number, body, b"d")


def test_an_operation_that_is_sent_again_is_the_one_that_is_known(store):
    store.accept(operation(1))
    store.settle(operation(1), Outcome("done", "forward_backward", b"result"))
    again = store.accept(operation(1, body=b"other"))
    assert (again.state, again.body) == ("done", b"data")
    assert store.outcome("s:train:0:1").result == b"result"


def test_an_outcome_is_kept_as_it_was_first(store):
    store.accept(operation(1))
    store.settle(operation(1), Outcome("done", "forward_backward", b"first"))
    store.settle(operation(1), Outcome("failed", "forward_backward", error="second"))
    assert store.outcome("s:train:0:1") == Outcome("done", "forward_backward", b"first")


def test_bodies_are_kept_until_a_snapshot_has_what_they_did(store):
    for number, kind in ((1, "forward_backward"), (2, "optim_step"), (3, "forward_backward"), (4, "forward")):
        store.accept(operation(number, kind))
        store.settle(operation(number, kind), Outcome("done", kind))
    assert [each.seq_id for each in store.to_repeat("s:train:0", -1)] == [1, 2, 3]
    store.record_snapshot("s:train:0", "v2", 2)
    model = store.model("s:train:0")
    assert (model.snapshot, model.snapshot_seq, model.last_seq) == ("v2", 2, 4)
    assert [(each.seq_id, each.body) for each in store.to_repeat("s:train:0", 2)] == [(3, b"data")]
    assert store.operation("s:train:0:1").body == b""


def test_what_was_refused_has_an_outcome_at_once(store):
    store.accept(operation(1), failed="rank is 0")
    assert store.outcome("s:train:0:1") == Outcome("failed", "forward_backward", category="user", error="rank is 0")


def test_what_waits_for_a_missing_number_is_given_up(store):
    store.accept(operation(2))
    store.accept(operation(3))
    assert store.give_up("s:train:0", [2, 3], "1 is missing") == ["s:train:0:2", "s:train:0:3"]
    assert (store.waiting(), store.model("s:train:0").last_seq) == ([], 3)


def test_nobody_sees_what_is_anothers(store):
    store.put_sampler(Sampler("s:sample:0", "s", "ann", "org/tiny", "", "", 1.0))
    path = "tinker://s:train:0/weights/a"
    store.put_checkpoint(SavedWeights(path, "s:train:0", "ann", "training", "a", "f", 10, 1.0, None, spec=SPEC))
    for owner, is_there in (("ann", True), ("ben", False)):
        found = (
            store.session("s", owner), store.model("s:train:0", owner), store.sampler("s:sample:0", owner),
            store.checkpoint(path, owner),
        )  # fmt: skip
        assert [each is not None for each in found] == [is_there] * 4
        assert bool(store.checkpoints(owner)) == bool(store.models(owner)) == bool(store.sessions(owner)) == is_there
    store.change_checkpoint(path, expires_at=None, is_public=True)
    assert store.checkpoint(path, "ben") is not None


def test_a_checkpoint_is_gone_when_its_time_is_over(store):
    path = "tinker://s:train:0/weights/a"
    store.put_checkpoint(SavedWeights(path, "s:train:0", "ann", "training", "a", "f", 10, 1.0, 1000.5))
    assert store.checkpoint(path, "ann") is not None
    store.clock.now = 1001.0
    assert store.checkpoint(path, "ann") is None
    assert [each.path for each in store.expired_checkpoints()] == [path]


def test_only_samples_are_cancelled(store):
    store.accept(operation(1))
    store.accept(Operation("s:sample:0:1", "sample", "ann", "s", "", -1, b"", b""))
    assert not store.cancel("s:train:0:1", "no")
    assert store.cancel("s:sample:0:1", "cancelled")
    assert not store.cancel("s:sample:0:1", "cancelled")


def test_results_are_kept_until_their_session_is_over_for_a_while(store):
    store.accept(operation(1, "forward"))
    store.settle(operation(1, "forward"), Outcome("done", "forward", b"result"))
    assert store.forget_results(1000.0) == 0
    store.clock.now = 2000.0
    assert store.forget_results(1500.0) == 1


WRITER = """
import os, sys
from pathlib import Path
from mettle.trainer.service.records import Operation, Outcome
from mettle.trainer.service.store import Store
store = Store(Path(sys.argv[1]))
for number in range(1, 1000):
    kind = "optim_step"
    work = Operation(f"s:train:0:{number}", kind, "ann", "s", "s:train:0", number, b"body", b"d")
    store.accept(work)
    print("accepted", number, flush=True)
    store.settle(work, Outcome("done", kind, b"r"))
    print("done", number, flush=True)
"""


def test_a_kill_loses_nothing_that_was_said(store):
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(store.database.path)], stdout=subprocess.PIPE, text=True
    )
    said = []
    for line in child.stdout:
        said.append(line.split())
        if line == "accepted 40\n":
            os.kill(child.pid, signal.SIGKILL)
            break
    said += [line.split() for line in child.stdout if line.endswith("\n")]
    child.stdout.close()
    assert child.wait() == -signal.SIGKILL
    for word, number in said:
        state = store.outcome(f"s:train:0:{number}").state
        assert state == "done" or (word == "accepted" and state == "waiting")
    assert store.model("s:train:0").last_seq >= max(int(n) for word, n in said if word == "done")
