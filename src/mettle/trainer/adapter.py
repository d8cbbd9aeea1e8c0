"""Low-rank adapters on a network that stays as it is: y = W x + scale B A x on chosen linear modules and experts.

Parts: `choose_modules`, `Adapter` (the pairs of one tenant), `AdapterSlots` (hooks on the network that add whichever
adapter is in force); a mixture's experts are `low_rank`'s. The pairs live outside of the network, in float32 whatever
the base's type, so that its state is that of the base alone and any number of adapters may stand beside it. Invariants:
with no adapter in force the network computes bit for bit what the base does, and so it does with a new adapter, whose B
is zero, on linear modules.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mettle.errors import UserError
from mettle.inference.engine.adapter_files import PREFIX, AdapterFile, LowRankPair
from mettle.trainer.config import LoraConfig
from mettle.trainer.low_rank import (
    FAMILIES,
    PROJECTIONS,
    adapted_experts,
    expert_modules,
    in_network,
    low_rank_product,
    matrix_shape,
)
from mettle.trainer.targets import choose_targets, ends_with

_OF_EXPERTS = frozenset({*PROJECTIONS, "gate_up_proj", "w1", "w2", "w3"})
"""What experts call their matrices in checkpoints, however they are stacked here."""


@dataclass(frozen=True, slots=True)
class Adaptable:
    """Where a pair may stand: a matrix [outputs, inputs], or `stack` of (E,) of them, one an expert."""

    outputs: int
    inputs: int
    device: torch.device
    stack: tuple[int, ...] = ()

    @property
    def shape(self) -> list[int]:
        """Of the matrices."""
        return [*self.stack, self.outputs, self.inputs]


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
        for name, at in choose_modules(network, config).items():
            bound = 1 / math.sqrt(at.inputs)
            a = torch.empty(*at.stack, config.rank, at.inputs).uniform_(-bound, bound, generator=generator)
            b = torch.zeros(*at.stack, at.outputs, config.rank, device=at.device)
            pairs[name] = LowRankPair(a.to(at.device), b)
        return cls(config, pairs)

    @classmethod
    def of_file(cls, network: nn.Module, file: AdapterFile) -> Adapter:
        """An adapter that was read from disk.

        Raises: UserError when it does not fit the network.
        """
        there, pairs = places(network), in_network(file.pairs)
        for name, pair in pairs.items():
            own = there[name].shape if name in there else None
            shape = [*pair.b.shape[:-1], pair.a.shape[-1]]
            if own != shape:
                raise UserError(f"the adapter is of another base: {name!r} is {own or 'not there'} here, {shape} there")
        config = LoraConfig(
            rank=file.rank, alpha=file.config["lora_alpha"], target_modules=tuple(sorted(pairs)),
            use_rslora=bool(file.config.get("use_rslora")),
        )  # fmt: skip
        moved = {name: LowRankPair(p.a.to(there[name].device), p.b.to(there[name].device)) for name, p in pairs.items()}
        return cls(config, moved)


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
        self._experts = expert_modules(network)
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
        for name in chosen.pairs.keys() & self._modules.keys() - self._hooked:
            self._modules[name].register_forward_hook(partial(self._add, name))
            self._hooked.add(name)
        for name in {name.rpartition(".")[0] for name in chosen.pairs.keys() - self._modules.keys()} - self._hooked:
            module = self._experts[name]
            module.forward = partial(self._mix, name, module, module.forward)
            self._hooked.add(name)

    def _in_force(self) -> _InForce:
        chosen: _InForce = getattr(self._of_thread, "chosen", self._of_all)
        return chosen

    def _add(self, name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        chosen = self._in_force()
        pair = chosen.pairs.get(name)
        if pair is None:
            return None
        return output + low_rank_product(inputs[0], pair.a, pair.b, chosen.scale).to(output.dtype)

    def _mix(self, name: str, module: Any, own: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        chosen = self._in_force()
        names = ((projection, f"{name}.{projection}") for projection in PROJECTIONS)
        pairs = {projection: chosen.pairs[each] for projection, each in names if each in chosen.pairs}
        return adapted_experts(module, pairs, chosen.scale, *inputs) if pairs else own(*inputs)


def linear_modules(network: nn.Module) -> dict[str, nn.Linear]:
    """Every linear module by name."""
    return {name: module for name, module in network.named_modules() if isinstance(module, nn.Linear)}


def places(network: nn.Module) -> dict[str, Adaptable]:
    """Where pairs may stand, by name: linear modules, and the projections of stacked experts."""
    found = {
        name: Adaptable(module.out_features, module.in_features, module.weight.device)
        for name, module in linear_modules(network).items()
    }
    for name, module in expert_modules(network).items():
        stack, device = (len(module.down_proj),), module.down_proj.device
        for projection in PROJECTIONS:
            found[f"{name}.{projection}"] = Adaptable(*matrix_shape(module, projection), device, stack)
    return found


def choose_modules(network: nn.Module, config: LoraConfig) -> dict[str, Adaptable]:
    """The places that `config` names.

    Raises: UserError for a name that no module ends with, or that is only the tied output head's, and where a mixture's
    experts would be among them that cannot be, or not all of them.
    """
    modules = places(network)
    _refuse_experts(network, config)
    is_tied = bool(getattr(network.config, "tie_word_embeddings", False))
    chosen = choose_targets(list(modules), config, head=head_name(network), is_tied=is_tied)
    _check_alike([name for name in chosen if modules[name].stack], list(expert_modules(network)))
    return {name: modules[name] for name in chosen}


def _check_alike(chosen: list[str], layers: list[str]) -> None:
    """PEFT has one rule for all layers' experts, and takes gate and up together, which are one matrix there."""
    kinds = {name.rpartition(".")[2] for name in chosen}
    if len(chosen) != len(kinds) * len(layers) and chosen:
        raise UserError("lora.target_modules: of a mixture's experts those of all layers get adapters, or none")
    if len(kinds & {"gate_proj", "up_proj"}) == 1:
        raise UserError("lora.target_modules: a mixture's experts get adapters on gate_proj and up_proj together")


def _refuse_experts(network: nn.Module, config: LoraConfig) -> None:
    """Experts that are stacked in another way, or spread over ranks, would be left out without a word."""
    experts = {name.rpartition(".")[2] for name, _ in network.named_parameters() if ".experts." in name}
    if not experts or expert_modules(network):
        return
    named = () if config.target_modules == "all-linear" else config.target_modules
    if named and not any(target.rpartition(".")[2] in _OF_EXPERTS | experts for target in named):
        return
    if not named and not config.mlp:
        return
    raise UserError(
        f"lora: adapters of experts are trained for {', '.join(FAMILIES)} with trainer.expert_parallel 1, and this"
        f" model is {getattr(network.config, 'model_type', 'another')}; set lora.mlp = false (a client of the training"
        " service: train_mlp=False), or name modules of attention in lora.target_modules"
    )


def head_name(network: nn.Module) -> str | None:
    """The output head's name."""
    get: Any = getattr(network, "get_output_embeddings", None)
    head = get() if get is not None else None
    return (
        next((name for name, module in network.named_modules() if module is head), None) if head is not None else None
    )


def peft_config(adapter: Adapter, network: nn.Module, base: Path | None) -> dict[str, Any]:
    """`adapter_config.json`: names as short as they can be without taking in another module."""
    chosen = set(adapter.pairs)
    short = sorted({name.rpartition(".")[2] for name in chosen})
    is_exact = {name for name in places(network) if any(ends_with(name, end) for end in short)} == chosen
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
