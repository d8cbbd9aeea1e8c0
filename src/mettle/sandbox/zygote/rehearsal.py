"""One test of the template's own, run before any cell is cloned, by the code that runs tests in cells.

The interpreter notes at a first call what it finds (which attribute of which type, which instruction fits), in memory
that is shared until somebody writes to it. Noted in the template it is there for every clone; noted in each clone it
would cost each a copy of the page.
Invariant: nothing that goes wrong here matters, and no process of it is left.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any, Final

from mettle.sandbox.zygote import child, frames
from mettle.sandbox.zygote.cell import CellProcess
from mettle.sandbox.zygote.settings import Settings

_LAST_LOW_FD: Final = 4  # a child arranges its descriptors up to there, and its process 1 keeps them occupied
_PLENTY: Final = 1 << 40
_ORDER: Final[dict[str, Any]] = {
    **{"run": 0, "mode": "stdio", "function": None, "cpu_s": 60.0, "wall_s": 60.0},
    **{"memory_bytes": _PLENTY, "output_bytes": 1 << 16, "is_last": True, "is_live": False},
}


def rehearse(settings: Settings) -> None:
    """Run a few lines as a cell of this template's would. The caller has called `child.forget_harness`."""
    low = [os.dup(0)]
    try:
        while low[-1] <= _LAST_LOW_FD:
            low.append(os.dup(0))
        ours, theirs = socket.socketpair()
        with ours, theirs, contextlib.suppress(OSError):  # no process to be had, say: cells will tell
            cell = CellProcess(theirs, settings, None, None)
            cell.prepare_child()
            load = frames.encode({"load": True}, child.REHEARSAL.encode())
            ours.sendall(load + frames.encode(_ORDER, b"1\n"))
            cell.serve()
    finally:
        for descriptor in low:
            os.close(descriptor)
