"""A run that failed over a mistake before it did anything is no obstacle to the one without the mistake."""

import json
from contextlib import closing

import pytest
from stories import ENVIRONMENTS

from mettle.errors import UserError
from mettle.records.tasks import DropReason, GroupRecord
from mettle.records.versions import WeightVersion
from mettle.runs.create import create_run
from mettle.runs.launch import drive, load_run_config
from mettle.runs.lock import RunLock
from mettle.runs.remaking import can_be_made_again, clear
from mettle.storage.ledger import Ledger
from mettle.storage.shards import BlockRef

MISTAKEN = '[{id = "reverse-text", args = {num_train = -1, num_eval = 8}}]'
MENDED = '[{id = "reverse-text", args = {num_train = 64, num_eval = 8}}]'


@pytest.fixture
def made(config, tmp_path, monkeypatch):
    """A run of these settings, made or made again in the same place."""
    monkeypatch.setenv("METTLE_ENVIRONMENTS", str(ENVIRONMENTS))

    def make(*overrides):
        return create_run(load_run_config([config], overrides), tmp_path / "run")

    return make


def fail(run_dir, **facts):
    with closing(Ledger(run_dir.ledger)) as ledger:
        for name, value in {"state": "failed", **facts}.items():
            ledger.journal.set_fact(name, value)


def test_what_its_environment_refuses_ends_a_run_with_its_line_and_it_is_made_again(made):
    run_dir = made("--orchestrator.envs", MISTAKEN)
    with pytest.raises(UserError, match=r"has no tasks to train on; .*with other settings makes the run anew") as told:
        drive(run_dir, is_quiet=True)
    assert "\n" not in str(told.value)
    assert run_dir.version(0).exists()
    assert made("--orchestrator.envs", MENDED) == run_dir
    assert json.loads(run_dir.config("run").read_text())["orchestrator"]["envs"][0]["args"]["num_train"] == 64
    assert not run_dir.version(0).exists()
    assert not run_dir.model.exists()
    with closing(Ledger(run_dir.ledger, is_read_only=True)) as ledger:
        assert ledger.journal.fact("state") == "preparing"
        assert ledger.newest_version() is None
    assert (run_dir.logs / "orchestrator.log").exists()


def test_only_what_failed_and_trained_nothing_gives_way(made):
    run_dir = made()
    assert not can_be_made_again(run_dir), "nobody has started it"
    fail(run_dir, state="stopped")
    assert not can_be_made_again(run_dir)
    fail(run_dir)
    assert can_be_made_again(run_dir)
    with RunLock(run_dir):
        assert not can_be_made_again(run_dir)
        with pytest.raises(UserError, match="there is a run at"):
            made()
    fail(run_dir, branched_from={"run": "another", "step": 0})
    assert not can_be_made_again(run_dir)


def test_versions_and_warm_ups_are_never_cleared(made):
    run_dir = made()
    fail(run_dir)
    with closing(Ledger(run_dir.ledger)) as ledger:
        ledger.publish(WeightVersion(0, "/v0", "sha256:0"))
        assert can_be_made_again(run_dir)
        ledger.publish(WeightVersion(1, "/v1", "sha256:1"))
    assert not can_be_made_again(run_dir)
    with pytest.raises(UserError, match="there is a run at"):
        made()


def test_groups_that_were_rolled_out_are_never_cleared(made):
    run_dir = made()
    fail(run_dir)
    with closing(Ledger(run_dir.ledger)) as ledger:
        (draw,) = ledger.draw_tasks([("words", "uid", 0, 0)])
        ledger.dispatch(draw.draw_id)
        assert can_be_made_again(run_dir)
        ledger.record_scored(GroupRecord(draw, 0, ()), BlockRef("shard-00000.bin", 0, 1), drop=DropReason.ERRORS)
    assert not can_be_made_again(run_dir)


def test_what_was_resumed_between_the_look_and_the_lock_is_never_cleared(made):
    run_dir = made()
    fail(run_dir)
    assert can_be_made_again(run_dir)
    with closing(Ledger(run_dir.ledger)) as ledger:
        ledger.publish(WeightVersion(1, "/v1", "sha256:1"))
    with pytest.raises(UserError, match="has been resumed meanwhile"):
        clear(run_dir)
    assert run_dir.ledger.exists()


def test_a_warm_up_that_has_begun_is_kept(made, tmp_path):
    run_dir = made("--warm_up.enabled", "true")
    fail(run_dir)
    assert can_be_made_again(run_dir)
    (run_dir.path / "sft" / "checkpoints").mkdir()
    assert not can_be_made_again(run_dir)
    (run_dir.path / "sft" / "checkpoints").rmdir()
    fail(run_dir, is_warm=True)
    assert not can_be_made_again(run_dir)


def test_what_another_environment_refuses_is_told_before_a_warm_up(made, tmp_path):
    other = '[{id = "reverse-text", args = {num_train = 8}}, {id = "arithmetic", args = {operations = "?"}}]'
    for overrides in (["--orchestrator.envs", other], ["--orchestrator.eval.envs", other]):
        with pytest.raises(UserError, match=r"failed to load environment 'arithmetic': .*not '\?'"):
            made("--warm_up.enabled", "true", *overrides)
        assert not (tmp_path / "run").exists()
    made("--warm_up.enabled", "true", "--orchestrator.eval.envs", other, "--orchestrator.eval.num_examples", "0")
