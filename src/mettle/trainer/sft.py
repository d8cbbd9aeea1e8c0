"""`python -m mettle.trainer.sft RUN_DIR`: a supervised warm-up that stops at a measured reward.

Reads RUN/config/sft.json and RUN/sft/demonstrations.jsonl, makes RUN/model if there is none, trains it on the
demonstrations, and puts the warm policy in its place in one rename, with `warm_up.json` saying what was reached.
Invariant: RUN/model is either the policy from before or the warm one; a warm-up that was killed continues from its
newest checkpoint as if nothing had been, and one that is done is not done again.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from mettle.clients.renderer import Renderer
from mettle.errors import ServiceError, UserError
from mettle.log import setup_logging
from mettle.processes.beats import Heartbeat
from mettle.storage.evals import EvalStore
from mettle.storage.files import folder_aside, write_json
from mettle.storage.journal import Journal
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir
from mettle.storage.shards import ShardWriter
from mettle.trainer.config import ProbeConfig, SftConfig, read_config
from mettle.trainer.demonstrations import Demonstration, batch_of, read_demonstrations, shuffled_batches
from mettle.trainer.initial import ensure_initial_policy
from mettle.trainer.learner import Learner, Recipe
from mettle.trainer.loading import full_state, load_policy
from mettle.trainer.losses.default import DefaultLoss
from mettle.trainer.memory import fit_micro_batch
from mettle.trainer.probe import EnvironmentProbe, ProbeReading, RewardProbe
from mettle.trainer.process import setup_torch
from mettle.trainer.program import guarded
from mettle.trainer.saves import Saves
from mettle.trainer.world import World, join_world

logger = logging.getLogger(__name__)

DONE_FILE = "warm_up.json"


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What a warm-up reached, and after how much."""

    reward: float
    step: int
    num_rollouts: int
    seconds: float


def warm_up(
    learner: Learner,
    demonstrations: list[Demonstration],
    probe: RewardProbe,
    config: SftConfig,
    journal: Journal,
    saves: Saves | None = None,
) -> WarmUp:
    """Train until a measurement reaches the target, on from what `saves` has.

    Raises: ServiceError when it has not after `max_steps`.
    """
    started = time.perf_counter()
    best = max((reward for _, reward in journal.metric("sft/reward")), default=float("-inf"))
    first = 0 if saves is None else _restore(saves, journal)
    batches = enumerate(shuffled_batches(demonstrations, config.batch_size, config.seed), start=1)
    for step, chosen in islice(batches, first, config.max_steps):
        figures = learner.train(batch_of(chosen, step), step)
        journal.record_metrics(step, {"sft/loss": figures["loss/ce"], "sft/grad_norm": figures["optim/grad_norm"]})
        if step >= config.probe.first_step and (step - config.probe.first_step) % config.probe.interval == 0:
            reading = probe.measure(full_state(learner.policy), seed=config.seed * 1_000_003 + step)
            best = max(best, reading.mean_reward)
            _tell(journal, step, reading, figures["loss/ce"])
            if reading.mean_reward >= config.target_reward:
                return WarmUp(reading.mean_reward, step, reading.num_rollouts, time.perf_counter() - started)
        if saves is not None:
            saves.save_if_due(step)
    raise ServiceError(
        f"the warm-up has not reached a reward of {config.target_reward} in {config.max_steps} steps"
        f" (best measurement {best:.3f}); raise max_steps, lower target_reward, or give better demonstrations"
    )


def _restore(saves: Saves, journal: Journal) -> int:
    checkpoint = saves.restore(lambda message: journal.event("sft", "warning", message))
    if checkpoint is None:
        return 0
    step = checkpoint.step
    journal.event("sft", "resumed", f"the warm-up continues after step {step}", step=step)
    return step


def replace_model(folder: Path, learner: Learner, done: WarmUp) -> None:
    """Put a copy of the model directory with the learner's weights in its place."""
    state = full_state(learner.policy)
    source = folder.resolve()
    with folder_aside(folder) as scratch:
        for path in source.iterdir():
            if path.is_file() and ".safetensors" not in path.name and path.suffix != ".bin":
                shutil.copyfile(path, scratch / path.name)
        save_file(state, scratch / "model.safetensors", metadata={"format": "pt"})
        write_json(scratch / DONE_FILE, asdict(done))


def run_warm_up(run_dir: RunDir) -> None:
    """Warm the policy of a run up, or say that it is warm already."""
    config = read_config(run_dir.config("sft"), SftConfig)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("the warm-up runs in one process; start it without torchrun")
    setup_logging(run_dir.logs / "sft.log", is_terminal=sys.stderr.isatty())
    setup_torch(config.num_threads, config.seed)
    ledger = Ledger(run_dir.ledger)
    try:
        ensure_initial_policy(run_dir)
        done_file = run_dir.model / DONE_FILE
        if done_file.exists():
            done = WarmUp(**json.loads(done_file.read_text()))
        else:
            with join_world(config.device) as world, Heartbeat.of_run("sft", unit="micro batches") as heart:
                done = _warm_up_run(run_dir, config, world, ledger, heart)
        ledger.journal.set_fact("warm_up", asdict(done))
        ledger.journal.set_fact("is_warm", True)
    finally:
        ledger.close()


def _warm_up_run(run_dir: RunDir, config: SftConfig, world: World, ledger: Ledger, heart: Heartbeat) -> WarmUp:
    journal = ledger.journal
    journal.event("sft", "started", f"warm-up to a reward of {config.target_reward} has begun")
    journal.set_fact("warm_up_goal", {"reward": config.target_reward, "max_steps": config.max_steps})
    demonstrations = read_demonstrations(
        run_dir.path / "sft" / "demonstrations.jsonl", Renderer.from_directory(run_dir.model)
    )
    policy = load_policy(run_dir.model, world, dtype=torch.float32)
    micro_batch = fit_micro_batch(config.micro_batch, policy, world)
    recipe = Recipe(config.optim, config.scheduler, DefaultLoss(), micro_batch, config.max_steps)
    learner = Learner(policy, recipe, world, on_progress=heart.advance)
    store = EvalStore(ledger.database, ShardWriter(run_dir.rollouts, "probe")) if world.rank == 0 else None
    probe = EnvironmentProbe.load(run_dir.model, resolve_probe(run_dir, config.probe), world.device, store)
    saves = Saves(run_dir.path / "sft" / "checkpoints", learner, config.checkpoint_s)
    done = warm_up(learner, demonstrations, probe, config, journal, saves)
    replace_model(run_dir.model, learner, done)
    saves.remove()
    journal.event("sft", "warm", f"warm at a reward of {done.reward:.3f} after {done.step} steps", **asdict(done))
    return done


def resolve_probe(run_dir: RunDir, config: ProbeConfig) -> ProbeConfig:
    """Fill in the run's first environment and its token limit where the config leaves them open."""
    path = run_dir.config("orchestrator")
    settings: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    changes: dict[str, Any] = {}
    if config.env is None:
        envs = settings.get("envs") or []
        if not envs:
            raise UserError(f"the warm-up has no environment to measure with: set probe.env, or envs in {path}")
        changes = {"env": envs[0]["id"], "env_args": envs[0].get("args") or {}}
    if config.max_tokens is None:
        changes["max_tokens"] = (settings.get("sampling") or {}).get("max_tokens")
    return config.model_copy(update=changes)


def _tell(journal: Journal, step: int, reading: ProbeReading, loss: float) -> None:
    journal.record_metrics(step, {"sft/reward": reading.mean_reward})
    logger.info("measured", extra={"step": step, "reward": reading.mean_reward, "loss": loss})
    if reading.num_errors:
        message = f"warm-up step {step}: {reading.num_errors} of {reading.num_rollouts} rollouts failed"
        journal.event("sft", "warning", message)


if __name__ == "__main__":
    sys.exit(guarded("mettle.trainer.sft", sys.argv[1:], run_warm_up))
