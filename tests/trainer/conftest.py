"""A tiny policy on disk, and batches like those that an orchestrator packs."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from mettle.records.tasks import GroupRecord
from mettle.records.tokens import COLUMNS, Batch, filled
from mettle.storage.batches import write_batch
from mettle.storage.files import write_json
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir
from mettle.storage.shards import BlockRef
from mettle.trainer.config import (
    CheckpointConfig,
    MicroBatchConfig,
    MismatchConfig,
    OptimConfig,
    SchedulerConfig,
    TrainerConfig,
    read_config,
    write_config,
)
from mettle.trainer.layout import Sequences, lay_out
from mettle.trainer.learner import Learner, Recipe
from mettle.trainer.loading import load_policy
from mettle.trainer.loop import StopFlag, Trainer
from mettle.trainer.loss import BatchLoss
from mettle.trainer.losses.default import DefaultLoss
from mettle.trainer.passes import plan_passes
from mettle.trainer.policy import model_config, write_policy, write_tokenizer
from mettle.trainer.presets import END_TOKEN_ID, PolicyConfig
from mettle.trainer.world import World

MINI = PolicyConfig(num_layers=2, hidden_size=32, mlp_size=48, num_heads=2, num_kv_heads=1, head_dim=16)
ALONE = World(0, 1, torch.device("cpu"))

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def mini_model(tmp_path_factory):
    return write_policy(tmp_path_factory.mktemp("mini") / "model", MINI)


@pytest.fixture(scope="session")
def mixture(tmp_path_factory):
    """A mixture of four experts, of which each token takes two."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        settings = model_config(MINI)
        kept = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
        shape = {name: settings[name] for name in (*kept, "head_dim", "max_position_embeddings", "rope_parameters")}
        config = Qwen3MoeConfig(
            **shape, intermediate_size=48, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
            tie_word_embeddings=True, eos_token_id=END_TOKEN_ID, dtype="float32",
        )  # fmt: skip
        folder = tmp_path_factory.mktemp("mixture") / "model"
        Qwen3MoeForCausalLM(config).to(torch.float32).save_pretrained(folder)
    write_json(folder / "generation_config.json", {"eos_token_id": END_TOKEN_ID})
    write_tokenizer(folder, max_positions=MINI.max_positions)
    return folder


def make_sample(rng, prompt, num_completion, *, component="rl", advantage=None):
    """Per-token arrays of one rollout: a prompt, then sampled tokens with plausible logprobs."""
    length = len(prompt) + num_completion
    mask = np.arange(length) >= len(prompt)
    arrays = {
        "token_ids": np.concatenate([prompt, rng.integers(0, 256, num_completion)]),
        "loss_mask": mask,
        "logprobs": np.where(mask, rng.normal(-5.5, 0.3, length), 0.0),
        "versions": np.where(mask, 0, -1),
        "temperatures": np.full(length, 1.0),
        "advantages": np.where(mask, rng.normal() if advantage is None else advantage, 0.0),
        "rl_weights": np.where(mask & (component == "rl"), 1.0, 0.0),
        "ce_weights": np.where(mask & (component == "ce"), 0.5, 0.0),
        "ref_kl_weights": np.where(mask & (component == "ref_kl"), 1.0, 0.0),
        "ref_logprobs": np.where(mask & (component == "ref_kl"), rng.normal(-5, 0.5, length), 0.0),
    }
    return filled(length, arrays)


def make_group(rng, num_rollouts=4, *, prompt_length=7, max_completion=6, component="rl"):
    """Rollouts of one task: the same prompt, different completions."""
    prompt = rng.integers(0, 256, prompt_length)
    return [
        make_sample(rng, prompt, int(rng.integers(1, max_completion + 1)), component=component)
        for _ in range(num_rollouts)
    ]


def branching(group):
    """The same rollouts over two letters alone: some say the same, and most begin as another does."""
    for sample in group:
        own = sample["loss_mask"]
        sample["token_ids"][own] = sample["token_ids"][own] % 2
    return group


def make_batch(samples, *, step=1, draw_ids=(1,)):
    """Samples end to end."""
    columns = {name: np.concatenate([sample[name] for sample in samples]) for name in COLUMNS}
    lengths = np.array([len(sample["token_ids"]) for sample in samples], np.int32)
    return Batch(sequence_lengths=lengths, step=step, draw_ids=draw_ids, **columns)


def make_recipe(**changes):
    settings = {
        "optim": OptimConfig(lr=1e-3),
        "scheduler": SchedulerConfig(),
        "loss": DefaultLoss(),
        "micro_batch": MicroBatchConfig(),
        "max_steps": 10,
    }
    return Recipe(**{**settings, **changes})


def make_learner(folder, **changes):
    return Learner(load_policy(folder, ALONE, dtype=torch.float32), make_recipe(**changes), ALONE)


def gradients(learner, batch):
    """The gradient of a batch and its sums, without a step."""
    learner.policy.zero_grad()
    sequences = Sequences.of(batch)
    done = learner.accumulate(sequences, BatchLoss(learner.recipe.loss, sequences.counts))
    return torch.cat([p.grad.flatten() for p in learner.policy.parameters()]).clone(), torch.tensor(
        [*done.sums.values()]
    )


def planned(batch, config, **options):
    """The layouts of a batch on one rank."""
    return layouts_of(Sequences.of(batch), config, **options)


def layouts_of(sequences, config, **options):
    """The layouts of sequences on one rank."""
    (own,) = plan_passes(sequences, config, **options)
    return [lay_out(sequences, each.form, each.rows) for each in own]


# Runs


def ship_batch(run_dir, ledger, step, *, seed=0, num_groups=3):
    """Draw, score and ship the batch of `step`, as an orchestrator does; returns it."""
    rng = np.random.default_rng((seed, step))
    draws = ledger.draw_tasks([("words", f"uid-{step}-{i}", 0, 100 * step + i) for i in range(num_groups)])
    for draw in draws:
        ledger.dispatch(draw.draw_id)
        ledger.record_scored(GroupRecord(draw, step - 1, ()), BlockRef("shard-00000.bin", 0, 1))
    groups = [make_group(rng) for _ in draws]
    samples = [sample for group in groups for sample in group]
    batch = make_batch(samples, step=step, draw_ids=tuple(draw.draw_id for draw in draws))
    digest, _ = write_batch(run_dir.batches, batch)
    ledger.ship(
        step,
        digest,
        batch.draw_ids,
        num_sequences=sum(len(group) for group in groups),
        num_tokens=sum(len(sample["token_ids"]) for group in groups for sample in group),
        staleness=(0.0, 0),
        orchestrator_state={"cursor": step},
    )
    return batch


def new_run(run_dir, model, *, shipped=3, max_steps=3, interval=2, **changes):
    """A run directory: model, config, a ledger with the first `shipped` batches.

    Unless it is asked for, engine and trainer are not compared: what these batches say of themselves is drawn by lot,
    and to look for its cause takes two thirds of the time.
    """
    shutil.copytree(model, run_dir.model)
    settings = {"mismatch": MismatchConfig(interval=0), "optim": OptimConfig(lr=1e-3), **changes}
    config = TrainerConfig(max_steps=max_steps, checkpoint=CheckpointConfig(interval=interval), **settings)
    write_config(run_dir.config("trainer"), config)
    ledger = Ledger(run_dir.ledger)
    for step in range(1, shipped + 1):
        ship_batch(run_dir, ledger, step)
    ledger.journal.set_fact("state", "running")
    ledger.close()
    return run_dir


@pytest.fixture
def make_run(tmp_path, mini_model):
    """Makes run directories; see `new_run`."""

    def make(name="run", *, model=None, **changes):
        return new_run(RunDir(tmp_path / name), model or mini_model, **changes)

    return make


def train(run_dir, *, stop=None, heart=None):
    """Run a trainer to its end in this process; returns the last step."""
    ledger = Ledger(run_dir.ledger)
    config = read_config(run_dir.config("trainer"), TrainerConfig)
    try:
        return Trainer(run_dir, config, ALONE, ledger, stop or StopFlag(), heart).run()
    finally:
        ledger.close()


@pytest.fixture
def train_here():
    """What runs a trainer in this process; see `train`."""
    return train


@pytest.fixture
def ledger_of():
    """Opens ledgers and closes them at the end of the test."""
    opened = []

    def open_ledger(run_dir):
        opened.append(Ledger(run_dir.ledger))
        return opened[-1]

    yield open_ledger
    for ledger in opened:
        ledger.close()
