"""Are there the GPUs that a config asks for by name? Found out without importing torch, where it asks for one.

Parts: `check_devices`, `count_gpus`. What a cluster places is not looked at: its nodes have devices of their own.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys

from mettle.errors import UserError
from mettle.processes.fork_server import drivers_of_torch
from mettle.runs.config import RunConfig

GPU = "cuda"
_TIMEOUT_S = 60.0
_ASK = """
import ctypes
driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
print(0 if failed else count.value)
"""
"""In a process of its own: a driver that has been spoken to is of no use to forks."""


def check_devices(config: RunConfig) -> None:
    """Raises: UserError when a process of the run is to compute on a GPU that torch would not see here."""
    trainer, deployment = config.trainer, config.deployment
    asked = {"trainer.device": trainer.device}
    if config.inference.engine == "embedded":
        asked["inference.device"] = config.inference.device
    if config.warm_up.enabled:
        asked["warm_up.sft.device"] = config.warm_up.sft.device
    wanted = [f"{name} 'cuda'" for name, device in asked.items() if device == GPU]
    if trainer.weight_broadcast == "nccl":
        wanted.append("trainer.weight_broadcast 'nccl'")
    if not wanted or deployment.engine != "local" or importlib.util.find_spec("torch") is None:
        return
    drivers = drivers_of_torch()
    num_gpus = count_gpus() if GPU in drivers else None if drivers else 0
    if num_gpus == 0:
        why = "there is none, or no driver for it" if drivers else "this build of torch is for CPUs"
        use = "'gloo'" if wanted[0].startswith("trainer.weight") else "'auto' or 'cpu'"
        raise UserError(f"{wanted[0]} was asked for, and torch sees no GPU here ({why}): use {use}")
    if num_gpus is not None and trainer.device == GPU and deployment.num_trainer_ranks > num_gpus:
        raise UserError(
            f"deployment.num_trainer_ranks {deployment.num_trainer_ranks} on trainer.device 'cuda' are a GPU each, and"
            f" there {'is one' if num_gpus == 1 else f'are {num_gpus}'} here: take fewer ranks, or a cluster"
        )


def count_gpus() -> int | None:
    """How many NVIDIA's driver shows to processes of this environment (CUDA_VISIBLE_DEVICES counts); None where it does
    not answer, which who needs it will tell."""
    try:
        done = subprocess.run(
            [sys.executable, "-ISc", _ASK], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    return int(done.stdout) if done.returncode == 0 else 0
