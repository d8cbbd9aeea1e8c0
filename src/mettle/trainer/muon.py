"""Muon: momentum whose update is orthogonalised, for the matrices inside a model's layers.

Source: Jordan et al. 2024 (the iteration and its coefficients) and arXiv 2502.16982 (weight decay, and the factor that
gives an update the size of AdamW's, so that both take one learning rate). Parts: `Muon`, `orthogonalised`,
`is_muon_matrix`. Invariant: a sharded matrix is orthogonalised whole, so the step doesn't depend on the ranks.
Legend: M rows, N columns of a matrix; a mixture's experts are a stack of matrices [E, M, N].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from mettle.trainer.cut import is_cut

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic x <- a x + b x^3 + c x^5, which takes singular values of (0, 1] to about .7 to 1.2 in five rounds."""
NUM_ROUNDS = 5
ADAMW_SIZE = 0.2
"""Root mean square of a usual AdamW update, which an orthogonalised one is scaled to."""


class Muon(torch.optim.Optimizer):
    """The optimiser over matrices [M, N] and stacks of them [E, M, N].

    An update: momentum with Nesterov's look ahead, orthogonalised, times .2 sqrt(max(M, N)); decay is decoupled.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, lr: float, momentum: float = 0.95, weight_decay: float = 0.01
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take one step; a parameter without a gradient stays as it is."""
        assert closure is None, "the gradient is accumulated before"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, group)

    def _step_one(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer, gradient = state["momentum_buffer"], parameter.grad
        assert gradient is not None
        buffer.lerp_(gradient, 1 - group["momentum"])
        update = _whole_and_back(gradient.lerp(buffer, group["momentum"]), orthogonalised)
        rows, columns = parameter.shape[-2:]
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"] * ADAMW_SIZE * math.sqrt(max(rows, columns)))


def _whole_and_back(tensor: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """`function` of a tensor that may be sharded: gathered, computed alike on each rank, and cut as it was."""
    if not is_cut(tensor):
        return function(tensor)
    from torch.distributed.tensor import distribute_tensor

    whole = function(tensor.full_tensor())
    return distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)


def orthogonalised(matrix_MN: Tensor) -> Tensor:
    """A matrix of the same singular vectors, all of its singular values near 1; zeros stay zeros.

    In float32 on a CPU and in bfloat16 on a GPU, which the iteration bears.
    """
    a, b, c = COEFFICIENTS
    dtype = torch.float32 if matrix_MN.device.type == "cpu" else torch.bfloat16
    is_tall = matrix_MN.shape[-2] > matrix_MN.shape[-1]
    x = (matrix_MN.mT if is_tall else matrix_MN).to(dtype)
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    for _ in range(NUM_ROUNDS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = (x.mT if is_tall else x).to(matrix_MN.dtype)
    return result


def is_muon_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is a matrix inside a layer; embeddings, the head, norms and biases are AdamW's."""
    is_inside = any(part.isdigit() for part in name.split("."))
    return is_inside and parameter.ndim in (2, 3) and min(parameter.shape[-2:]) > 1
