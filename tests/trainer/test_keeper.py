"""A checkpoint is written from a copy while training goes on: the bytes of its own step, and nothing counts too early."""

import json
import threading

import pytest

from mettle.errors import StorageError
from mettle.storage.checkpoints import newest_checkpoint
from mettle.storage.weights import read_version
from mettle.trainer import keeper
from mettle.trainer.learner import Learner

LIMIT_S = 60.0


@pytest.fixture
def beside(monkeypatch):
    """Every state counts as a large one."""
    monkeypatch.setattr(keeper, "BESIDE_BYTES", 0)


def test_a_checkpoint_that_is_written_during_later_steps_holds_its_own_step(make_run, train_here, beside, monkeypatch):
    """The files of step 2 do not count until step 3 is trained, and a run that goes on from them ends in its bytes."""
    run_dir = make_run("beside", interval=2, shipped=3)
    trained, wait_for, seen = threading.Event(), keeper.outcome, []
    step = Learner.step

    def hold(files):
        assert trained.wait(LIMIT_S)
        seen.append(newest_checkpoint(run_dir.checkpoints))
        wait_for(files)

    def count(self, params):
        found = step(self, params)
        if self.tenant.num_steps == 3:
            trained.set()
        return found

    monkeypatch.setattr(keeper, "outcome", hold)
    monkeypatch.setattr(Learner, "step", count)
    assert train_here(run_dir) == 3
    assert seen[0] is None, "the checkpoint of step 2 was there before it was written"
    assert newest_checkpoint(run_dir.checkpoints).step == 3
    resumed = make_run("resumed", shipped=3)
    resumed.checkpoints.mkdir()
    newest_checkpoint(run_dir.checkpoints, at_step=2).path.rename(resumed.checkpoints / "step-2")
    train_here(resumed)
    assert read_version(resumed.version(3)).digest == read_version(run_dir.version(3)).digest


def test_what_keeps_a_checkpoint_from_being_written_ends_the_run_and_leaves_the_last_one(
    make_run, train_here, beside, monkeypatch
):
    run_dir = make_run(interval=1)
    wait_for, calls = keeper.outcome, []

    def fail(files):
        wait_for(files)
        calls.append(files)
        if len(calls) == 2:
            raise RuntimeError("unexpected pos 704 vs 598")

    monkeypatch.setattr(keeper, "outcome", fail)
    with pytest.raises(StorageError, match=r"no space left.*free some space"):
        train_here(run_dir)
    assert [path.name for path in run_dir.checkpoints.iterdir()] == ["step-1"]


@pytest.mark.parametrize(
    ("config", "num_bytes", "expected"), [({}, 0, True), ({"asynchronous": False}, 0, False), ({}, 2**40, False)]
)
def test_training_waits_for_a_small_state_and_where_it_is_told_to(
    make_run, train_here, monkeypatch, config, num_bytes, expected
):
    asked = []
    monkeypatch.setattr(keeper, "BESIDE_BYTES", num_bytes)
    save = keeper.save_learner_beside
    monkeypatch.setattr(keeper, "save_learner_beside", lambda *given: asked.append(given) or save(*given))
    run_dir = make_run(shipped=1, max_steps=1)
    config_file = run_dir.config("trainer")
    settings = json.loads(config_file.read_text())
    settings["checkpoint"] |= config
    config_file.write_text(json.dumps(settings))
    train_here(run_dir)
    assert bool(asked) is expected
    assert newest_checkpoint(run_dir.checkpoints).step == 1
