"""Runs that earlier releases made, of settings that are refused now: what had no effect is left out, the rest is told."""

import json
from contextlib import closing

import pytest

from mettle.errors import UserError
from mettle.orchestrator.config import OrchestratorConfig
from mettle.runs import launch
from mettle.runs.create import create_run
from mettle.runs.launch import load_run_config, resume
from mettle.runs.stored import mend_config, read_run_config
from mettle.storage.ledger import Ledger
from mettle.trainer.config import TrainerConfig, read_config

TEXT = """
max_steps = 2
orchestrator.max_lag = 0
orchestrator.max_staleness = 0

[[orchestrator.envs]]
id = "reverse-text"

[[orchestrator.eval.envs]]
id = "reverse-text"

[deployment]
hub = false
"""


@pytest.fixture
def older(tmp_path):
    """A run whose files say what an earlier release took."""
    (file := tmp_path / "run.toml").write_text(TEXT)
    run_dir = create_run(load_run_config([file]), tmp_path / "run")

    def make(changes):
        for dotted, value in changes.items():
            first, *rest = dotted.split(".")
            for path, parts in ((run_dir.config("run"), [first, *rest]), (run_dir.config(first), rest)):
                if not path.exists():
                    continue
                table = tree = json.loads(path.read_text())
                for part in parts[:-1]:
                    table = table[int(part) if part.isdigit() else part]
                table[parts[-1]] = value
                path.write_text(json.dumps(tree))
            sources = json.loads((run_dir.path / "sources.json").read_text()) | {dotted: "run.toml:1"}
            (run_dir.path / "sources.json").write_text(json.dumps(sources))
        return run_dir

    return make


IDLE = {
    "a decay of a constant rate": {"trainer.scheduler.decay_steps": 5, "trainer.scheduler.min_lr_ratio": 0.1},
    "of a warm-up": {"warm_up.sft.scheduler.decay_steps": 5},
    "muon's": {"trainer.optim.momentum": 0.5},
    "jsd's": {"trainer.distillation.jsd_weight": 0.3},
    "of no teacher": {"trainer.distillation.divergence": "jsd", "trainer.distillation.jsd_weight": 0.3},
    "a teacher that nobody asks": {"trainer.distillation.teacher": "/teacher"},
    "pools": {"orchestrator.curriculum.hard_below": 0.1, "orchestrator.curriculum.easy_weight": 2.0},
    "of an evaluation": {"orchestrator.eval.envs.0.ratio": 3.0, "orchestrator.eval.envs.0.algorithm": "rloo"},
    "of no broadcast": {"trainer.weight_broadcast_host": "10.0.0.1"},
    "models of other places": {"trainer.model": "/m", "orchestrator.model": "/m"},
    "of the run's own environment": {"warm_up.sft.probe.env_args": {"seed": 3}},
    "of runs that are not synchronous": {"orchestrator.min_inflight_groups": 2},
    "two at once": {"trainer.scheduler.decay_steps": 5, "orchestrator.eval.envs.0.algorithm": "rloo"},
}


@pytest.mark.parametrize("changes", IDLE.values(), ids=IDLE)
def test_what_had_no_effect_is_left_out_once_and_said(older, changes, capsys):
    clean = older({})
    before = read_run_config(clean)
    run_dir = older(changes)
    assert read_run_config(run_dir) == before
    with closing(Ledger(run_dir.ledger)) as ledger:
        assert mend_config(run_dir, ledger.journal) == before
        said = capsys.readouterr().err
        assert said.startswith("note: left out of the run's config")
        assert all(name in said for name in changes)
        assert [event.kind for event in ledger.journal.events()] == ["config_mended"]
        assert mend_config(run_dir, ledger.journal) == before
        assert capsys.readouterr().err == "", "it is said once"
    assert read_config(run_dir.config("trainer"), TrainerConfig) == read_config(clean.config("trainer"), TrainerConfig)
    assert OrchestratorConfig.model_validate_json(run_dir.config("orchestrator").read_text()).eval.envs[0].ratio == 1.0
    assert not set(changes) & json.loads((run_dir.path / "sources.json").read_text()).keys()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"trainer.loss.ratio": "none", "orchestrator.max_staleness": 2},
            "ratio 'none' takes every token as sampled from the policy of its step",
        ),
        ({"trainer.loss.adv_tau": 0.0}, r"trainer\.loss\.default\.adv_tau: Input should be greater than 0"),
        ({"model.path": "/gone"}, "path '/gone' holds no model: it has no config.json"),
        ({"orchestrator.no_such": 1}, r"orchestrator\.no_such: Extra inputs are not permitted"),
        ({"trainer.scheduler.decay_steps": 5, "orchestrator.no_such": 1}, r"orchestrator\.no_such: Extra inputs"),
    ],
)
def test_what_had_one_is_told_with_what_can_be_done(older, changes, said):
    run_dir = older(changes)
    with pytest.raises(UserError, match=said) as told:
        resume(run_dir.path)
    assert "it goes on with that release; or begin a new run from its weights: `mettle rl export" in str(told.value)
    assert "\n" not in str(told.value)


def test_a_preset_beside_a_model_that_is_there_is_left_out(older, tmp_path, capsys):
    (folder := tmp_path / "model").mkdir()
    (folder / "config.json").write_text("{}")
    run_dir = older({"model.path": str(folder), "model.preset": "small"})
    with closing(Ledger(run_dir.ledger)) as ledger:
        assert mend_config(run_dir, ledger.journal).model.preset == "tiny"
    assert "is refused now: model.preset\n" in capsys.readouterr().err


def test_a_run_goes_on_with_what_is_left(older, monkeypatch, capsys):
    run_dir = older({"trainer.scheduler.decay_steps": 5})

    class Begun(Exception):
        """It came as far as to its processes."""

    def places(run_dir, config, *_):
        raise Begun(config.trainer.scheduler.decay_steps)

    monkeypatch.setattr(launch, "_places", places)
    with pytest.raises(Begun) as begun:
        resume(run_dir.path)
    assert begun.value.args == (None,)
    assert "trainer.scheduler.decay_steps" in capsys.readouterr().err
