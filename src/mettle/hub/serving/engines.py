"""The processes that answer for models: one a model, begun when it is asked for, ended when nobody asks any more.

Parts: `ModelEngines`, `ModelEngine`. Invariants: no more than `max_engines` at a time, and none is ended that is being
asked; each listens on loopback and opens to the Hub's own key alone; they end with the Hub, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from mettle.hub.serving.models import HubModel
from mettle.hub.serving.program import ORDER, READY
from mettle.hub.training.surroundings import own_environment
from mettle.processes.child import how_it_ended, import_path, last_line, process_state, python_module
from mettle.processes.orphans import tie_to_thread
from mettle.storage.files import write_json
from mettle.web.keys import Keys
from mettle.web.problems import HttpError

logger = logging.getLogger(__name__)
LOG: Final = "log"
START_S: Final = 600.0
"""In which a model has to be merged, loaded and ready."""
_LOOK_S: Final = 0.1
_SWEEP_S: Final = 1.0
_END_S: Final = 10.0


def command_for(folder: Path) -> list[str]:
    """What is started for the order in a folder."""
    return python_module("mettle.hub.serving.program", str(folder))


@dataclass(slots=True, eq=False)
class ModelEngine:
    """One process. `url` is where it answers, once it does."""

    model: HubModel
    folder: Path
    key: str
    process: subprocess.Popen[bytes]
    last_used: float
    url: str = ""
    num_open: int = 0
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it answers, or has ended."""

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None


class ModelEngines:
    """Those of one server. Use as `async with ModelEngines(...)`, on the loop that asks."""

    def __init__(
        self,
        folder: Path,
        *,
        max_engines: int,
        idle_s: float,
        command: Callable[[Path], list[str]] = command_for,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_engines = max_engines
        self._folder, self._idle_s, self._command, self._clock = folder, idle_s, command, clock
        self._engines: dict[str, ModelEngine] = {}
        self._sweeper: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> ModelEngines:
        await asyncio.to_thread(self._remove_leftovers)
        self._sweeper = asyncio.create_task(self._sweep(), name="engines of the Hub")
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._sweeper is not None, "entered before"
        self._sweeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._sweeper
        await asyncio.to_thread(self._end, list(self._engines.values()))
        if self._tasks:  # what watches a start sees its end
            await asyncio.wait(self._tasks)

    @property
    def names(self) -> list[str]:
        """The models that have a process now."""
        return list(self._engines)

    @contextlib.asynccontextmanager
    async def using(self, model: HubModel) -> AsyncIterator[ModelEngine]:
        """The engine of a model, ready, and kept while the block lasts.

        Raises: HttpError 503 where there is no room for it now, or it cannot be started.
        """
        engine = self._engines.get(model.name)
        if engine is None or not engine.is_alive:
            engine = self._begin(model)
        engine.num_open += 1
        try:
            await engine.ready.wait()
            if not engine.url:
                raise HttpError(503, f"{model.title or model.name} could not be served: {self._why(engine)}")
            yield engine
        finally:
            engine.num_open -= 1
            engine.last_used = self._clock()

    def sweep(self) -> list[ModelEngine]:
        """Those that have ended, or that nobody has asked for a while, which are forgotten here."""
        now = self._clock()
        over = [
            each for each in self._engines.values()
            if not each.num_open and (not each.is_alive or now - each.last_used > self._idle_s)
        ]  # fmt: skip
        for each in over:
            del self._engines[each.model.name]
        return over

    def _begin(self, model: HubModel) -> ModelEngine:
        """Without a pause, so that two requests never begin the same."""
        if not self.max_engines:
            raise HttpError(503, "this Hub serves no models (--served-models)", code="not_offered")
        if (ended := self._engines.pop(model.name, None)) is not None:
            self._end_soon([ended])
        if len(self._engines) >= self.max_engines:
            idle = min((e for e in self._engines.values() if not e.num_open), key=lambda e: e.last_used, default=None)
            if idle is None:
                busy = ", ".join(each.model.title or each.model.name for each in self._engines.values())
                raise HttpError(503, f"this machine is busy serving {busy}; ask again when it is not", code="busy")
            del self._engines[idle.model.name]
            self._end_soon([idle])
        folder = self._folder / f"{os.getpid()}-{secrets.token_hex(8)}"
        folder.mkdir(parents=True, mode=0o700)
        told = {"name": model.name, "version": model.version}
        told |= {name: str(path) if path else "" for name, path in (("path", model.path), ("run", model.run))}
        write_json(folder / ORDER, told)
        key = secrets.token_urlsafe(32)
        environment = {**own_environment(), **Keys(key).environment(), "PYTHONPATH": import_path()}
        with (folder / LOG).open("ab") as out:
            process = subprocess.Popen(
                self._command(folder), stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=folder, env=environment,
                start_new_session=True, preexec_fn=functools.partial(tie_to_thread, os.getpid()),
            )  # fmt: skip
        engine = ModelEngine(model, folder, key, process, self._clock())
        self._engines[model.name] = engine
        self._keep(asyncio.create_task(self._watch(engine), name=f"start of {model.name}"))
        logger.info("started a model", extra={"model": model.name, "pid": process.pid})
        return engine

    async def _watch(self, engine: ModelEngine) -> None:
        """Until it answers, has ended, or has had its time."""
        deadline = time.monotonic() + START_S
        path = engine.folder / READY
        try:
            while engine.is_alive and time.monotonic() < deadline and not path.exists():  # noqa: ASYNC110 - a process
                await asyncio.sleep(_LOOK_S)
            if path.exists():
                engine.url = await asyncio.to_thread(_address_in, path)
        finally:
            engine.ready.set()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            over = self.sweep()
            if over:
                await asyncio.to_thread(self._end, over)

    def _remove_leftovers(self) -> None:
        """Folders of servers that were killed: merged adapters are as large as their base."""
        for folder in self._folder.glob("*-*"):
            pid = folder.name.partition("-")[0]
            if pid.isdigit() and not process_state(int(pid)):
                shutil.rmtree(folder, ignore_errors=True)

    def _end_soon(self, engines: list[ModelEngine]) -> None:
        self._keep(asyncio.create_task(asyncio.to_thread(self._end, engines), name="end of engines"))

    def _keep(self, task: asyncio.Task[None]) -> None:
        """A task that nobody holds may be gone before it is done."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @staticmethod
    def _end(engines: list[ModelEngine]) -> None:
        for engine in engines:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(engine.process.pid, signal.SIGTERM)
        for engine in engines:
            try:
                engine.process.wait(_END_S)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(engine.process.pid, signal.SIGKILL)
                engine.process.wait()
            shutil.rmtree(engine.folder, ignore_errors=True)

    @staticmethod
    def _why(engine: ModelEngine) -> str:
        code = engine.process.poll()
        if code is None:
            return f"it was not ready within {START_S:g} s"
        said = last_line(engine.folder / LOG).removeprefix("error: ")
        return said or how_it_ended(code)


def _address_in(path: Path) -> str:
    return str(json.loads(path.read_text(encoding="utf-8"))["base_url"]).rstrip("/")
