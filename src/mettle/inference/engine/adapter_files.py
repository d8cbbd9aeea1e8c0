"""Adapters on disk, in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

Parts: `LowRankPair` (one module's two factors), `AdapterFile`, `read_adapter`, `merged_state` (a base with an adapter
added to its weights). Invariant: an adapter that is more than plain LoRA, or does not fit the base, is refused; nothing
of it is left out in silence.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from mettle.errors import UserError
from mettle.storage.weights import ADAPTER_CONFIG, ADAPTER_FILE

PREFIX = "base_model.model."
_PLAIN = {
    "use_dora": (False,),
    "bias": ("none",),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "fan_in_fan_out": (False,),
    "lora_bias": (False,),
    "layer_replication": (None,),
    "target_parameters": (None, []),
}
"""Settings of PEFT that change what an adapter computes, and the values under which it is plain LoRA."""


@dataclass(frozen=True, slots=True)
class LowRankPair:
    """One module's factors: `a` [rank, inputs], `b` [outputs, rank]; what they add is scale x a^T b^T."""

    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """An adapter as it was read: PEFT's config, the factor of all products, and the pairs by module name."""

    config: dict[str, Any]
    scale: float
    pairs: dict[str, LowRankPair]

    @property
    def rank(self) -> int:
        return int(self.config["r"])


def read_adapter(folder: Path) -> AdapterFile:
    """The adapter in a folder.

    Raises: UserError when there is none, a file is damaged, or it is more than plain LoRA.
    """
    try:
        config = json.loads((folder / ADAPTER_CONFIG).read_text())
        state = load_file(str(folder / ADAPTER_FILE))
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except FileNotFoundError as error:
        raise UserError(f"{folder} is no adapter: it has no {Path(error.filename or ADAPTER_FILE).name}") from error
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"the adapter in {folder} cannot be read: {error}") from error
    if config.get("peft_type") != "LORA":
        raise UserError(f"{folder} holds an adapter of kind {config.get('peft_type')!r}; LORA is what can be used")
    odd = [name for name, plain in _PLAIN.items() if name in config and config[name] not in plain]
    if odd:
        raise UserError(f"the adapter in {folder} is more than plain LoRA: it sets {', '.join(odd)}")
    if rank < 1:
        raise UserError(f"the adapter in {folder} has rank {rank}; an adapter has at least 1")
    scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    return AdapterFile(config, scale, _pairs(folder, state, rank))


def _pairs(folder: Path, state: Mapping[str, Tensor], rank: int) -> dict[str, LowRankPair]:
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        module, _, half = name.removeprefix(PREFIX).removesuffix(".weight").rpartition(".")
        if not name.startswith(PREFIX) or half not in ("lora_A", "lora_B") or tensor.ndim != 2:
            raise UserError(f"{folder / ADAPTER_FILE}: {name!r} is no factor of a LoRA adapter")
        halves.setdefault(module, {})[half] = tensor
    for module, found in halves.items():
        if len(found) < 2 or found["lora_A"].shape[0] != rank or found["lora_B"].shape[1] != rank:
            raise UserError(f"{folder / ADAPTER_FILE}: the factors of {module!r} are not two of rank {rank}")
        if not all(bool(torch.isfinite(tensor).all()) for tensor in found.values()):
            raise UserError(f"{folder / ADAPTER_FILE}: the factors of {module!r} hold values that are not finite")
    return {module: LowRankPair(found["lora_A"], found["lora_B"]) for module, found in halves.items()}


def merged_state(base: Mapping[str, Tensor], adapter: AdapterFile) -> dict[str, Tensor]:
    """The base's weights with the adapter's products added; the base itself is left alone.

    What is added to is float32, whatever the base's type: rounded to a short one it would be another policy than was
    trained.

    Raises: UserError when the adapter has a module that the base has not, or of another shape.
    """
    merged = dict(base)
    for module, pair in adapter.pairs.items():
        weight = base.get(f"{module}.weight")
        if weight is None:
            raise UserError(f"the adapter is of another base: this one has no {module!r}")
        if tuple(weight.shape) != (pair.b.shape[0], pair.a.shape[1]):
            shape = [pair.b.shape[0], pair.a.shape[1]]
            raise UserError(f"the adapter is of another base: {module!r} is {list(weight.shape)} here, {shape} there")
        product = (pair.b.float() @ pair.a.float()) * adapter.scale
        merged[f"{module}.weight"] = weight.float() + product
    return merged
