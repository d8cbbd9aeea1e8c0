"""The containers of a fake control plane: each a real process in namespaces, running the real agent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

JAIL = Path(__file__).with_name("jail.py")
SOURCES = Path(__file__).parents[4] / "src"
IMAGE_PATH = "/image/bin:/usr/local/bin:/usr/bin:/bin"


async def start(spec: dict[str, Any], *, has_streams: bool) -> asyncio.subprocess.Process:
    """Start one. Its environment says nothing of this one's."""
    pipe = asyncio.subprocess.PIPE if has_streams else asyncio.subprocess.DEVNULL
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-S",  # what is installed beside this Mettle isn't wanted, and looking for it takes longer than all else
        str(JAIL),
        json.dumps(spec),
        stdin=pipe,
        stdout=pipe,
        stderr=asyncio.subprocess.PIPE,
        env={"PYTHONPATH": str(SOURCES), "PATH": os.environ.get("PATH", "")},
    )


async def kill(process: asyncio.subprocess.Process) -> int:
    """End it, and with it everything inside; its exit status."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)  # the method would collect it before the loop does
    return await process.wait()
