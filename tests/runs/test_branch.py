"""`mettle rl branch`: what a branch takes from its parent, and what is refused before anything is made."""

import json
import shutil

import pytest
from stories import CONFIG, ENVIRONMENTS

from mettle.errors import UserError
from mettle.orchestrator.config import OrchestratorConfig
from mettle.orchestrator.simulator import SimulatedWorld, simulate
from mettle.processes.virtual_time import run_virtually
from mettle.runs import launch
from mettle.runs.branch import branch, settings_of
from mettle.runs.create import write_configs
from mettle.runs.stored import read_run_config
from mettle.storage.checkpoints import write_checkpoint
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir
from mettle.storage.shards import read_group

STEPS = 12
SETTINGS = {"max_steps": STEPS, "batch_size": 16, "group_size": 8, "envs": [{"id": "ascii-share"}]}


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """A run of twelve steps whose trainer and engine were simulated."""
    folder = tmp_path_factory.mktemp("played")
    options = OrchestratorConfig.model_validate(SETTINGS | {"eval": {"num_examples": 0}})
    run_virtually(simulate(folder, options, SimulatedWorld()))
    return folder


@pytest.fixture
def parent(played, tmp_path, config, monkeypatch):
    """That run with a checkpoint of its eighth step."""
    monkeypatch.setenv("METTLE_ENVIRONMENTS", str(ENVIRONMENTS))
    monkeypatch.chdir(tmp_path)
    run_dir = RunDir(tmp_path / "runs" / "first")
    shutil.copytree(played, run_dir.path)
    write_configs(run_dir, launch.load_run_config([config], ["--orchestrator.batch_size", "16"]))
    write_checkpoint(run_dir.checkpoints, 8, lambda folder: (folder / "state").write_bytes(b"eight"), {"drawn": {}})
    run_dir.model.mkdir()
    (run_dir.model / "config.json").write_text("{}")
    return run_dir


def made(parent, *overrides, step=8, path=None):
    return branch(parent, step, overrides, path, parent.path.parent)


def test_a_branch_has_the_first_steps_of_its_parent_and_leaves_that_as_it_is(parent):
    before = {path: path.stat().st_mtime_ns for path in parent.path.rglob("*") if path.is_file()}
    new = made(parent, "--trainer.optim.lr", "3e-5")
    assert new.name == "first-v8"
    assert {path: path.stat().st_mtime_ns for path in before} == before
    theirs, ours = Ledger(parent.ledger, is_read_only=True), Ledger(new.ledger, is_read_only=True)
    assert [row.digest for row in ours.batches()] == [row.digest for row in theirs.batches()][:8]
    assert ours.journal.fact("branched_from") == {"run": str(parent.path), "step": 8}
    assert ours.journal.fact("state") == "stopped"
    assert ours.newest_version().weights.path == str(new.version(8))
    for _, ref in ours.groups_of(8):
        assert read_group(new.rollouts, ref).rollouts
    theirs.close(), ours.close()
    assert (new.checkpoints / "step-8" / "trainer" / "state").read_bytes() == b"eight"
    config = read_run_config(new)
    assert (config.trainer.optim.lr, config.max_steps, config.orchestrator.batch_size) == (3e-5, STEPS, 16)
    assert json.loads(new.config("trainer").read_text())["model"] == str(new.model)


def test_what_follows_from_a_setting_follows_from_the_new_one(parent):
    config = read_run_config(made(parent, "--max_steps", "40"))
    assert (config.max_steps, config.trainer.max_steps, config.orchestrator.max_steps) == (40, 40, 40)


def test_only_what_somebody_set_is_taken_over(parent):
    assert settings_of(parent, read_run_config(parent)).keys() == {
        "max_steps", "seed", "orchestrator", "trainer", "deployment",
    }  # fmt: skip
    assert "[orchestrator]" in CONFIG


def test_what_the_parent_writes_later_is_not_the_branchs(parent):
    new = made(parent)
    sizes = {path.name: path.stat().st_size for path in new.rollouts.iterdir()}
    for path in parent.rollouts.iterdir():
        path.write_bytes(path.read_bytes() + b"more")
    assert {path.name: path.stat().st_size for path in new.rollouts.iterdir()} == sizes


def test_branches_of_one_step_have_names_of_their_own(parent):
    assert [made(parent).name for _ in range(2)] == ["first-v8", "first-v8-2"]


@pytest.mark.parametrize(
    ("overrides", "step", "said"),
    [
        ((), 7, r"no complete checkpoint of step 7; it has those of steps 0, 8"),
        (("--max_steps", "8"), 8, r"step 8 is the last of max_steps 8: give the branch more"),
        (("--seed", "9"), 8, r"seed is what the first 8 steps of run first were made with"),
        (("--model.preset", "small"), 8, r"model is what the first 8 steps"),
        (("--trainer.optim.type", "muon"), 8, r"trainer\.optim\.type of run first is 'adamw', and a branch goes on with"),
        (("--orchestrator.batch_sise", "8"), 8, r"unknown key 'orchestrator.batch_sise'.*'batch_size'"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_is_made(parent, overrides, step, said):
    with pytest.raises(UserError, match=said):
        made(parent, *overrides, step=step)
    assert [path.name for path in parent.path.parent.iterdir()] == ["first"]


def test_another_seed_may_begin_from_the_initial_policy(parent):
    new = made(parent, "--seed", "9", step=0)
    ledger = Ledger(new.ledger, is_read_only=True)
    assert (ledger.batches(), ledger.task_counts()) == ([], {})
    ledger.close()
    assert read_run_config(new).trainer.seed == 9


def test_a_place_that_is_taken_is_left_alone(parent, tmp_path):
    (tmp_path / "here").mkdir()
    with pytest.raises(UserError, match="is there already"):
        made(parent, path=tmp_path / "here")


def test_a_full_disk_leaves_no_half_of_a_run(parent, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mettle.runs.branch.copy_ledger", full)
    with pytest.raises(Exception, match=r"No space left|disk"):
        made(parent)
    assert [path.name for path in parent.path.parent.iterdir()] == ["first"]
