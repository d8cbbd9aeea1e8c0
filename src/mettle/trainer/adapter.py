"""Low-rank adapters on a network that stays as it is: y = W x + scale B A x on chosen linear modules.

Parts: `choose_modules`, `Adapter` (the pairs of one tenant), `AdapterSlots` (hooks on the network that add whichever
adapter is in force). The pairs live outside of the network, in float32 whatever the base's type, so that its state is
that of the base alone and any number of adapters may stand beside it. Invariants: with no adapter in force the network
computes bit for bit what the base does, and so it does with a new adapter, whose B is zero.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from mettle.errors import UserError
from mettle.inference.engine.adapter_files import PREFIX, AdapterFile, LowRankPair
from mettle.trainer.config import LoraConfig

_OF_EXPERTS = frozenset({"gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3"})
"""What experts call their matrices in checkpoints, however they are stacked here."""


class Adapter:
    """The trained pairs of one adapter, by module name, and what it was made with."""

    def __init__(self, config: LoraConfig, pairs: Mapping[str, LowRankPair]) -> None:
        self.config = config
        self.pairs = {
            name: LowRankPair(nn.Parameter(pair.a.float()), nn.Parameter(pair.b.float()))
            for name, pair in sorted(pairs.items())
        }

    def parameters(self) -> dict[str, nn.Parameter]:
        """All factors under PEFT's names."""
        found: dict[str, nn.Parameter] = {}
        for name, pair in self.pairs.items():
            assert isinstance(pair.a, nn.Parameter)
            assert isinstance(pair.b, nn.Parameter)
            found[f"{PREFIX}{name}.lora_A.weight"] = pair.a
            found[f"{PREFIX}{name}.lora_B.weight"] = pair.b
        return found

    @classmethod
    def create(cls, network: nn.Module, config: LoraConfig, seed: int) -> Adapter:
        """A new adapter: A uniform as PEFT draws it, B zero. The same seed gives the same bytes.

        Raises: UserError when a target module is unknown.
        """
        generator = torch.Generator().manual_seed(seed)
        pairs = {}
        for name, module in choose_modules(network, config).items():
            bound = 1 / math.sqrt(module.in_features)
            a = torch.empty(config.rank, module.in_features).uniform_(-bound, bound, generator=generator)
            device = module.weight.device
            pairs[name] = LowRankPair(a.to(device), torch.zeros(module.out_features, config.rank, device=device))
        return cls(config, pairs)

    @classmethod
    def of_file(cls, network: nn.Module, file: AdapterFile) -> Adapter:
        """An adapter that was read from disk.

        Raises: UserError when it does not fit the network.
        """
        modules = linear_modules(network)
        for name, pair in file.pairs.items():
            there = None if name not in modules else [modules[name].out_features, modules[name].in_features]
            if there != [pair.b.shape[0], pair.a.shape[1]]:
                shape = [pair.b.shape[0], pair.a.shape[1]]
                raise UserError(
                    f"the adapter is of another base: {name!r} is {there or 'not there'} here, {shape} there"
                )
        config = LoraConfig(
            rank=file.rank, alpha=file.config["lora_alpha"], target_modules=tuple(sorted(file.pairs)),
            use_rslora=bool(file.config.get("use_rslora")),
        )  # fmt: skip
        pairs = {
            name: LowRankPair(pair.a.to(modules[name].weight.device), pair.b.to(modules[name].weight.device))
            for name, pair in file.pairs.items()
        }
        return cls(config, pairs)


@dataclass(frozen=True, slots=True)
class _InForce:
    pairs: Mapping[str, LowRankPair] = field(default_factory=dict)
    scale: float = 0.0


class AdapterSlots:
    """The places of a network at which an adapter may add its products. One adapter is in force at a time, or none.

    A thread may keep a choice of its own, so that several compute side by side, each with its adapter; on a CPU alone,
    for elsewhere the backward pass runs in threads of torch's.
    """

    def __init__(self, network: nn.Module) -> None:
        self._modules = linear_modules(network)
        self._hooked: set[str] = set()
        self._of_all = _InForce()
        self._of_thread = threading.local()

    def separate(self) -> None:
        """From now on what this thread puts in force is in force for it alone."""
        self._of_thread.chosen = _InForce()

    def use(self, adapter: Adapter | None) -> None:
        """Compute with `adapter` from now on. The first time that one is used nobody else may be computing."""
        chosen = _InForce() if adapter is None else _InForce(adapter.pairs, adapter.config.scale)
        if hasattr(self._of_thread, "chosen"):
            self._of_thread.chosen = chosen
        else:
            self._of_all = chosen
        for name in chosen.pairs.keys() - self._hooked:
            self._modules[name].register_forward_hook(partial(self._add, name))
            self._hooked.add(name)

    def _add(self, name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        chosen: _InForce = getattr(self._of_thread, "chosen", self._of_all)
        pair = chosen.pairs.get(name)
        if pair is None:
            return None
        added = linear(linear(inputs[0].to(pair.a.dtype), pair.a), pair.b) * chosen.scale
        return output + added.to(output.dtype)


def linear_modules(network: nn.Module) -> dict[str, nn.Linear]:
    """Every linear module by name."""
    return {name: module for name, module in network.named_modules() if isinstance(module, nn.Linear)}


def choose_modules(network: nn.Module, config: LoraConfig) -> dict[str, nn.Linear]:
    """The linear modules that `config` names.

    Raises: UserError for a name that no linear module ends with, or that is only the tied output head's, and where a
    mixture's experts would be among them.
    """
    modules, head = linear_modules(network), head_name(network)
    _refuse_experts(network, config)
    is_tied = bool(getattr(network.config, "tie_word_embeddings", False))
    if config.target_modules == "all-linear":
        chosen = [name for name in modules if _is_switched_on(name, config, head)]
    else:
        for target in config.target_modules:
            if not any(_ends_with(name, target) for name in modules):
                known = sorted({name.rpartition(".")[2] for name in modules})
                raise UserError(
                    f"lora.target_modules: no linear module of this model is called {target!r}; there are"
                    f" {', '.join(known)}"
                )
        chosen = [name for name in modules if any(_ends_with(name, target) for target in config.target_modules)]
    if is_tied:
        chosen = [name for name in chosen if name != head]
    if not chosen:
        why = "its output head is tied to the input embedding and left alone" if is_tied else "none is chosen"
        raise UserError(f"lora: there is nothing to train in this model: {why}")
    return {name: modules[name] for name in chosen}


def _refuse_experts(network: nn.Module, config: LoraConfig) -> None:
    """A mixture's experts are stacked in one parameter, not linear modules: they would be left out without a word."""
    experts = {name.rpartition(".")[2] for name, _ in network.named_parameters() if ".experts." in name}
    if not experts:
        return
    named = () if config.target_modules == "all-linear" else config.target_modules
    if named and not any(target.rpartition(".")[2] in _OF_EXPERTS | experts for target in named):
        return
    if not named and not config.mlp:
        return
    raise UserError(
        "lora: this model is a mixture, and adapters of experts are not trained; set lora.mlp = false (a client of the"
        " training service: train_mlp=False), or name modules of attention in lora.target_modules"
    )


def head_name(network: nn.Module) -> str | None:
    """The output head's name."""
    get: Any = getattr(network, "get_output_embeddings", None)
    head = get() if get is not None else None
    return (
        next((name for name, module in network.named_modules() if module is head), None) if head is not None else None
    )


def peft_config(adapter: Adapter, all_modules: Sequence[str], base: Path | None) -> dict[str, Any]:
    """`adapter_config.json`: names as short as they can be without taking in another module."""
    chosen = set(adapter.pairs)
    short = sorted({name.rpartition(".")[2] for name in chosen})
    is_exact = {name for name in all_modules if any(_ends_with(name, end) for end in short)} == chosen
    alpha = adapter.config.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if base is None else str(base),
        "r": adapter.config.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "target_modules": short if is_exact else sorted(chosen),
        "use_rslora": adapter.config.use_rslora,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
    }


def _is_switched_on(name: str, config: LoraConfig, head: str | None) -> bool:
    if name == head:
        return config.unembed
    is_attention = any("attn" in part or "attention" in part for part in name.split("."))
    return config.attention if is_attention else config.mlp


def _ends_with(name: str, target: str) -> bool:
    return name == target or name.endswith("." + target)
