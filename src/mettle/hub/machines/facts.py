"""What this machine has and how busy it is, as it tells the Hub that it has joined.

Invariant: what cannot be found out is None or empty, and nothing here imports PyTorch.
"""

from __future__ import annotations

import logging
import os
import platform
import shutil
import subprocess
from importlib import metadata
from typing import Any

import mettle
from mettle.errors import MettleError
from mettle.processes.host import free_memory_bytes, total_memory_mb, usable_cores

logger = logging.getLogger(__name__)
_SMI_S = 10.0


def lasting_facts() -> dict[str, Any]:
    """What stays as it is while the machine works: versions, hardware, isolation, environments."""
    from mettle.envs.packages.registry import list_environments

    memory = total_memory_mb()
    return {
        "version": mettle.__version__, "torch": _version_of("torch"), "python": platform.python_version(),
        "cores": usable_cores(), "memory_bytes": None if memory is None else memory << 20, "gpus": _gpus(),
        "isolation": _isolation(), "environments": {each.name: each.version for each in list_environments()},
    }  # fmt: skip


def passing_facts() -> dict[str, Any]:
    """What is free now: bytes of memory, and how many processes want a core (the mean of the last minute)."""
    return {"free_bytes": free_memory_bytes(), "load": os.getloadavg()[0]}


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _gpus() -> list[str]:
    """Name and memory of each, as NVIDIA's own tool says them."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    words = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_SMI_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def _isolation() -> str:
    """The grade that code in a sandbox of this machine finds; `none` where there is no sandbox to be had."""
    from mettle.sandbox.doctor import examine_host

    try:
        return str(examine_host().grade)
    except MettleError as error:
        logger.warning("this machine has no sandboxes", extra={"why": str(error)})
        return "none"
