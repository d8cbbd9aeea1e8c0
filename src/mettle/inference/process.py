"""The command `python -m mettle.inference`: one server process from its config file to its exit status.

Exit status 0 after SIGTERM or SIGINT, 2 for a mistake in the config (one line), 3 when the engine failed under it (one
line; a supervisor may start it again). torch is imported only after the config is known to be right.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from mettle.clients.renderer import Renderer
from mettle.errors import MettleError, UserError
from mettle.inference.bridge import Bridge
from mettle.inference.config import InferenceConfig
from mettle.inference.engine.protocol import EngineStatus, SamplingEngine
from mettle.inference.launch import open_engine
from mettle.inference.outside.config import OutsideConfig
from mettle.inference.server import InferenceServer
from mettle.inference.service import ModelService
from mettle.log import setup_logging
from mettle.processes.beats import Gauge, Heartbeat
from mettle.processes.collector import quiet_collector
from mettle.storage.files import write_json
from mettle.web.bodies import first_fault
from mettle.web.keys import Keys
from mettle.web.server import bind, on_signals

if TYPE_CHECKING:
    from mettle.inference.outside.door import OutsideDoor

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    arguments = _arguments(argv)
    try:
        config = read_config(arguments.config)
        if arguments.host is not None:
            config = config.model_copy(update={"host": arguments.host})
        setup_logging(arguments.log_file, level=config.log_level)
        # Before torch is imported: its thread pools read these once.
        os.environ.setdefault("OMP_NUM_THREADS", str(config.threads))
        os.environ.setdefault("MKL_NUM_THREADS", str(config.threads))
        renderer = Renderer.from_directory(config.model)
        listener = bind(config.host, config.port)
        keys = Keys.from_environment()
        with Heartbeat.of_run("inference", unit="steps") as heart:
            logs = arguments.log_file.parent if arguments.log_file else None
            return asyncio.run(serve(config, renderer, listener, arguments.ready_file, keys, heart, logs))
    except MettleError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code


def read_config(path: Path) -> InferenceConfig:
    """The config in a JSON file.

    Raises: UserError naming the file and the field.
    """
    try:
        return InferenceConfig.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except ValidationError as error:
        field, message = first_fault(error.errors())
        raise UserError(f"{path}: {field or 'the file'}: {message}") from error


async def serve(
    config: InferenceConfig,
    renderer: Renderer,
    listener: socket.socket,
    ready_file: Path | None,
    keys: Keys,
    heart: Heartbeat,
    logs: Path | None = None,
) -> int:
    """Serve until a signal or the engine's end."""
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[MettleError | None] = loop.create_future()

    def stop(error: MettleError | None = None) -> None:
        if not stopped.done():
            stopped.set_result(error)

    def die(error: MettleError) -> None:
        loop.call_soon_threadsafe(stop, error)

    workers = None if config.outside is None else _bind_door(config.outside)
    with on_signals(stop):
        # torch comes in here, so that a wrong config is told at once and nothing else of this process needs it.
        engine = await asyncio.to_thread(
            open_engine,
            config,
            eos_token_ids=renderer.stop_token_ids,
            decode_text=renderer.visible_text,
            on_death=die,
            logs=logs,
        )
        service = ModelService(Bridge(engine), renderer, config.served_model_name)
        server = InferenceServer(service, listener, config.allowed_hosts, keys)
        await server.start()
        door = None if workers is None else await _open_door(config, engine, workers)
        heart.gauge = lambda: _gauge(engine.status())
        heart.tick_with(loop)
        about = {"model": config.served_model_name, "version": config.version, "url": server.base_url}
        logger.info("serving", extra=about)
        if ready_file is not None:
            _write_ready_file(ready_file, server)
        with quiet_collector():
            error = await stopped
        if door is not None:
            await door.stop()
        await server.stop(config.drain_s)
    if ready_file is not None:
        _remove_ready_file(ready_file)
    if error is not None:
        raise error
    return 0


def _bind_door(outside: OutsideConfig) -> socket.socket:
    from mettle.inference.outside.door import bind_door

    return bind_door(outside)


async def _open_door(config: InferenceConfig, engine: SamplingEngine, listener: socket.socket) -> OutsideDoor:
    from mettle.inference.outside.door import OutsideDoor
    from mettle.inference.outside.engine import OutsideEngine

    assert isinstance(engine, OutsideEngine), "the engine has workers from outside"
    assert config.outside is not None, "there is a door to open"
    assert config.outside.folder is not None, "the engine was opened with it"
    folder = config.outside.folder
    door = OutsideDoor(engine, folder, config.model, folder.parent.name, config.dtype)
    await door.start(listener)
    logger.info("open to workers from outside", extra={"url": door.base_url})
    return door


def _gauge(status: EngineStatus) -> Gauge:
    """Steps are its work: a prompt of many chunks is one sequence, and samples nothing for a while."""
    return Gauge(
        status.total_steps + status.total_updates, status.num_running + status.num_waiting > 0, status.is_paused
    )


def _write_ready_file(path: Path, server: InferenceServer) -> None:
    write_json(path, {"base_url": server.base_url, "host": str(server.host), "port": server.port, "pid": os.getpid()})


def _remove_ready_file(path: Path) -> None:
    # Only our own: a successor may have written its already.
    try:
        if json.loads(path.read_text())["pid"] == os.getpid():
            path.unlink()
    except (OSError, ValueError, KeyError):
        return


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m mettle.inference", description="Serve a policy.")
    parser.add_argument("--config", type=Path, required=True, help="JSON file with the fields of InferenceConfig")
    parser.add_argument("--host", help="address to listen on, in place of the config's")
    parser.add_argument("--ready-file", type=Path, help="written with the server's address once it answers")
    parser.add_argument("--log-file", type=Path, help="keep the log there as JSON lines as well")
    return parser.parse_args(argv)
