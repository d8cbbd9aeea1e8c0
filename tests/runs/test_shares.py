"""What may train beside what: refused in one line that names the file, before anything is made."""

import json
import os
import time

import pytest

from mettle.config import load_config
from mettle.errors import UserError
from mettle.runs.config import RunConfig
from mettle.runs.launch import process_specs, run
from mettle.runs.member import main
from mettle.runs.membership import membership
from mettle.runs.shares import NamedRun, create_share
from mettle.runs.supervisor import Supervisor
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir
from mettle.storage.share_dir import TenantWord

TEXT = """
max_steps = 2
model = { lora = { rank = 4 } }
orchestrator = { batch_size = 8, group_size = 4, envs = [{ id = "reverse-text" }] }
deployment = { hub = false }
"""


@pytest.fixture
def base(tmp_path):
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def named(tmp_path):
    """A run's config from the usual file and overrides."""

    def make(name, *overrides):
        path = tmp_path / f"{name}.toml"
        path.write_text(TEXT)
        return NamedRun(path.name, name, load_config(RunConfig, [path], list(overrides)))

    return make


def test_a_share_whose_making_was_stopped_is_made_by_the_same_command(base, named, tmp_path, monkeypatch):
    def stopped(*_):
        raise KeyboardInterrupt

    runs = [named("a"), named("b")]
    for where in ("create_run", "ShareDir.write_about"):
        with monkeypatch.context() as patch:
            patch.setattr(f"mettle.runs.shares.{where}", stopped)
            with pytest.raises(KeyboardInterrupt):
                create_share(runs, base, tmp_path / "s")
        assert [path.name for path in (tmp_path / "s" / "runs").iterdir()] == []
    (tmp_path / "s" / "model").symlink_to(tmp_path)  # of one that was killed
    assert create_share(runs, base, tmp_path / "s").model.resolve() == base


def test_each_run_gets_a_directory_of_its_own_on_the_common_base(base, named, tmp_path):
    share = create_share([named("a"), named("b", "--max-steps", "3", "--seed", "7")], base, tmp_path / "s")
    assert share.about()["runs"] == ["a", "b"]
    assert share.model.resolve() == base
    for name, steps in (("a", 2), ("b", 3)):
        run_dir = RunDir(share.runs / name)
        settings = json.loads(run_dir.config("orchestrator").read_text())
        assert (settings["served_model_name"], settings["share"]) == (name, str(share.path))
        assert json.loads(run_dir.config("trainer").read_text())["max_steps"] == steps
        assert run_dir.model.resolve() == base
        config = RunConfig.model_validate_json(run_dir.config("run").read_text())
        assert [spec.name for spec in process_specs(run_dir, config, is_warm=True)] == ["orchestrator"]


@pytest.mark.parametrize(
    ("overrides", "kept"), [((), 1), (("--inference.max-adapter-versions", "3"), 3)], ids=["unsaid", "said"]
)
def test_the_engine_keeps_one_version_of_each_runs_adapter_unless_more_are_asked_for(
    base, named, tmp_path, overrides, kept
):
    share = create_share([named("a", *overrides), named("b", *overrides)], base, tmp_path / "s")
    assert json.loads(share.as_run.config("inference").read_text())["max_adapter_versions"] == kept


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["--model.path", "OTHER"], r"b\.toml: model\.path is .*, and the share's base"),
        (["--model.preset", "tiny"], r"b\.toml: model\.preset makes a model of its own"),
        (["--warm-up.enabled"], r"b\.toml: warm_up changes the base"),
        (["--deployment.num-trainer-ranks", "2"], r"b\.toml: deployment\.num_trainer_ranks is 1 in a share"),
        (["--inference.replicas", "2"], r"b\.toml: a share has one embedded engine"),
        (["--inference.outside.port", "7"], r"b\.toml: inference\.outside: the runs of a share sample from adapters"),
        (["--inference.max-slots", "7"], r"b\.toml: inference\.max_slots is 7, and that of a\.toml is 256"),
        (["--trainer.dtype", "bfloat16"], r"b\.toml: trainer\.dtype is 'bfloat16', and that of a\.toml is 'float32'"),
        (["--orchestrator.envs.0.id", "reverse-txet"], r"b\.toml: .*reverse-txet"),
    ],
    ids=["path", "preset", "warm-up", "ranks", "replicas", "outside", "slots", "dtype", "environment"],
)
def test_a_file_that_does_not_fit_is_refused_before_anything_is_made(base, named, tmp_path, overrides, said):
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")
    changed = named("b", *(str(other) if word == "OTHER" else word for word in overrides))
    with pytest.raises(UserError, match=said):
        create_share([named("a"), changed], base, tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_a_run_without_adapters_two_of_a_name_and_too_many_are_refused(base, named, tmp_path):
    full = tmp_path / "full.toml"
    full.write_text(TEXT.replace("model = { lora = { rank = 4 } }", ""))
    with pytest.raises(UserError, match=r"full\.toml: a share trains adapters; set one, as in"):
        create_share([NamedRun("full.toml", "full", load_config(RunConfig, [full]))], base, tmp_path / "s")
    with pytest.raises(UserError, match=r"its name 'a' is that of a\.toml, too"):
        create_share([named("a"), named("a")], base, tmp_path / "s")
    with pytest.raises(UserError, match=r"'policy' is what the base is called"):
        create_share([named("policy")], base, tmp_path / "s")
    few = ("--inference.max-adapters", "1")
    with pytest.raises(UserError, match=r"2 runs, and inference\.max_adapters is 1"):
        create_share([named("a", *few), named("b", *few)], base, tmp_path / "s")
    with pytest.raises(UserError, match=r"--base-model .* is not a model directory"):
        create_share([named("a")], tmp_path / "nowhere", tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_a_run_joins_a_share_that_is_running_alone(base, named, tmp_path):
    share = create_share([named("a")], base, tmp_path / "s")
    place = ("--deployment.share", str(share.path))
    with pytest.raises(UserError, match=r"the share at .* is not running; `mettle rl resume"):
        run(named("b", *place).loaded, tmp_path / "b")
    with pytest.raises(UserError, match=r"no share at .*; `mettle rl share FILES` makes one"):
        run(named("b", "--deployment.share", str(tmp_path / "none")).loaded, tmp_path / "b")
    assert not (tmp_path / "b").exists()


@pytest.fixture
def beside(base, named, tmp_path):
    """A member's directory, its config, and a supervisor of no processes."""
    share = create_share([named("a")], base, tmp_path / "s")
    run_dir = RunDir(share.runs / "a")
    ledger = Ledger(run_dir.ledger)
    yield share, run_dir, RunConfig.model_validate_json(run_dir.config("run").read_text()), ledger
    ledger.close()


def test_a_run_that_the_trainer_gave_up_fails_with_its_words(beside, monkeypatch):
    share, run_dir, config, ledger = beside
    monkeypatch.setattr("mettle.runs.membership.supervisor_pid", lambda run_dir: os.getpid())
    supervisor = Supervisor(run_dir, ledger, [], main="orchestrator")
    with membership(run_dir, config, supervisor) as look:
        [member] = share.members()
        share.tell("a", TenantWord("an earlier life", "failed", 3, "old news", 2))
        look()
        assert supervisor.failure is None
        share.tell("a", TenantWord(member.life, "failed", 3, "the batch is torn", 2))
        monkeypatch.setattr("mettle.runs.membership.LOOK_S", 0.0)
        deadline = time.monotonic() + 60
        while supervisor.failure is None:
            assert time.monotonic() < deadline
            look()
        assert (supervisor.failure, supervisor.failure_code) == ("the batch is torn", 2)
    assert share.members() == []


def test_a_run_does_not_wait_for_a_share_that_is_not_there(beside, capsys):
    share, run_dir, config, ledger = beside
    supervisor = Supervisor(run_dir, ledger, [], main="orchestrator")
    with membership(run_dir, config, supervisor) as look:
        look()
    assert f"the share at {share.path} is not running; `mettle rl resume {share.path}`" in supervisor.failure
    ledger.journal.set_fact("state", "finished")
    assert main([str(run_dir.path)]) == 0  # nothing is left to do
    assert main([]) == 2
    assert "usage:" in capsys.readouterr().err
