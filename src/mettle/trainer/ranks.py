"""How the ranks of one trainer are started, without torch: by torchrun, which meets with itself in a file.

torchrun's own way is a store on a TCP port that asks nobody for a secret. A file has an owner: the store of the agent
is a temporary one of mode 0600, and the ranks' own lies in the agent's private folder (see `world.py`). Both are of
one host; ranks on several need a port, and with it a network of their own.
"""

from __future__ import annotations

from typing import Final

RANK_EFFICIENCY: Final = 0.9
"""Share of the ideal speed-up that further ranks bring, where a plan or a simulation has to say. An assumption."""
LAUNCHER: Final = "torch.distributed.run"
ENVIRONMENT: Final = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Else the agent opens a store on a port of every interface, and does not recover a rank that SIGKILL has ended."""


def launcher_arguments(num_ranks: int) -> tuple[str, ...]:
    """What follows `python -m torch.distributed.run`, up to the program that the ranks run."""
    return ("--nnodes=1", "--rdzv-backend=c10d", "--rdzv-conf=store_type=file", f"--nproc-per-node={num_ranks}")
