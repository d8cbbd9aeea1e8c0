"""What a config asks of the model's network, held against the model's files before anything is made.

Parts: `check_network`: the modules that are to get an adapter, the experts that ranks are to share or the engine to
name, and how long sequences may be. Invariant: what is refused here trainer or engine refuse, too; where the files
do not tell the network's modules (a family whose checkpoints have other names than its network) it is left to them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from mettle.errors import UserError
from mettle.inference.engine.families import FAMILIES
from mettle.runs.config import RunConfig
from mettle.storage.headers import shapes_in
from mettle.trainer.expert_ranks import check_expert_ranks
from mettle.trainer.presets import PRESETS
from mettle.trainer.targets import choose_targets

HEAD = "lm_head"
_NO_LINEAR = frozenset({"embed_tokens"})
_EXPERT = re.compile(r"(.*\bexperts)\.(\d+)\.")
_STACKED = re.compile(r"(.*\bexperts)\.\w+_proj(?:\.weight)?")
"""Where a file has a layer's experts in one tensor."""
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_PRESET_MODULES = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
"""Linear modules of a layer of the policies that are made from nothing."""


def check_network(config: RunConfig) -> None:
    """Raises: UserError for an adapter on modules that the model does not have, for experts that it does not have or
    that cannot be shared out, and for longer sequences than it has positions."""
    trainer, folder = config.trainer, config.model.path
    about = {} if folder is None else _read(folder / "config.json")
    if config.inference.engine == "embedded":
        _check_engine(config, about)
    if trainer.lora is None and trainer.expert_parallel == 1:
        return
    shapes = {} if folder is None else shapes_in(folder)
    if folder is not None and not shapes:
        return
    if trainer.expert_parallel > 1 and (folder is None or about.get("model_type") in FAMILIES):
        check_expert_ranks(_nums_experts(shapes), trainer.expert_parallel)
    if trainer.lora is None:
        return
    if folder is None:
        layers = range(PRESETS[config.model.preset].num_layers)
        made = [f"model.layers.{layer}.{module}" for layer in layers for module in _PRESET_MODULES]
        choose_targets([*made, HEAD], trainer.lora, head=HEAD, is_tied=True)
    elif (family := FAMILIES.get(str(about.get("model_type")))) is not None:
        is_tied = bool(about.get("tie_word_embeddings", family.defaults.get("tie_word_embeddings", False)))
        choose_targets([*_modules(shapes), HEAD], trainer.lora, head=HEAD, is_tied=is_tied)


def _check_engine(config: RunConfig, about: Mapping[str, object]) -> None:
    is_made = config.model.path is None
    positions = PRESETS[config.model.preset].max_positions if is_made else about.get("max_position_embeddings")
    wanted = config.inference.max_model_len
    if wanted is not None and isinstance(positions, int) and wanted > positions:
        raise UserError(f"inference.max_model_len is {wanted}, and the model has {positions} positions: lower it")
    family = FAMILIES.get(str(about.get("model_type")))
    if config.inference.record_experts and (is_made or (family is not None and not family.has_experts)):
        raise UserError("inference.record_experts is for mixtures of experts, and this model is dense: leave it out")


def _read(file: Path) -> Mapping[str, object]:
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    return about if isinstance(about, dict) else {}


def _modules(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Modules with a matrix, by name; a mixture's experts are one, as they are stacked in its network."""
    named = set()
    for name, shape in shapes.items():
        if len(shape) == 2:
            named.add(_EXPERT.sub(r"\1.", name.removesuffix(".weight")))
        elif (match := _STACKED.fullmatch(name)) is not None:
            named.update(f"{match[1]}.{projection}" for projection in _PROJECTIONS)
    return sorted(name for name in named if name.rpartition(".")[2] not in _NO_LINEAR and name != HEAD)


def _nums_experts(shapes: Mapping[str, tuple[int, ...]]) -> list[int]:
    """How many experts each layer that is a mixture has."""
    found: dict[str, set[str]] = {}
    for name, shape in shapes.items():
        if (match := _EXPERT.match(name)) is not None:
            found.setdefault(match[1], set()).add(match[2])
        elif (match := _STACKED.fullmatch(name)) is not None:
            found[match[1]] = {str(number) for number in range(shape[0])}
    return [len(numbers) for numbers in found.values()]
