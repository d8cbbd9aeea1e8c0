"""LoRA of many tenants on one frozen network: a hook on each target layer adds the product of the active adapter.

Parts: `Adapter` (matrices by module), `AdapterNetwork` (the hooks). Files are PEFT's: `adapter_config.json` and
`adapter_model.safetensors`. Invariant: the network's own weights are never changed, and a network without an active
adapter computes what the base computes, to the last bit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mettle.errors import UserError
from mettle.storage.files import write_json
from mettle.trainer.service.records import AdapterSpec

_ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP: Final = ("gate_proj", "up_proj", "down_proj")
_PREFIX: Final = "base_model.model."
WEIGHTS: Final = "adapter_model.safetensors"
CONFIG: Final = "adapter_config.json"


@dataclass(slots=True)
class Adapter:
    """A LoRA: for each module A [r, in] and B [out, r]; it adds `scale` B A x."""

    spec: AdapterSpec
    matrices: Mapping[str, tuple[nn.Parameter, nn.Parameter]]

    @property
    def scale(self) -> float:
        return self.spec.alpha / self.spec.rank

    def parameters(self) -> dict[str, nn.Parameter]:
        """All matrices under PEFT's names."""
        return {
            f"{_PREFIX}{module}.lora_{letter}.weight": matrix
            for module, pair in self.matrices.items()
            for letter, matrix in zip("AB", pair, strict=True)
        }

    def save(self, folder: Path, base_model: str) -> None:
        """Write PEFT's two files."""
        targets = sorted({module.rpartition(".")[2] for module in self.matrices})
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_model,
            "r": self.spec.rank,
            "lora_alpha": self.spec.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": targets,
            "use_rslora": False,
            "inference_mode": True,
        }
        state = {name: matrix.detach().cpu().contiguous() for name, matrix in self.parameters().items()}
        save_file(state, str(folder / WEIGHTS), metadata={"format": "pt"})
        write_json(folder / CONFIG, config)


class AdapterNetwork:
    """A causal LM whose layers ask for the adapter that is active."""

    def __init__(self, network: nn.Module) -> None:
        self._active: Adapter | None = None
        self.modules: dict[str, nn.Linear] = {}
        for parameter in network.parameters():
            parameter.requires_grad_(False)
        for name, module in network.named_modules():
            is_target = name.rpartition(".")[2] in (*_ATTENTION, *_MLP, "lm_head")
            if is_target and isinstance(module, nn.Linear):
                self.modules[name] = module
                module.register_forward_hook(self._hook(name))
        if not self.modules:
            raise UserError(f"{type(network).__name__} has no layers that a LoRA of this service goes to")

    @contextmanager
    def using(self, adapter: Adapter | None) -> Iterator[None]:
        """Compute with an adapter in the block. One thread at a time."""
        before, self._active = self._active, adapter
        try:
            yield
        finally:
            self._active = before

    def new(self, spec: AdapterSpec) -> Adapter:
        """A fresh adapter, equal to the base: A uniform, by the spec's seed alone, and B zero."""
        generator = torch.Generator().manual_seed(spec.seed % 2**63)
        matrices = {}
        for name in self.targets(spec):
            module = self.modules[name]
            bound = 1 / math.sqrt(module.in_features)
            a = torch.empty(spec.rank, module.in_features).uniform_(-bound, bound, generator=generator)
            b = torch.zeros(module.out_features, spec.rank)
            device = module.weight.device
            matrices[name] = (nn.Parameter(a.to(device)), nn.Parameter(b.to(device)))
        if not matrices:
            raise UserError("a LoRA of no layer trains nothing: one of train_attn, train_mlp, train_unembed must be on")
        return Adapter(spec, matrices)

    def load(self, folder: Path, spec: AdapterSpec) -> Adapter:
        """An adapter from its files. Raises: UserError when they are not of this base and spec."""
        adapter = self.new(spec)
        try:
            state = load_file(str(folder / WEIGHTS))
        except (SafetensorError, OSError) as error:
            raise UserError(f"the adapter cannot be read: {error}") from error
        wanted = adapter.parameters()
        if set(state) != set(wanted):
            some = sorted(set(state) ^ set(wanted))[0]
            raise UserError(f"the adapter is not one of this base and its layers: {some!r} is in one of them alone")
        with torch.no_grad():
            for name, matrix in wanted.items():
                if state[name].shape != matrix.shape:
                    raise UserError(f"{name!r} has shape {tuple(state[name].shape)}, not {tuple(matrix.shape)}")
                matrix.copy_(state[name])
        return adapter

    def targets(self, spec: AdapterSpec) -> list[str]:
        """The modules that a spec goes to, in the network's order."""
        kinds = (*_ATTENTION * spec.is_attention, *_MLP * spec.is_mlp, *("lm_head",) * spec.is_unembedding)
        return [name for name in self.modules if name.rpartition(".")[2] in kinds]

    def _hook(self, name: str) -> Any:
        def add(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            pair = None if self._active is None else self._active.matrices.get(name)
            if pair is None or self._active is None:
                return output
            a, b = pair
            return output + (inputs[0] @ a.t()) @ b.t() * self._active.scale

        return add


def read_spec(folder: Path) -> AdapterSpec:
    """The spec of an adapter in its files."""
    config = json.loads((folder / CONFIG).read_text())
    names = set(config["target_modules"])
    attention, mlp, unembedding = (bool(names & set(kinds)) for kinds in (_ATTENTION, _MLP, ("lm_head",)))
    return AdapterSpec(config["r"], 0, attention, mlp, unembedding, config["lora_alpha"])


def merged_state(base: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """The base's weights with an adapter's products added; the input embedding stays as it is."""
    config = json.loads((folder / CONFIG).read_text())
    state, scale = dict(base), config["lora_alpha"] / config["r"]
    matrices = load_file(str(folder / WEIGHTS))
    for name in sorted(matrices):
        if not name.endswith(".lora_A.weight"):
            continue
        module = name.removeprefix(_PREFIX).removesuffix(".lora_A.weight")
        weight = f"{module}.weight"
        source = state.get(weight, state.get("model.embed_tokens.weight") if module == "lm_head" else None)
        if source is None:
            raise UserError(f"the adapter has matrices for {module!r}, which the base lacks")
        product = matrices[name.replace("lora_A", "lora_B")] @ matrices[name]
        state[weight] = source + (product * scale).to(source)
    return state
