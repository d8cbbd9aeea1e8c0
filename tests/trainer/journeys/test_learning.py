"""The real thing, small: warm a policy up from nothing, then see reinforcement learning raise its reward.

Each time a warm-up is seen to begin to learn; the whole is for the nightly tier, and `runs/test_quickstart.py` runs it.
"""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.trainer.conftest import ALONE, make_batch, make_recipe, make_sample

from mettle.clients.renderer import Renderer
from mettle.envs import load_environment
from mettle.inference.engine.local import generate_batch
from mettle.records.sampling import SamplingParams
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir
from mettle.trainer.config import OptimConfig, ProbeConfig, SchedulerConfig, SftConfig, write_config
from mettle.trainer.learner import Learner
from mettle.trainer.loading import full_state, load_policy
from mettle.trainer.losses.default import DefaultLoss
from mettle.trainer.probe import EnvironmentProbe
from mettle.trainer.sft import DONE_FILE, run_warm_up

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def warm_run(tmp_path_factory):
    """A policy that has reached what reinforcement learning starts from."""
    return warmed_up(tmp_path_factory.mktemp("warm"), SftConfig(seed=10))


def warmed_up(folder, config):
    run_dir = RunDir(folder / "run")
    run_dir.path.mkdir()
    Ledger(run_dir.ledger).close()
    rows = load_environment("reverse-text").get_dataset()
    lines = [{"messages": [*row["prompt"], {"role": "assistant", "content": row["answer"]}]} for row in rows]
    path = run_dir.path / "sft" / "demonstrations.jsonl"
    path.parent.mkdir()
    path.write_text("\n".join(map(json.dumps, lines)))
    write_config(run_dir.config("sft"), config)
    orchestrator = {"envs": [{"id": "reverse-text", "args": {}}], "sampling": {"max_tokens": 8}}
    run_dir.config("orchestrator").write_text(json.dumps(orchestrator))
    run_dir.config("policy").write_text('{"preset": "tiny", "seed": 10}')
    run_warm_up(run_dir)
    return run_dir


@pytest.mark.parametrize("target", [0.15, pytest.param(0.5, marks=pytest.mark.nightly)])
def test_the_warm_up_reaches_its_target_and_is_not_done_twice(tmp_path, target):
    warm_run = warmed_up(tmp_path, SftConfig(seed=10, target_reward=target))
    done = json.loads((warm_run.model / DONE_FILE).read_text())
    assert target <= done["reward"] < target + 0.25
    before = (warm_run.model / "model.safetensors").read_bytes()
    run_warm_up(warm_run)
    assert (warm_run.model / "model.safetensors").read_bytes() == before
    ledger = Ledger(warm_run.ledger)
    rewards = dict(ledger.journal.metric("sft/reward"))
    assert min(rewards) == 30
    assert max(rewards) == done["step"]
    assert all(reward < target for step, reward in rewards.items() if step < done["step"])
    assert ledger.journal.fact("is_warm") is True
    assert [event.kind for event in ledger.journal.events()] == ["started", "warm"]
    ledger.close()


@pytest.mark.nightly
def test_reinforcement_learning_raises_the_reward(warm_run):
    recipe = make_recipe(
        optim=OptimConfig(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0),
        scheduler=SchedulerConfig(type="linear", warmup_steps=5, min_lr_ratio=0.1),
        loss=DefaultLoss(kl_tau=0),
        max_steps=50,
    )
    learner = Learner(load_policy(warm_run.model, ALONE, dtype=torch.float32), recipe, ALONE)
    env = load_environment("reverse-text")
    config = ProbeConfig(env="reverse-text", num_prompts=512, max_tokens=8)
    probe = EnvironmentProbe(warm_run.model, env, config, torch.device("cpu"))
    start = probe.measure(load_file(warm_run.model / "model.safetensors"), seed=1).mean_reward
    mismatches = []
    for step in range(1, 51):
        metrics = learner.train(rollout_batch(learner, warm_run, env, step), step)
        mismatches.append(metrics["mismatch_kl/max"])
    end = probe.measure(full_state(learner.policy), seed=1).mean_reward
    assert end >= start + 0.12
    assert max(mismatches) < 1e-6  # at no lag, engine and trainer agree


def rollout_batch(learner, run_dir, env, step):
    """16 prompts x 16 rollouts from the engine, position-wise reward less the group's mean."""
    rows = env.get_dataset()
    chosen = [rows[(16 * step + i) % len(rows)] for i in range(16)]
    renderer = Renderer.from_directory(run_dir.model)
    prompts = [renderer.render(row["prompt"]) for row in chosen]
    params = SamplingParams(max_tokens=8)
    config, state = learner.policy.network.config.to_dict(), full_state(learner.policy)
    groups = generate_batch(config, state, prompts, params, n=16, eos_token_ids=renderer.stop_token_ids, seed=step)
    samples, rng = [], np.random.default_rng(0)
    for row, prompt, group in zip(chosen, prompts, groups, strict=True):
        rewards = np.array([reward(choice, row["answer"]) for choice in group.choices])
        for choice, advantage in zip(group.choices, rewards - rewards.mean(), strict=True):
            sample = make_sample(rng, np.array(prompt), len(choice.token_ids), advantage=advantage)
            sample["token_ids"][len(prompt) :] = choice.token_ids
            sample["logprobs"][len(prompt) :] = choice.logprobs
            if np.ptp(rewards) == 0:
                sample["rl_weights"][:] = 0
            samples.append(sample)
    return make_batch(samples, step=step)


def reward(choice, answer):
    if choice.finish_reason != "stop":
        return 0.0
    said = bytes(token for token in choice.token_ids[:-1] if token < 256).decode("latin-1")
    return sum(a == b for a, b in zip(said, answer, strict=False)) / max(len(said), len(answer))
