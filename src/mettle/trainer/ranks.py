"""How the ranks of one trainer are started: by torchrun, which meets with itself in a file. No torch to import it.

`python -m mettle.trainer.ranks` is torchrun whose end is its ranks': the exit code with which one of them ended on
purpose, and that one's line as the last that is said. torchrun's own would be 1 whatever happened, behind a table.

torchrun's own way is a store on a TCP port that asks nobody for a secret. A file has an owner: the store of the agent
is a temporary one of mode 0600, and the ranks' own lies in the agent's private folder (see `world.py`). Both are of
one host; ranks on several need a port, and with it a network of their own.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Sequence
from typing import Final

RANK_EFFICIENCY: Final = 0.9
"""Share of the ideal speed-up that further ranks bring, where a plan or a simulation has to say. An assumption."""
LAUNCHER: Final = "mettle.trainer.ranks"
ON_PURPOSE: Final = (2, 3)
"""Exit codes of errors that are raised on purpose (see `trainer/__main__.py`)."""
ENVIRONMENT: Final = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Else the agent opens a store on a port of every interface, and does not recover a rank that SIGKILL has ended."""


def launcher_arguments(num_ranks: int) -> tuple[str, ...]:
    """What follows `python -m mettle.trainer.ranks`, up to the program that the ranks run."""
    return ("--nnodes=1", "--rdzv-backend=c10d", "--rdzv-conf=store_type=file", f"--nproc-per-node={num_ranks}")


def main(arguments: Sequence[str]) -> int:
    """Run ranks as torchrun does; returns the exit code, which is theirs if one of them has not gone well."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # it says once more that a rank has ended
    try:
        torchrun(list(arguments))
    except ChildFailedError as failed:
        rank, first = failed.get_first_failure()
        if first.exitcode < 0:  # it said nothing itself
            print(f"rank {rank} was ended by {first.signal_name()}", file=sys.stderr)
        return code_of(failure.exitcode for failure in failed.failures.values())
    return 0


def code_of(codes: Iterable[int]) -> int:
    """The exit code of ranks that have not all gone well: that of one which ended on purpose, if there is one. Others
    may have ended before it, of a peer that did not answer any more."""
    return next((code for code in codes if code in ON_PURPOSE), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
