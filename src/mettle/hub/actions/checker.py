"""The thread that checks releases, one after the other, each in a process that ends with the Hub.

A Hub that is killed leaves a release RUNNING; the next one begins its check again (`states.recover`).
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

from mettle.hub.actions import states
from mettle.hub.actions.inspection import ORDER, OUTCOME
from mettle.hub.actions.order import order_of
from mettle.hub.lab import Lab
from mettle.hub.registry.catalogue import environment_of
from mettle.hub.registry.releases import Release
from mettle.hub.registry.words import keep_tasks
from mettle.processes.child import ChildProcess, explain_exit, import_path, python_module
from mettle.processes.ticker import Ticker
from mettle.storage.files import write_json

logger = logging.getLogger(__name__)
TICK_S = 1.0
MAX_LOG_BYTES = 400_000


class ReleaseChecker(Ticker):
    """Checks what waits until it is closed; then what runs is ended, and begun again by the next Hub."""

    def __init__(self, lab: Lab, *, tick_s: float = TICK_S) -> None:
        super().__init__("checks of releases", self._recover_and_step, tick_s=tick_s)
        self._lab = lab
        self._is_recovered = False
        self._child: tuple[Release, ChildProcess] | None = None
        self._shown = ""

    def close(self) -> None:
        """End what runs, and check no more."""
        super().close()
        self.close_child()

    def close_child(self) -> None:
        """End the check that runs."""
        if self._child is not None:
            self._child[1].kill()
            self._child = None

    def _recover_and_step(self) -> None:
        if not self._is_recovered:
            self.recover()
            self._is_recovered = True
        self.step()

    def recover(self) -> None:
        """Begin again what an earlier Hub has left. Only one Hub works on a folder at a time."""
        with self._lab.database.write() as c:
            if states.recover(c):
                logger.info("checks of releases that were cut off begin again")
        shutil.rmtree(self._lab.folder / "checks", ignore_errors=True)

    def step(self) -> None:
        """Look after the check that runs; begin the next where there is none."""
        if self._child is not None:
            self._look_after(*self._child)
            return
        with self._lab.database.read() as c:
            release = states.next_waiting(c)
        if release is not None:
            self._begin(release)

    def _begin(self, release: Release) -> None:
        with self._lab.database.write() as c:
            order = order_of(c, self._lab, environment_of(c, release.environment_id), release)
            if not states.begin(c, release):
                return
        folder = self._folder(release)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_json(folder / ORDER, order.to_dict())
        command = python_module("mettle.hub.actions.inspection", str(folder))
        environment = {"PYTHONPATH": import_path(), "METTLE_API_KEY": ""}
        child = ChildProcess(command, tie="pipe", output=folder / "log", environment=environment)
        self._child, self._shown = (release, child), ""
        logger.info("checks a release", extra={"release": order.slug, "version": order.version})

    def _look_after(self, release: Release, child: ChildProcess) -> None:
        code = child.exit_code()
        folder = self._folder(release)
        log = _end_of(folder / "log")
        if code is None:
            if log != self._shown:
                with self._lab.database.write() as c:
                    states.keep_log(c, release.id, release.card_log + log)
                self._shown = log
            return
        outcome = _outcome(folder / OUTCOME)
        if outcome is None:
            outcome = {"state": states.FAILED, "card": None}
            log += f"error: {explain_exit('the check', code, '')}\n"
        with self._lab.database.write() as c:
            states.end(c, release.id, outcome["state"], outcome["card"], release.card_log + log)
            told = outcome.get("tasks")
            if isinstance(told, list):
                keep_tasks(c, release.environment_id, map(str, told))
        child.kill()
        self._child = None
        shutil.rmtree(folder, ignore_errors=True)

    def _folder(self, release: Release) -> Path:
        return self._lab.folder / "checks" / release.id


def _end_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - MAX_LOG_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _outcome(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) and value.get("state") in states.OVER else None
