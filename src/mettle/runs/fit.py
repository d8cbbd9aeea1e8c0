"""Does a model fit this machine, and a teacher the policy? Told from the headers of weights, from tokenizers, and by
teachers that are served, before any weight is read."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from mettle.clients.renderer import PROBE, Renderer
from mettle.errors import UserError
from mettle.orchestrator.config import FrozenModelConfig
from mettle.processes.host import free_memory_bytes
from mettle.processes.loop_thread import LoopThread
from mettle.runs.config import RunConfig
from mettle.runs.preflight import GIB
from mettle.storage.headers import shapes_of

FLOAT_BYTES = 4


def check_fit(config: RunConfig) -> None:
    """Raises: UserError when weights, gradients, moments, a teacher and the engine's copies are more than there is."""
    trainer = config.trainer
    trained, engine, teacher = _needed_bytes(config)
    available = free_memory_bytes()
    if available is None or trainer.device == "cuda":
        return
    if trained + engine + teacher > available:
        how = "train adapters ([model] lora)" if trainer.lora is None else "take a smaller model"
        held = f", the teacher {teacher / GIB:.1f}" if teacher else ""
        raise UserError(
            f"{config.model.path or trainer.distillation.teacher} does not fit: training takes at least"
            f" {trained / GIB:.1f} GiB{held} and the engine {engine / GIB:.1f}, and {available / GIB:.1f} are"
            f" available; {how if engine > 2 * teacher else 'ask a teacher behind an endpoint (top_k)'}"
        )


def least_memory_bytes(config: RunConfig) -> int | None:
    """What weights, gradients, moments, a teacher and the engine's copies take alone; None where no file says."""
    return sum(_needed_bytes(config)) or None


def _needed_bytes(config: RunConfig) -> tuple[int, int, int]:
    """Of the trainer, of the engine, and of a teacher that the trainer holds."""
    trainer = config.trainer
    on_disk, wide = _weights_of(config.model.path)
    _, teacher = _weights_of(trainer.distillation.teacher)
    teacher //= 1 if trainer.dtype == "float32" else 2
    return (on_disk if trainer.lora is not None else 4 * wide), 2 * wide, teacher


def _weights_of(folder: Path | None) -> tuple[int, int]:
    """(bytes as the files have them, bytes in float32); nothing of no folder."""
    files = [] if folder is None else list(folder.glob("*.safetensors"))
    return sum(file.stat().st_size for file in files), sum(map(_float32_bytes, files))


PATIENCE_S = 60.0
"""How long a teacher may take for its first answer; it is still loading, or busy with others, if it takes longer."""


def check_teacher(config: RunConfig) -> None:
    """Raises: UserError when the trainer's teacher is not there, or has other tokens than the policy."""
    folder = config.trainer.distillation.teacher
    if folder is None:
        return
    if not (folder / "config.json").exists():
        raise UserError(f"trainer.distillation.teacher {str(folder)!r} holds no model: it has no config.json")
    wanted = _policy_ids(config)
    found = Renderer.from_directory(folder).encode(PROBE)
    if found != wanted:
        raise UserError(
            f"the teacher in {folder} has another tokenizer than the policy ({PROBE!r} is {len(found)} tokens to it and"
            f" {len(wanted)} to the policy): take a teacher with the policy's vocabulary"
        )


def check_services(config: RunConfig) -> None:
    """Raises: UserError when a model that algorithms ask has no key here, does not answer, or has other tokens."""
    services = config.orchestrator.services
    for name, service in services.items():
        if service.api_key_var is not None and service.api_key_var not in os.environ:
            raise UserError(
                f"orchestrator.services.{name}.api_key_var names {service.api_key_var}, which this environment does not"
                " set; set it, or leave it out"
            )
    if services:
        thread = LoopThread("services")  # who makes the run may have a loop of their own that runs
        try:
            thread.submit(_ask_all(services, _policy_ids(config))).result()
        finally:
            thread.close()


async def _ask_all(services: Mapping[str, FrozenModelConfig], token_ids: Sequence[int]) -> None:
    # Few runs have some, and what speaks HTTP takes a tenth of a second to import.
    from mettle.orchestrator.services import HttpModel, HttpServices

    asked = HttpServices(
        {
            name: HttpModel(name, **{**made.model_dump(), "timeout_s": min(made.timeout_s, PATIENCE_S)}, max_retries=1)
            for name, made in services.items()
        }
    )
    try:
        await asked.check_answers(token_ids, PROBE)
    finally:
        await asked.close()


def _policy_ids(config: RunConfig) -> list[int]:
    """The policy's tokens of the probe."""
    made_here = list(PROBE.encode())
    return made_here if config.model.path is None else Renderer.from_directory(config.model.path).encode(PROBE)


def _float32_bytes(file: Path) -> int:
    """What the tensors of a safetensors file take in float32, by its header."""
    return sum(math.prod(shape) * FLOAT_BYTES for shape in shapes_of(file).values())
