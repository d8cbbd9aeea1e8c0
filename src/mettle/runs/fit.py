"""Does a model fit this machine, and a teacher the policy? Told from the headers of weights and from tokenizers, before
any weight is read."""

from __future__ import annotations

import json
import math
from pathlib import Path

from mettle.clients.renderer import Renderer
from mettle.errors import UserError
from mettle.processes.host import free_memory_bytes
from mettle.runs.config import RunConfig
from mettle.runs.preflight import GIB

FLOAT_BYTES = 4


def check_fit(config: RunConfig) -> None:
    """Raises: UserError when weights, gradients, moments and the engine's copies alone are more than there is."""
    if config.model.path is None:
        return
    trained, served = _weights_bytes(config, config.model.path)
    least, available = trained + served, free_memory_bytes()
    if available is not None and config.trainer.device != "cuda" and least > available:
        how = "train adapters ([model] lora)" if config.trainer.lora is None else "take a smaller model"
        raise UserError(
            f"{config.model.path} does not fit: training takes at least {trained / GIB:.1f} GiB and the engine"
            f" {served / GIB:.1f}, and {available / GIB:.1f} are available; {how}"
        )


def least_memory_bytes(config: RunConfig) -> int | None:
    """What weights, gradients, moments and the engine's copies take alone; None for a policy made on the spot."""
    return None if config.model.path is None else sum(_weights_bytes(config, config.model.path))


def _weights_bytes(config: RunConfig, folder: Path) -> tuple[int, int]:
    """For the trainer, and for the engine."""
    files = list(folder.glob("*.safetensors"))
    wide = sum(map(_float32_bytes, files))
    on_disk = sum(file.stat().st_size for file in files)
    return (on_disk if config.trainer.lora is not None else 4 * wide), 2 * wide


PROBE = "Seven red foxes, 42 grey geese: who was first?"
"""Plain letters: a policy made from nothing has a token for each of its bytes."""


def check_teacher(config: RunConfig) -> None:
    """Raises: UserError when the trainer's teacher is not there, or has other tokens than the policy."""
    folder = config.trainer.distillation.teacher
    if folder is None:
        return
    if not (folder / "config.json").exists():
        raise UserError(f"trainer.distillation.teacher {str(folder)!r} holds no model: it has no config.json")
    made_here = list(PROBE.encode())
    wanted = made_here if config.model.path is None else Renderer.from_directory(config.model.path).encode(PROBE)
    found = Renderer.from_directory(folder).encode(PROBE)
    if found != wanted:
        raise UserError(
            f"the teacher in {folder} has another tokenizer than the policy ({PROBE!r} is {len(found)} tokens to it and"
            f" {len(wanted)} to the policy): take a teacher with the policy's vocabulary"
        )


def _float32_bytes(file: Path) -> int:
    """What the tensors of a safetensors file take in float32, by its header."""
    try:
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    except (ValueError, OSError) as error:
        raise UserError(f"{file} cannot be read as safetensors: {error}") from error
    return sum(math.prod(about["shape"]) * FLOAT_BYTES for name, about in header.items() if name != "__metadata__")
