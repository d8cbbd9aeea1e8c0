"""An inference server of our own for the time of one command.

The server is the same process that a run starts (`python -m mettle.inference`); what it prints is kept in a file, and
its last line is the error when it does not come up.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click

from mettle.cli.terminal import find_run
from mettle.errors import ServiceError, UserError

START_TIMEOUT_S = 180.0
END_TIMEOUT_S = 10.0
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class LocalServer:
    """A server that answers at `base_url` (with /v1) under the name `model`."""

    base_url: str
    model: str
    process: subprocess.Popen[bytes]


@contextmanager
def local_server(model_dir: Path, **settings: Any) -> Iterator[LocalServer]:
    """Serve `model_dir` while the block runs. `settings` are fields of `InferenceConfig`.

    Raises: UserError when there is no model or the server refuses its settings, ServiceError when it does not come up.
    """
    directory = model_directory(model_dir)
    with tempfile.TemporaryDirectory(prefix="mettle-serve-") as name:
        folder = Path(name)
        config = {"model": str(directory), **{k: v for k, v in settings.items() if v is not None}}
        (folder / "inference.json").write_text(json.dumps(config, default=str))
        with _exit_on_terminate(), (folder / "out").open("wb") as out:
            if sys.stderr.isatty():
                click.echo(f"loading {model_dir}", err=True)
            process = _start(folder, out)
            try:
                endpoint = _wait_ready(process, folder)
                yield LocalServer(endpoint["base_url"], str(config.get("served_model_name", "policy")), process)
            finally:
                end(process)


def serving(servers: ExitStack) -> Callable[[Path], tuple[str, str]]:
    """Starts a server for each model directory, once, until `servers` closes."""
    running: dict[Path, tuple[str, str]] = {}

    def serve(directory: Path) -> tuple[str, str]:
        key = directory.resolve()
        if key not in running:
            server = servers.enter_context(local_server(directory, served_model_name=_name_of(key)))
            running[key] = server.base_url, server.model
        return running[key]

    return serve


def _name_of(model_dir: Path) -> str:
    """What to call a model directory: its own name, after its run's where it stands in one."""
    in_run = (model_dir.parent / "run.db").exists()
    return f"{model_dir.parent.name}/{model_dir.name}" if in_run else model_dir.name


def model_directory(path: Path) -> Path:
    """The model that a path means: a model directory, or what a run has trained.

    Raises: UserError when it is neither.
    """
    for candidate in (path, find_run(str(path)) / "policy"):
        if (candidate / "config.json").exists():
            return candidate.resolve()
    if (find_run(str(path)) / "run.db").exists():
        raise UserError(
            f"run {path} has no policy yet: it gets one when it finishes; `mettle rl resume {path}` continues it"
        )
    raise UserError(f"no model in {path}: it has no config.json; give a model directory in the Hugging Face layout")


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process: ask, wait, then kill."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def _exit_on_terminate() -> Iterator[None]:
    """SIGTERM leaves through the blocks that clean up, rather than past them."""

    def leave(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _start(folder: Path, out: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "mettle.inference", "--config", str(folder / "inference.json")]
    command += ["--ready-file", str(folder / "ready.json")]
    # A session of its own, so that Ctrl-C reaches this command first, which then ends the server.
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
        env={"OMP_NUM_THREADS": "1", **os.environ},
    )  # fmt: skip


def _wait_ready(process: subprocess.Popen[bytes], folder: Path) -> dict[str, Any]:
    ready = folder / "ready.json"
    deadline = time.monotonic() + START_TIMEOUT_S
    while not ready.exists():
        code = process.poll()
        if code is not None:
            lines = (folder / "out").read_text(errors="replace").strip().splitlines() or ["it printed nothing"]
            message = lines[-1].removeprefix("error: ")
            raise UserError(message) if code == 2 else ServiceError(f"the inference server ended ({code}): {message}")
        if time.monotonic() > deadline:
            raise ServiceError(f"the inference server was not ready after {START_TIMEOUT_S:.0f} s")
        time.sleep(POLL_S)
    endpoint: dict[str, Any] = json.loads(ready.read_text())
    return endpoint
