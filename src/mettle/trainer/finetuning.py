"""Supervised fine-tuning on a file, alone: chats, or prompts with completions, in; a model or an adapter out.

Parts: `FineTuning` (what is asked for), `read_examples`, `fine_tune`. A chat's mask comes from its template, as in the
warm-up (`demonstrations`); where there is no template a prompt and its completion are encoded apart, so that which
tokens train is known from where they came from. Invariants: the model that is read is left alone, and what is written
appears complete or not at all; after a kill the same call goes on from its newest checkpoint, to the same bytes.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from mettle.clients.renderer import Renderer
from mettle.errors import UserError
from mettle.storage.files import folder_aside, sha256_file, storage_errors, write_json
from mettle.storage.weights import ADAPTER_CONFIG, ADAPTER_FILE, model_digest
from mettle.trainer.adapter import linear_modules, peft_config
from mettle.trainer.config import LoraConfig, MicroBatchConfig, OptimConfig, TrainerConfig
from mettle.trainer.demonstrations import Demonstration, batch_of, encode_demonstration, shuffled_batches
from mettle.trainer.learner import Learner
from mettle.trainer.loop import make_learner
from mettle.trainer.model import full_state
from mettle.trainer.process import setup_torch
from mettle.trainer.saves import Saves, Unfinished
from mettle.trainer.tenant_files import METADATA, adapter_tensors
from mettle.trainer.world import join_world

logger = logging.getLogger(__name__)

WARM_UP_SHARE = 0.1
"""Of the steps; then the learning rate falls linearly to a tenth."""


@dataclass(frozen=True, slots=True)
class FineTuning:
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


def fine_tune(task: FineTuning, tell: Callable[[int, int, dict[str, float]], None]) -> dict[str, Any]:
    """Train and write `task.to`; `tell` hears of each step. Returns the losses of the first and the last step.

    Raises: UserError when a line, the model or the adapters do not fit.
    """
    if task.to.exists():
        raise UserError(f"{task.to} is there already; name a folder that is not")
    examples = read_examples(task.data, Renderer.from_directory(task.model))
    unfinished = Unfinished(task.to)
    with unfinished.begun(asked_of(task)):
        done = _train(task, examples, unfinished, tell)
        unfinished.remove()
    return done


def asked_of(task: FineTuning) -> dict[str, Any]:
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


def _train(
    task: FineTuning,
    examples: Sequence[Demonstration],
    unfinished: Unfinished,
    tell: Callable[[int, int, dict[str, float]], None],
) -> dict[str, Any]:
    setup_torch(task.num_threads, task.seed)
    num_steps = max(1, math.ceil(len(examples) * task.epochs / task.batch_size))
    with join_world("auto") as world:
        learner = make_learner(config_of(task, num_steps), task.model, world)
        saves = Saves(unfinished.checkpoints, learner, task.checkpoint_s)
        found = saves.restore(logger.warning)
        # Losses of the first and the last step, as far as there were any.
        first = 0 if found is None else found.step
        ends = {} if found is None else found.orchestrator
        batches = enumerate(shuffled_batches(examples, min(task.batch_size, len(examples)), task.seed), start=1)
        for step, chosen in islice(batches, first, num_steps):
            figures = learner.train(batch_of(chosen, step), step)
            ends = {"first_loss": ends.get("first_loss", figures["loss/ce"]), "last_loss": figures["loss/ce"]}
            tell(step, num_steps, figures)
            saves.save_if_due(step, ends)
        write_trained(task, learner)
    return {"steps": num_steps, "examples": len(examples), "resumed_after": first, **ends}


def read_examples(path: Path, renderer: Renderer) -> list[Demonstration]:
    """Every line of a JSONL file: `{"messages": [...]}`, or `{"prompt": ..., "completion": ...}` as texts or messages.

    Raises: UserError that names the line which does not fit.
    """
    with storage_errors(path, "reading"):
        lines = path.read_text(encoding="utf-8").splitlines()
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found.append(example_of(json.loads(line), renderer))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}:{number} is no example: {error!r}") from error
        except UserError as error:
            raise UserError(f"{path}:{number}: {error}") from error
    if not found:
        raise UserError(f"{path} holds no examples")
    return found


def example_of(row: dict[str, Any], renderer: Renderer) -> Demonstration:
    """A row\'s tokens, and which of them train. Raises: UserError for one that is no example."""
    if "messages" in row:
        return encode_demonstration(renderer, row["messages"], row.get("tools"))
    if not {"prompt", "completion"} <= row.keys():
        raise UserError(
            f"an example has 'messages', or 'prompt' and 'completion'; this one has {', '.join(row) or 'nothing'}"
        )
    prompt, completion = row["prompt"], row["completion"]
    if renderer.has_chat_template or not (isinstance(prompt, str) and isinstance(completion, str)):
        return encode_demonstration(renderer, [*_messages(prompt, "user"), *_messages(completion, "assistant")])
    before = renderer.encode(prompt, add_special_tokens=True)
    after = [*renderer.encode(completion), *list(renderer.stop_token_ids)[:1]]
    is_trained = np.arange(len(before) + len(after)) >= len(before)
    return Demonstration(np.array([*before, *after], np.int32), is_trained)


def _messages(said: Any, role: str) -> Sequence[Any]:
    return [{"role": role, "content": said}] if isinstance(said, str) else list(said)


def config_of(task: FineTuning, num_steps: int) -> TrainerConfig:
    """The trainer of so many steps."""
    warm_up = min(num_steps - 1, math.ceil(num_steps * WARM_UP_SHARE))
    kind = "linear" if num_steps > warm_up and num_steps > 1 else "constant"
    return TrainerConfig.model_validate(
        {
            "max_steps": num_steps,
            "seed": task.seed,
            "lora": task.lora,
            "dtype": task.dtype,
            "activation_checkpointing": task.is_checkpointing,
            "optim": OptimConfig(lr=task.lr, betas=(0.9, 0.98), weight_decay=0.0),
            "scheduler": {"type": kind, "warmup_steps": warm_up, "min_lr_ratio": 0.1},
            "micro_batch": MicroBatchConfig(activation_gib=2.0),
        }
    )


def write_trained(task: FineTuning, learner: Learner) -> None:
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
        modules = list(linear_modules(learner.policy.network))
        write_json(scratch / ADAPTER_CONFIG, peft_config(adapter, modules, task.model.resolve()))
        digest = sha256_file(scratch / ADAPTER_FILE)
        about = {
            "version": 0,
            "path": str(task.to),
            "digest": digest,
            "kind": "lora",
            "base_digest": learner.base_digest,
        }
        write_json(scratch / "manifest.json", about)
