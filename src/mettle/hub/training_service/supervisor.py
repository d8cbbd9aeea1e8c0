"""The processes of the training service: one a base model, started with the Hub, started again when it ends, counted.

Parts: `TrainingServices`, a part of the Hub's background work. A process that is killed goes on where it was: what it
has accepted is in its database. Invariants: one server of a folder runs them; they listen on loopback, open to the
Hub's key alone, and end with the threads that have started them, however these end; a token that one counts is added to
its owner's usage once.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from mettle.errors import MettleError
from mettle.hub.lab import Lab
from mettle.hub.training import usage
from mettle.hub.training.surroundings import own_environment
from mettle.hub.training_service.offers import ServiceOffer, ServiceState, folder_of, write_state
from mettle.processes.child import THREAD_ENVIRONMENT, how_it_ended, import_path, last_line, python_module
from mettle.processes.orphans import tie_to_thread
from mettle.processes.ready_file import ReadyFile
from mettle.processes.ticker import Ticker
from mettle.storage.files import write_json
from mettle.trainer.service.config import ServiceLimits
from mettle.web.backoff import Backoff
from mettle.web.keys import Keys

logger = logging.getLogger(__name__)
CONFIG: Final = "config.json"
READY: Final = "ready.json"
LOG: Final = "log"
COUNT_EVERY_S: Final = 2.0
START_S: Final = 900.0
"""In which a base model has to be loaded."""
SILENT_S: Final = 300.0
"""Without an answer to the question what it has counted, a process is ended and started again."""
_TICK_S: Final = 0.2
_ANSWER_S: Final = 10.0
_END_S: Final = 10.0
_STEADY_S: Final = 60.0
"""One that has run for so long is started again without a wait."""


def command_for(folder: Path, *, is_for_others: bool) -> list[str]:
    """What is started for the config in a folder."""
    words = ["--config", str(folder / CONFIG), "--ready-file", str(folder / READY)]
    return python_module("mettle.trainer.service", *words, *(["--for-others"] if is_for_others else []))


@dataclass(slots=True)
class _Running:
    """An offer and the process that it has now."""

    offer: ServiceOffer
    keys: Keys
    state: ServiceState
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    heard_at: float = 0.0
    counted_at: float = 0.0
    start_at: float = 0.0
    num_failures: int = 0


class TrainingServices:
    """Keeps a process for each of `offers` until it is closed."""

    def __init__(
        self,
        lab: Lab,
        offers: Sequence[ServiceOffer],
        limits: ServiceLimits,
        *,
        is_for_others: bool = False,
        command: Callable[..., list[str]] = command_for,
        backoff: Backoff = Backoff(1.0, 60.0),  # noqa: B008 - frozen
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lab, self._limits, self._is_for_others = lab, limits, is_for_others
        self._command, self._backoff, self._clock = command, backoff, clock
        # A process is tied to the thread that starts it; and one that does not answer keeps nobody else's waiting.
        self._tickers = [self._ticker(_Running(offer, Keys.new(), ServiceState())) for offer in offers]

    def start(self) -> None:
        for each in self._tickers:
            each.start()

    def close(self) -> None:
        """End the processes; what they have accepted waits for the next start."""
        for each in self._tickers:
            each.stop()
        for each in self._tickers:
            each.close()

    def _ticker(self, one: _Running) -> Ticker:
        look, end = functools.partial(self._look_after, one), functools.partial(self._end, one)
        return Ticker(f"training on {one.offer.name}", look, tick_s=_TICK_S, at_end=end)

    def _look_after(self, one: _Running) -> None:
        now = self._clock()
        if one.process is None:
            if now >= one.start_at:
                self._begin(one)
            return
        code = one.process.poll()
        if code is not None:
            self._gone(one, last_line(self._folder(one) / LOG).removeprefix("error: ") or how_it_ended(code))
        elif not one.state.url:
            told = ReadyFile(self._folder(one) / READY).endpoint()
            if told is not None:
                one.heard_at = now
                self._say(one, ServiceState(told["base_url"], one.keys.api, one.process.pid, one.state.num_restarts))
            elif now - one.started_at > START_S:
                self._gone(one, f"it was not ready within {START_S:g} s")
        elif now - one.counted_at >= COUNT_EVERY_S:
            one.counted_at = now
            if self._count(one):
                one.heard_at = self._clock()
            elif now - one.heard_at > SILENT_S:
                self._gone(one, f"it had not answered for {SILENT_S:g} s")

    def _begin(self, one: _Running) -> None:
        folder = self._folder(one)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        ReadyFile(folder / READY).remove()
        told = {"base_model": str(one.offer.path), "name": one.offer.model_name, "data": str(folder), "port": 0}
        told["host"] = "127.0.0.1"
        write_json(folder / CONFIG, self._limits.model_dump(mode="json") | told)
        with contextlib.suppress(FileNotFoundError):
            shutil.move(folder / LOG, folder / f"{LOG}.before")
        environment = {**own_environment(), **THREAD_ENVIRONMENT, **one.keys.environment(), "PYTHONPATH": import_path()}
        with (folder / LOG).open("wb") as out:
            one.process = subprocess.Popen(
                self._command(folder, is_for_others=self._is_for_others), stdin=subprocess.DEVNULL, stdout=out,
                stderr=out, cwd=folder, env=environment, start_new_session=True,
                preexec_fn=functools.partial(tie_to_thread, os.getpid()),
            )  # fmt: skip
        one.started_at = self._clock()
        self._say(one, ServiceState(num_restarts=one.state.num_restarts, pid=one.process.pid))
        logger.info("started a training service", extra={"model": one.offer.name, "pid": one.process.pid})

    def _gone(self, one: _Running, why: str) -> None:
        """Note why, and when it is started again."""
        self._kill(one)
        now = self._clock()
        one.num_failures = 0 if now - one.started_at > _STEADY_S else one.num_failures + 1
        one.start_at = now + (self._backoff.wait_s(one.num_failures - 1) if one.num_failures else 0.0)
        self._say(one, ServiceState(num_restarts=one.state.num_restarts + 1, why=why))
        logger.warning("a training service has ended", extra={"model": one.offer.name, "why": why})

    def _count(self, one: _Running) -> bool:
        """Add what its owners have taken since the last look; False where it does not answer."""
        request = urllib.request.Request(
            one.state.url + "/admin/usage", headers={"Authorization": f"Bearer {one.keys.admin}"}
        )
        try:
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(request, timeout=_ANSWER_S) as answer:
                told: list[dict[str, Any]] = json.load(answer)["owners"]
        except (OSError, ValueError):
            return False
        if told:
            with self._lab.database.write() as c:
                for each in told:
                    usage.count_trained(c, each["owner"], one.offer.name, each["since"], each["num_tokens"])
        return True

    def _end(self, one: _Running) -> None:
        if one.process is None:
            return
        with contextlib.suppress(MettleError, OSError):
            if one.state.url:
                self._count(one)
            self._say(one, replace(one.state, url="", why="this Hub is being stopped"))
        self._kill(one)

    def _kill(self, one: _Running) -> None:
        process, one.process = one.process, None
        assert process is not None, "the caller has looked"
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
                break
        ReadyFile(self._folder(one) / READY).remove()

    def _say(self, one: _Running, state: ServiceState) -> None:
        one.state = state
        write_state(self._lab.folder, one.offer.name, state)

    def _folder(self, one: _Running) -> Path:
        return folder_of(self._lab.folder, one.offer.name)
