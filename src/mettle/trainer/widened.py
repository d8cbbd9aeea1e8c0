"""A frozen base that is stored in bfloat16 and computed with in float32, for processors that multiply no bfloat16.

Without instructions for it the products of a forward pass run at a quarter of float32's speed (10 to 45 GFLOP/s on a
core with AVX2), those of a backward pass at a fiftieth. So a matrix is widened where it is used, into memory of the
thread's own that the next one overwrites, and for the backward pass once more: the base costs its bytes on disk, which
are mapped, and nothing is rounded.
Invariant: the numbers are those of the same weights loaded in float32.
Legend: R rows, D inputs, X outputs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mettle.processes.host import multiplies_bfloat16

BLOCK_NUMBERS = 2**23
"""Of a matrix that are widened at a time: 32 MiB."""

_scratch = threading.local()


def widen(network: nn.Module, device: torch.device) -> bool:
    """Make a frozen network compute in float32 with its short weights, where that is quicker and can be done.

    False leaves it as it is: it is on a GPU, this CPU multiplies bfloat16 itself, or the network has matrices outside
    of plain linear modules and embeddings (stacked experts), which compute in the type that they are stored in.
    """
    if device.type != "cpu" or multiplies_bfloat16() or not _can_widen(network):
        return False
    for module in network.modules():
        if type(module) is nn.Linear:
            module.__class__ = WidenedLinear
        elif type(module) is nn.Embedding:
            module.register_forward_hook(_to_float)
        else:
            for parameter in module.parameters(recurse=False):  # norms, a few kB each
                parameter.data = parameter.data.float()
    return True


class WidenedLinear(nn.Linear):
    """A frozen linear module that takes and gives float32."""

    def forward(self, input: Tensor) -> Tensor:
        product: Tensor = _WidenedProduct.apply(input.flatten(0, -2), self.weight)  # type: ignore[no-untyped-call]
        product = product if self.bias is None else product + self.bias.float()
        return product.view(*input.shape[:-1], self.out_features)


class _WidenedProduct(torch.autograd.Function):
    """Rows [R, D] times a short matrix [X, D], which is kept for the backward pass as it is stored."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, weight_XD: Tensor) -> Tensor:
        ctx.save_for_backward(weight_XD)
        parts = [rows_RD @ block.t() for block in _blocks(weight_XD)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient_RX,) = gradients
        (weight_XD,) = ctx.saved_tensors
        total_RD, first = None, 0
        for block in _blocks(weight_XD):
            part_RD = gradient_RX[:, first : first + len(block)] @ block
            total_RD = part_RD if total_RD is None else total_RD.add_(part_RD)
            first += len(block)
        assert total_RD is not None, "a matrix has rows"
        return total_RD, None


def _blocks(weight_XD: Tensor) -> Iterator[Tensor]:
    """The matrix in float32, some of its rows at a time; each lives until the next is asked for."""
    outputs, inputs = weight_XD.shape
    rows = max(1, min(outputs, BLOCK_NUMBERS // inputs))
    room: Tensor | None = getattr(_scratch, "room", None)
    if room is None or room.numel() < rows * inputs:
        room = _scratch.room = torch.empty(rows * inputs)
    for first in range(0, outputs, rows):
        block = weight_XD[first : first + rows]
        yield room[: block.numel()].view(block.shape).copy_(block)


def _to_float(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output.float()


def _can_widen(network: nn.Module) -> bool:
    plain = (nn.Linear, nn.Embedding)
    return all(
        type(module) in plain or all(p.ndim < 2 for p in module.parameters(recurse=False))
        for module in network.modules()
    )
