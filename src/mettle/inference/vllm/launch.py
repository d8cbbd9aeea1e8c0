"""A vLLM server as a child: its command line, its start, its end.

It listens on a Unix socket in a folder that only this user can enter, not on a port: vLLM's routes for weights and
pausing ask for no key. The child ends with the thread that started it, and so when this process is killed.
"""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from mettle.errors import ServiceError, UserError
from mettle.inference.config import LORA_RANKS, InferenceConfig
from mettle.processes.child import ChildProcess, how_it_ended

logger = logging.getLogger(__name__)

SERVED_NAME: Final = "policy"
WORKER_MODULE: Final = "mettle_vllm_worker"
BROADCAST_MODULE: Final = "mettle_weight_broadcast"
TAIL_LINES: Final = 12
LORAS_IN_A_BATCH: Final = 4
"""Versions of adapters that one step of vLLM's computes together; the requests of a further one wait."""
_POLL_S: Final = 0.25
_TELL_EVERY_S: Final = 15.0
_COMPLAINT: Final = re.compile(r"^(?:\(.*?\) ERROR .*?\] )?([A-Z]\w*(?:Error|Exception): .+)$", re.MULTILINE)
_ENVIRONMENT: Final = {
    "VLLM_SERVER_DEV_MODE": "1",  # the routes for pausing and for weights
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # GiB for keys and values, which builds for CPUs alone read: else they want most of the host's memory free.
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


class VllmServer:
    """The child. Make it in a thread that lives as long as it."""

    def __init__(self, config: InferenceConfig, max_model_len: int, log: Path | None = None) -> None:
        assert config.vllm is not None, "the config was checked"
        self._timeout_s = config.vllm.start_timeout_s
        if not config.vllm.python.exists():
            raise UserError(f"inference.vllm.python is {config.vllm.python}, and there is no such file")
        self._folder = Path(tempfile.mkdtemp(prefix="mettle-vllm-"))
        self.socket = self._folder / "http"
        shutil.copy(Path(__file__).with_name("worker.py"), self._folder / f"{WORKER_MODULE}.py")
        shutil.copy(Path(__file__).parents[1] / "engine" / "broadcast.py", self._folder / f"{BROADCAST_MODULE}.py")
        self._log = log or self._folder / "out"
        self._begun_at = self._log.stat().st_size if self._log.exists() else 0
        try:
            self._child = ChildProcess(
                command(config, self.socket, max_model_len),
                tie="thread",
                output=self._log,
                environment={**_ENVIRONMENT, "PYTHONPATH": str(self._folder), **config.vllm.environment},
            )
        except OSError as error:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise UserError(f"{config.vllm.python} cannot be started: {error.strerror}") from error

    async def ready(self, answers: Callable[[], Awaitable[bool]]) -> None:
        """Wait until it answers. Raises: ServiceError with its last lines when it ends first, or takes too long."""
        loop = asyncio.get_running_loop()
        began = told = loop.time()
        while not await answers():
            if (death := self.death()) is not None:
                raise ServiceError(death)
            now = loop.time()
            if now - began > self._timeout_s:
                raise ServiceError(f"vLLM did not answer within {self._timeout_s:.0f} s; it said last:\n{self.tail()}")
            if now - told > _TELL_EVERY_S:
                told = now
                logger.info("waiting for vLLM", extra={"seconds": round(now - began), "last": self.tail(1)})
            await asyncio.sleep(_POLL_S)

    def death(self) -> str | None:
        """How it ended, with its last lines; None while it runs."""
        code = self._child.exit_code()
        if code is None:
            return None
        said = f"vLLM {how_it_ended(code)}; it said last:\n{self.tail()}"
        return (
            f"{said}\nvLLM's first complaint: {cause}"
            if (cause := first_complaint(self._log, self._begun_at))
            else said
        )

    async def died(self) -> str:
        """Wait for its end, and say how it came."""
        while True:
            if (death := self.death()) is not None:
                return death
            await asyncio.sleep(_POLL_S)

    def tail(self, num_lines: int = TAIL_LINES) -> str:
        """The end of what it printed."""
        return "\n".join(self._child.tail().splitlines()[-num_lines:])

    @property
    def pid(self) -> int:
        return self._child.pid

    def end(self) -> None:
        """End it, and all that it started."""
        self._child.end(grace_s=10.0)
        shutil.rmtree(self._folder, ignore_errors=True)


def first_complaint(log: Path, begun_at: int) -> str:
    """What the first exception says in a log from a byte on; what comes after it is how others heard of that."""
    try:
        with log.open("rb") as file:
            file.seek(begun_at)
            found = _COMPLAINT.search(file.read().decode("utf-8", "replace"))
    except OSError:
        return ""
    return "" if found is None else found[1]


def command(config: InferenceConfig, socket: Path, max_model_len: int) -> list[str]:
    """The command line. What a person adds in `vllm.args` comes last, so that it counts."""
    assert config.vllm is not None, "the config was checked"
    made = [
        str(config.vllm.python), "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(config.model), "--served-model-name", SERVED_NAME, "--uds", str(socket),
        "--dtype", config.dtype, "--max-model-len", str(max_model_len), "--max-num-seqs", str(config.max_slots),
        "--worker-extension-cls", f"{WORKER_MODULE}.MettleWorker",
        "--logprobs-mode", "processed_logprobs", "--max-logprobs", "20", "--enable-scale-out",
        # What the embedded engine uses too, so that a grammar means the same: blanks only where a form wants them.
        "--structured-outputs-config", '{"backend": "guidance", "disable_any_whitespace": true}',
    ]  # fmt: skip
    seed = [] if config.seed is None else ["--seed", str(config.seed)]
    kv = [] if config.kv_cache_bytes is None else ["--kv-cache-memory-bytes", str(config.kv_cache_bytes)]
    return [*made, *seed, *kv, *_lora_arguments(config), *config.vllm.args]


def _lora_arguments(config: InferenceConfig) -> list[str]:
    assert config.vllm is not None, "the config was checked"
    if config.vllm.lora_rank is None:
        return []
    rank = next(rank for rank in LORA_RANKS if rank >= config.vllm.lora_rank)
    # Beside those that requests may name there are the run's own newest version and those that still run.
    kept = config.max_adapters * config.max_adapter_versions + LORAS_IN_A_BATCH
    return [
        "--enable-lora", "--max-lora-rank", str(rank), "--max-loras", str(LORAS_IN_A_BATCH),
        "--max-cpu-loras", str(kept),
        # Else the head is wrapped too, and on CPUs prompt log-probabilities beside other requests end the process.
        "--lora-target-modules", *config.vllm.lora_modules,
    ]  # fmt: skip
