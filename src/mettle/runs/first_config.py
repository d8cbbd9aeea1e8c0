"""`mettle rl init`: a config for training one's own model on an environment, as a file to read and change.

What the model and the machine decide is filled in: adapters or all weights, the type, threads, the context. Invariant:
what is written loads; a model that cannot be trained is refused with what it lacks.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from mettle.clients.renderer import Renderer
from mettle.envs.packages.loading import resolve_environment
from mettle.errors import UserError
from mettle.processes.host import multiplies_bfloat16
from mettle.storage.files import write_atomic

LORA_LR, FULL_LR = 1e-4, 1e-6
COMPLETION_TOKENS = 512
_TEXT = """\
# {model_name} on {env}. `mettle rl plan {file}` says what it takes here, `mettle rl run {file}` trains.
# What is left out has the recommended value; `mettle config show {file}` shows all of it.

max_steps = 100
seed = 0

[model]
path = {path}
{lora}
[orchestrator]
batch_size = 64 # rollouts a step: 8 groups of 8
group_size = 8
max_lag = 1

[orchestrator.sampling]
temperature = 1.0
max_tokens = {max_tokens}

[[orchestrator.envs]]
id = {env_id}

[orchestrator.eval]
num_examples = 64
interval = 25

[trainer]
dtype = "{dtype}" # of forward and backward; {dtype_why}
num_threads = {threads}
activation_checkpointing = true # a third slower, and much less memory

[trainer.micro_batch]
activation_gib = 2.0 # memory for what the backward pass needs; micro batches are cut to it

[trainer.optim]
lr = {lr}
weight_decay = 0.0

[inference]
max_slots = 64
max_model_len = {max_model_len}
num_threads = {threads}
"""
_LORA = """\
lora = { rank = 16, alpha = 32 } # adapters on all linear modules; leave it out to train every weight (lr 1e-6 then)
"""

_LORA_OF_MIXTURE = """\
lora = { rank = 16, alpha = 32, mlp = false } # adapters on attention; of Qwen3's experts too with mlp = true
"""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What a mixture's config.json calls the number of its experts."""


def write_first_config(env: str, model: Path, path: Path, *, is_full: bool = False) -> Path:
    """Write the config to `path`.

    Raises: UserError when the environment or the model is not one that can be trained on, or the file is there.
    """
    if path.exists():
        raise UserError(f"{path} is there already; name another file with --to")
    resolve_environment(env)
    about = _check_model(model)
    max_positions = int(about.get("max_position_embeddings") or 4096)
    completion = min(COMPLETION_TOKENS, max(1, max_positions // 2))
    is_short = about.get("dtype", about.get("torch_dtype")) == "bfloat16"
    dtype, why = _dtype(is_short=is_short)
    lora = _LORA_OF_MIXTURE if any(about.get(name) for name in _EXPERTS) else _LORA
    text = _TEXT.format(
        model_name=model.resolve().name, env=env, file=path, path=json.dumps(str(model.resolve())),
        lora="" if is_full else lora, max_tokens=completion, env_id=json.dumps(env), dtype=dtype, dtype_why=why,
        threads=max(1, (os.cpu_count() or 2) // 2), lr=FULL_LR if is_full else LORA_LR,
        max_model_len=min(4096, max_positions),
    )  # fmt: skip
    write_atomic(path, text.encode())
    return path


def _check_model(model: Path) -> dict[str, Any]:
    try:
        about: dict[str, Any] = json.loads((model / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{model} is no model directory: its config.json cannot be read ({error})") from error
    if not list(model.glob("*.safetensors")):
        raise UserError(f"{model} holds no .safetensors file; weights in other formats are not read")
    if not Renderer.from_directory(model).has_chat_template:
        raise UserError(f"the tokenizer in {model} lacks a chat template: add a chat_template.jinja to the directory")
    return about


def _dtype(*, is_short: bool) -> tuple[str, str]:
    if not is_short:
        return "float32", "the files hold no bfloat16"
    if multiplies_bfloat16():
        return "bfloat16", "as the files have it, and this processor multiplies it"
    return "float32", 'this processor has no bfloat16; on a GPU say "bfloat16"'
