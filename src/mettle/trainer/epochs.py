"""The loop of a tuning on a file: steps over shuffled examples, checkpoints between them, and at last what was trained.

Supervised fine-tuning and tuning on preferences differ in what a step does with the examples that it is given, and in
nothing else. Parts: `Tuning` (what is asked for), `tune_in_epochs` (the loop), `TunedStep` (what it calls),
`write_trained`. Invariants: the model that is read is left alone, and what is written appears complete or not at all;
after a kill the same call goes on from its newest checkpoint, to the same bytes.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from mettle.errors import UserError
from mettle.storage.files import folder_aside, sha256_file, write_json
from mettle.storage.weights import ADAPTER_CONFIG, ADAPTER_FILE, model_digest
from mettle.trainer.adapter import peft_config
from mettle.trainer.config import LoraConfig, MicroBatchConfig, OptimConfig, TrainerConfig
from mettle.trainer.demonstrations import shuffled_places
from mettle.trainer.learner import Learner
from mettle.trainer.loading import full_state
from mettle.trainer.loop import make_learner
from mettle.trainer.process import setup_torch
from mettle.trainer.saves import Saves, Unfinished
from mettle.trainer.tenant_files import METADATA, adapter_tensors
from mettle.trainer.world import join_world

logger = logging.getLogger(__name__)

WARM_UP_SHARE = 0.1
Figures = dict[str, float]
Tell = Callable[[int, int, Figures], None]
"""Hears of each step: its number, how many there will be, its figures."""
TunedStep = Callable[[Sequence[int], int], Figures]
"""Takes one optimiser step, of this number, on the examples at these places; its figures."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """`lora` None trains all weights. A step takes `batch_size` examples, an epoch all of them in an own order."""

    data: Path
    model: Path
    to: Path
    lora: LoraConfig | None
    lr: float
    epochs: float = 1.0
    batch_size: int = 16
    seed: int = 0
    dtype: str = "float32"
    num_threads: int = 1
    is_checkpointing: bool = False
    checkpoint_s: float = 30.0
    """Seconds between checkpoints; what comes after the newest is done again after a kill."""


def check_place(task: Tuning) -> None:
    """Raises: UserError when something is where the result would be."""
    if task.to.exists():
        raise UserError(f"{task.to} is there already; name a folder that is not")


def tune_in_epochs(
    task: Tuning,
    num_examples: int,
    begin: Callable[[Learner, Path], TunedStep],
    tell: Tell,
    *,
    kept: Sequence[str],
    asked: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Train and write `task.to`. `begin` is given the learner at its start and the folder for what must outlive a kill.

    Returns how many steps there were and the figures named in `kept` of the first and the last. `asked` is what the
    result depends on beside the task itself. Raises: UserError when the same place was begun with something else.
    """
    unfinished = Unfinished(task.to)
    with unfinished.begun(asked_of(task) | dict(asked or {})):
        setup_torch(task.num_threads, task.seed)
        size = min(task.batch_size, num_examples)
        num_steps = max(1, math.ceil(num_examples * task.epochs / task.batch_size))
        with join_world("auto") as world:
            learner = make_learner(config_of(task, num_steps), task.model, world)
            take = begin(learner, unfinished.folder)
            saves = Saves(unfinished.checkpoints, learner, task.checkpoint_s)
            found = saves.restore(logger.warning)
            first = 0 if found is None else found.step
            ends = {} if found is None else found.orchestrator
            steps = enumerate(shuffled_places(num_examples, size, task.seed), start=1)
            for step, places in islice(steps, first, num_steps):
                figures = take(places, step)
                now = {name: figures[name] for name in kept}
                ends = {"first": ends.get("first", now), "last": now}
                tell(step, num_steps, figures)
                saves.save_if_due(step, ends)
            write_trained(task, learner)
        unfinished.remove()
    return {"steps": num_steps, "resumed_after": first, **ends}


def asked_of(task: Tuning) -> dict[str, Any]:
    """What the result depends on."""
    return {
        "data": sha256_file(task.data),
        "model": model_digest(task.model),
        "lora": None if task.lora is None else task.lora.model_dump(mode="json"),
        "lr": task.lr,
        "epochs": task.epochs,
        "batch_size": task.batch_size,
        "seed": task.seed,
        "dtype": task.dtype,
        "checkpointing": task.is_checkpointing,
    }


def config_of(task: Tuning, num_steps: int) -> TrainerConfig:
    """The trainer of so many steps."""
    warm_up = min(num_steps - 1, math.ceil(num_steps * WARM_UP_SHARE))
    falls = num_steps > warm_up and num_steps > 1
    falling = {"type": "linear", "min_lr_ratio": 0.1} if falls else {"type": "constant"}
    return TrainerConfig.model_validate(
        {
            "max_steps": num_steps,
            "seed": task.seed,
            "lora": task.lora,
            "dtype": task.dtype,
            "activation_checkpointing": task.is_checkpointing,
            "optim": OptimConfig(lr=task.lr, betas=(0.9, 0.98), weight_decay=0.0),
            "scheduler": {"warmup_steps": warm_up, **falling},
            "micro_batch": MicroBatchConfig(activation_gib=2.0),
        }
    )


def write_trained(task: Tuning, learner: Learner) -> None:
    """The folder of what was trained: a model, or an adapter in PEFT's layout."""
    adapter = learner.tenant.adapter
    with folder_aside(task.to) as scratch:
        if adapter is None:
            for path in task.model.resolve().iterdir():
                if path.is_file() and ".safetensors" not in path.name and path.suffix != ".bin":
                    shutil.copyfile(path, scratch / path.name)
            state = {name: tensor.to(torch.float32) for name, tensor in full_state(learner.policy).items()}
            save_file(state, scratch / "model.safetensors", metadata=METADATA)
            return
        save_file(adapter_tensors(learner.tenant), scratch / ADAPTER_FILE, metadata=METADATA)
        write_json(scratch / ADAPTER_CONFIG, peft_config(adapter, learner.policy.network, task.model.resolve()))
        digest = sha256_file(scratch / ADAPTER_FILE)
        about = {
            "version": 0,
            "path": str(task.to),
            "digest": digest,
            "kind": "lora",
            "base_digest": learner.base_digest,
        }
        write_json(scratch / "manifest.json", about)
