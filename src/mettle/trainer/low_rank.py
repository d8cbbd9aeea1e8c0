"""What an adapter's factors add to a product: for a linear module, and for a mixture's experts.

    tokens ─► by expert ─► gate and up: W_e x + scale B_e A_e x ─► act(gate) up ─► down, alike ─► by token, times shares

transformers keeps a layer's experts stacked in two parameters, and its product over them has no place for factors, so
with an adapter in force the experts are computed here. Each expert has a pair of its own for each projection; those of
a layer are stacked too, and lie in files one by one under the names that experts have in checkpoints, as PEFT and vLLM
know them. Parts: `low_rank_product`, `adapted_experts`, `in_file` and `in_network` (between the two ways to lie).
Invariant: with a B of zeros the experts compute what transformers computes, to rounding.
Legend: R tokens, K experts of a token, H hidden size, E experts, S = R K rows by expert.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from mettle.errors import UserError
from mettle.inference.engine.adapter_files import LowRankPair
from mettle.trainer.cut import is_cut

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
FAMILIES = ("qwen3_moe",)
"""Mixtures whose experts have these projections, in this order, and lie so in checkpoints."""
_OF_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)")


def low_rank_product(inputs: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale B A x, in the factors' own type."""
    return linear(linear(inputs.to(a.dtype), a), b) * scale


def adapted_experts(
    module: Any, pairs: Mapping[str, LowRankPair], scale: float, hidden_RH: Tensor, index_RK: Tensor, shares_RK: Tensor
) -> Tensor:
    """What a layer's experts make of tokens [R, H] with `pairs` by projection, each `a` [E, rank, in], `b`
    [E, out, rank]."""
    num_chosen = index_RK.shape[1]
    experts_S, order_S = torch.sort(index_RK.flatten(), stable=True)
    counts = torch.bincount(experts_S, minlength=len(module.down_proj)).tolist()
    # Cut once: each cut of its own would cost the backward pass a gradient as large as the whole stack.
    factors = {name: list(zip(pair.a.unbind(), pair.b.unbind(), strict=True)) for name, pair in pairs.items()}

    def project(name: str, expert: int, weight: Tensor, inputs: Tensor) -> Tensor:
        made = linear(inputs, weight)
        if name not in factors:
            return made
        return made + low_rank_product(inputs, *factors[name][expert], scale).to(made.dtype)

    made = []
    for expert, rows in enumerate(torch.split(hidden_RH[order_S // num_chosen], counts)):
        if len(rows):
            gate_weight, up_weight = module.gate_up_proj[expert].chunk(2)
            gate = project("gate_proj", expert, gate_weight, rows)
            up = project("up_proj", expert, up_weight, rows)
            made.append(project("down_proj", expert, module.down_proj[expert], module.act_fn(gate) * up))
    made_SH = torch.cat(made)
    made_RKH = torch.empty_like(made_SH).index_copy(0, order_S, made_SH).view(*index_RK.shape, -1)
    return (made_RKH * shares_RK[..., None]).sum(1).to(hidden_RH.dtype)


def expert_modules(network: nn.Module) -> dict[str, Any]:
    """The modules of stacked experts that can have adapters, by name: none in a network of another family, nor where
    the experts are spread over ranks."""
    if getattr(network.config, "model_type", None) not in FAMILIES:
        return {}
    from mettle.trainer.experts import stacked_experts

    names = {id(module): name for name, module in network.named_modules()}
    return {names[id(module)]: module for module in stacked_experts(network) if not _is_spread(module.down_proj)}


def _is_spread(parameter: Tensor) -> bool:
    return is_cut(parameter) and "expert" in (parameter.device_mesh.mesh_dim_names or ())


def matrix_shape(module: Any, projection: str) -> tuple[int, int]:
    """Outputs and inputs of a projection of stacked experts."""
    hidden, inner = module.down_proj.shape[1:]
    return (hidden, inner) if projection == "down_proj" else (inner, hidden)


def in_file(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Factors as they lie in a file: those of experts, which are stacked in `tensors`, one by one."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            found[name] = tensor
        else:
            module, _, rest = name.rpartition(".experts.")
            found |= {f"{module}.experts.{number}.{rest}": each for number, each in enumerate(tensor)}
    return found


def in_network(pairs: Mapping[str, LowRankPair]) -> dict[str, LowRankPair]:
    """Pairs of a file by the name of what they stand at in a network, where experts are stacked.

    Raises: UserError when an expert between others is missing, or they differ in shape.
    """
    found: dict[str, LowRankPair] = {}
    stacks: dict[str, dict[int, LowRankPair]] = {}
    for name, pair in pairs.items():
        if match := _OF_EXPERT.fullmatch(name):
            stacks.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = pair
        else:
            found[name] = pair
    for name, stack in stacks.items():
        if set(stack) != set(range(len(stack))):
            missing = next(number for number in range(len(stack)) if number not in stack)
            raise UserError(
                f"the adapter has no pair for expert {missing} of {name!r}: all of a layer have one, or none"
            )
        ordered = [stack[number] for number in range(len(stack))]
        if len({(tuple(pair.a.shape), tuple(pair.b.shape)) for pair in ordered}) != 1:
            raise UserError(f"the adapter's pairs for the experts of {name!r} differ in shape")
        found[name] = LowRankPair(torch.stack([p.a for p in ordered]), torch.stack([p.b for p in ordered]))
    return found
