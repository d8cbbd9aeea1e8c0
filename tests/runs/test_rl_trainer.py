"""A run from Python: the same config, the same words, the same refusals."""

import pytest

import mettle
from mettle.errors import UserError
from mettle.runs import rl_trainer
from mettle.runs.rl_trainer import RLTrainer
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir
from mettle.trainer.policy import write_policy
from mettle.trainer.presets import PolicyConfig


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    mini = PolicyConfig(num_layers=2, hidden_size=32, mlp_size=48, num_heads=2, num_kv_heads=1, head_dim=16)
    return write_policy(tmp_path_factory.mktemp("mini") / "model", mini)


def test_it_is_to_be_had_from_the_package_itself():
    assert mettle.RLTrainer is RLTrainer
    with pytest.raises(AttributeError, match="no attribute 'RlTrainer'"):
        mettle.RlTrainer  # noqa: B018


def test_settings_are_the_tables_of_a_config(model, tmp_path):
    trainer = RLTrainer(
        "reverse-text",
        model,
        directory=tmp_path / "run",
        max_steps=7,
        orchestrator={"batch_size": 32, "group_size": 4, "sampling": {"max_tokens": 12}},
        trainer={"optim": {"lr": 1e-3}},
        env_args={"num_train": 50},
    )
    config = trainer.config
    assert (config.trainer.max_steps, config.orchestrator.max_steps) == (7, 7)
    assert config.orchestrator.groups_per_batch == 8
    assert config.orchestrator.sampling.max_tokens == 12
    assert config.orchestrator.sampling.temperature == 1.0
    assert config.trainer.optim.lr == 1e-3
    assert config.trainer.lora is not None
    assert config.orchestrator.envs[0].args == {"num_train": 50}
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_stepz": 3}, "unknown key 'max_stepz'"),
        ({"orchestrator": {"batch_size": 9}}, "batch_size"),
        ({"trainer": {"optim": {"lrr": 1}}}, "did you mean 'lr'"),
    ],
    ids=["unknown", "misfit", "nearest"],
)
def test_a_wrong_setting_is_refused_before_anything_is_written(model, tmp_path, settings, message):
    with pytest.raises(UserError, match=message):
        RLTrainer("reverse-text", model, directory=tmp_path / "run", **settings)
    assert list(tmp_path.iterdir()) == []


def test_an_environment_or_a_model_that_is_not_there_is_refused(model, tmp_path):
    with pytest.raises(UserError, match="no-such-environment"):
        RLTrainer("no-such-environment", model)
    with pytest.raises(UserError, match="no model directory"):
        RLTrainer("reverse-text", tmp_path)


def test_a_run_that_was_cut_off_is_continued_and_one_that_is_finished_is_not_begun_again(model, tmp_path, monkeypatch):
    called = []
    monkeypatch.setattr(rl_trainer, "drive", lambda run_dir, is_quiet: called.append(("drive", run_dir.path)))
    monkeypatch.setattr(rl_trainer, "resume", lambda path, is_quiet: called.append(("resume", path)))
    trainer = RLTrainer("reverse-text", model, directory=tmp_path / "run", is_quiet=True)
    trainer.train()
    assert [name for name, _ in called] == ["drive"]
    trainer.train()
    assert [name for name, _ in called] == ["drive", "resume"]
    ledger = Ledger(RunDir(tmp_path / "run").ledger)
    ledger.journal.record_metrics(1, {"reward/mean": 0.25})
    ledger.journal.set_fact("state", "finished")
    ledger.close()
    assert trainer.metric("reward/mean") == [(1, 0.25)]
    with pytest.raises(UserError, match="is finished"):
        trainer.train()


def test_a_run_that_failed_before_it_trained_is_made_of_the_settings_that_are_there_now(model, tmp_path, monkeypatch):
    driven = []
    monkeypatch.setattr(rl_trainer, "drive", lambda run_dir, **_: driven.append(run_dir))
    monkeypatch.setattr(rl_trainer, "resume", lambda *_, **__: pytest.fail("it was resumed with the mistake"))
    RLTrainer("reverse-text", model, directory=tmp_path / "run", env_args={"num_train": -1}).train()
    ledger = Ledger(driven[0].ledger)
    ledger.journal.set_fact("state", "failed")
    ledger.close()
    RLTrainer("reverse-text", model, directory=tmp_path / "run", env_args={"num_train": 8}).train()
    assert '"num_train": 8' in driven[1].config("run").read_text()
