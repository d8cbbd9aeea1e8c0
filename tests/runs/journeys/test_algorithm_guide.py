"""The examples in the how-to of algorithms and losses: named in a config, they credit groups and train."""

import asyncio
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from mettle.config import load_config
from mettle.orchestrator.algorithms import make_algorithm
from mettle.orchestrator.config import OrchestratorConfig
from mettle.orchestrator.services import InMemoryServices
from mettle.orchestrator.simulator import SimulatedWorld, simulate
from mettle.processes.virtual_time import run_virtually
from mettle.records.tasks import GroupRecord, RolloutRecord, TaskDraw
from mettle.runs.config import RunConfig
from mettle.trainer.learner import Learner, Recipe
from mettle.trainer.loading import load_policy
from mettle.trainer.policy import write_policy
from mettle.trainer.presets import PolicyConfig
from mettle.trainer.world import World

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "write-an-algorithm.md"
MODULES = re.findall(r"```python\n# (\w+)\.py\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
REFERENCE, USE, _ = re.findall(r"```toml\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def guide(tmp_path, monkeypatch):
    """The modules of the guide, on the Python path."""
    for name, text in MODULES:
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name, _ in MODULES:
        sys.modules.pop(name, None)


def loaded(folder, text):
    path = folder / "run.toml"
    path.write_text(text)
    return load_config(RunConfig, [path]).config


def test_leaving_one_out_is_what_it_says(guide):
    rewards = [1.0, None, 0.0, 0.5]
    rollouts = tuple(RolloutRecord(str(i), reward, {}, [], ()) for i, reward in enumerate(rewards))
    group = GroupRecord(TaskDraw(1, "e", "u", 0, 0), 0, rollouts)
    algorithm = make_algorithm("lab_credit:LeaveOneOut", {})
    found = asyncio.run(algorithm.credit(group, InMemoryServices()))
    assert found == [{"advantages": 0.75}, None, {"advantages": -0.75}, {"advantages": 0.0}]


def test_a_run_that_names_them_credits_groups_and_trains(guide):
    config = loaded(guide, USE)
    words, guesses = config.orchestrator.envs
    choice = config.orchestrator.choice_for
    assert choice(words, provides_advantages=False) == ("lab_credit:LeaveOneOut", {"scale": 0.5})
    assert choice(guesses, provides_advantages=False) == ("turn_returns", {})
    values = config.orchestrator.model_dump() | {"max_steps": 2, "batch_size": 8, "group_size": 4}
    values["eval"]["num_examples"] = 0
    orchestrator = OrchestratorConfig.model_validate(values)
    simulated = run_virtually(simulate(guide / "run", orchestrator, SimulatedWorld()))
    policy = write_policy(guide / "model", PolicyConfig(num_layers=1, hidden_size=32, mlp_size=48, head_dim=16))
    ranks = World(0, 1, torch.device("cpu"))
    trainer = config.trainer
    recipe = Recipe(trainer.optim, trainer.scheduler, trainer.loss.build(), trainer.micro_batch, 2)
    learner = Learner(load_policy(policy, ranks, dtype=torch.float32), recipe, ranks)
    for step, batch in simulated.trainer.batches.items():
        assert np.unique(batch.advantages[batch.loss_mask]).size > 2
        metrics = learner.train(batch, step)
        assert metrics["optim/grad_norm"] > 0
        assert metrics["tokens/trained"] == batch.loss_mask.sum()


def test_the_distilling_config_loads(guide):
    config = loaded(guide, REFERENCE + '\n[[orchestrator.envs]]\nid = "reverse-text"\n')
    assert config.orchestrator.services["reference"].max_concurrency == 32
