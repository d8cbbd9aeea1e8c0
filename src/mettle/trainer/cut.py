"""Whether a tensor is cut among ranks, asked without importing what cuts them.

`torch.distributed.tensor` brings sympy with it, together most of a second of a processor; a trainer of one rank needs
neither, and who cuts tensors has imported it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    class GatheringModule(FSDPModule, nn.Module): ...


def is_cut(tensor: object) -> TypeGuard[DTensor]:
    """True for a DTensor."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_gathering(module: object) -> TypeGuard[GatheringModule]:
    """True for a module that FSDP2 cuts, and gathers while it computes."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)
