"""The queue of evaluations as a machine that has joined works on it: over HTTP, in a folder that is copied to the Hub.

A thread beats while something is held, however long a file takes; what it hears is what `report` answers. Where the Hub
cannot be reached, work goes on, and what it wrote is handed in when it can be: if that is too late, the Hub says so.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from mettle.errors import MettleError, UserError
from mettle.hub.evaluating.program import ORDER
from mettle.hub.evaluating.source import EvaluationWork, LeaseWord
from mettle.hub.machines.machine_client import LeaseLostError, MachineClient
from mettle.hub.machines.mirror import FolderMirror
from mettle.hub.training.surroundings import own_environment
from mettle.processes.ticker import Ticker
from mettle.storage.files import write_json

logger = logging.getLogger(__name__)
FACTS_EVERY_S: Final = 15.0
LEAVING: Final = ("LEAVING", "LEFT")


class RemoteQueue:
    """See `EvaluationSource`. `facts` is asked now and then for what the machine has."""

    def __init__(
        self, client: MachineClient, folder: Path, facts: Callable[[], dict[str, Any]], *, beat_s: float
    ) -> None:
        # The processes that work there have it as their own folder, so that its address must not depend on that.
        self._client, self._folder, self._facts, self._beat_s = client, folder.resolve(), facts, beat_s
        self._lock = threading.Lock()
        self._held = ""
        self._word = LeaseWord.GO_ON
        self._told_at = self._asked_at = float("-inf")
        self._mirror: FolderMirror | None = None
        self._beats = Ticker("beats", self._beat, tick_s=beat_s)
        self._is_silent = False
        self.is_leaving = False
        """Whether the Hub gives this machine no more work."""
        self.refusal = ""
        """Why the Hub wants nothing of this machine any more."""
        shutil.rmtree(self._folder, ignore_errors=True)  # the Hub has all that counts of what was cut off here
        self._folder.mkdir(parents=True)

    def start(self) -> None:
        """Begin to beat."""
        self._beats.start()

    def close(self) -> None:
        """Be silent from now on."""
        self._beats.close()

    def take(self) -> EvaluationWork | None:
        work = self._ask(is_asking=True).get("work")
        if work is None:
            return None
        lease, folder = str(work["lease"]), self._folder / str(work["job"])
        try:
            return self._fetched(lease, folder, work)
        except LeaseLostError:
            return None
        except MettleError:
            self._hold("")  # the next beat names no lease, so that it waits for whoever asks next
            raise

    def report(self, work: EvaluationWork) -> LeaseWord:
        self._keep_alive()
        if self._word is LeaseWord.LOST:
            return self._lost()
        try:
            self._push()
        except LeaseLostError:
            return self._lost()
        return self._word

    def end(self, work: EvaluationWork, code: int) -> None:
        try:
            self._push(is_last=True)
            self._client.end(work.lease_id, code)
        except LeaseLostError:
            logger.warning("this evaluation was given to another", extra={"job": work.job_id})
        self._forget()

    def give_back(self, work: EvaluationWork) -> None:
        try:
            self._push(is_last=True)
            self._client.give_back(work.lease_id)
        except LeaseLostError:
            logger.warning("this evaluation was given to another", extra={"job": work.job_id})
        finally:
            self._forget()

    def _fetched(self, lease: str, folder: Path, work: dict[str, Any]) -> EvaluationWork:
        shutil.rmtree(self._folder, ignore_errors=True)
        folder.mkdir(parents=True)
        place = self._inputs(lease, work["inputs"])
        for name in work["files"]:
            self._client.fetch(lease, "files", name, folder / name)
        write_json(folder / ORDER, _with_inputs(work["order"], place))

        def hand_in(name: str, data: bytes, **where: Any) -> bool:
            return self._client.hand_in(lease, name, data, **where)

        self._mirror = FolderMirror(folder, hand_in)
        self._mirror.note_stored()
        told = {str(name): str(value) for name, value in work["environment"].items()}
        return EvaluationWork(str(work["job"]), folder, {**own_environment(), **told}, lease)

    def _inputs(self, lease: str, inputs: dict[str, int]) -> Path:
        """The folder with the model, fetched."""
        place = self._folder / "inputs" / lease
        for name in inputs:
            if ".." in Path(name).parts or Path(name).is_absolute():
                raise UserError(f"the Hub names an input {name!r}, which is no name of one")
            self._client.fetch(lease, "inputs", name, place / name)
        return place

    def _ask(self, *, is_asking: bool) -> dict[str, Any]:
        with self._lock:
            now, facts = time.monotonic(), None
            self._asked_at = now
            if now - self._told_at > FACTS_EVERY_S:
                self._told_at, facts = now, self._facts()
            held = [self._held] if self._held else []
            try:
                answer = self._client.beat(held, is_asking=is_asking and not held, facts=facts)
            except UserError as error:
                self.refusal = str(error)
                raise
            except MettleError:
                self._told_at = float("-inf") if facts is not None else self._told_at
                raise
            self.is_leaving = answer.get("state") in LEAVING
            if held:
                self._word = LeaseWord(answer["leases"].get(held[0], "lost"))
            elif answer.get("work") is not None:
                self._held, self._word = str(answer["work"]["lease"]), LeaseWord.GO_ON
            return answer

    def _beat(self) -> None:
        if self._held:  # who asks for work is heard of as well
            self._keep_alive()

    def _keep_alive(self) -> None:
        if time.monotonic() - self._asked_at < self._beat_s:
            return
        try:
            self._ask(is_asking=False)
            self._is_silent = False
        except MettleError as error:
            if not self._is_silent:
                logger.warning("the Hub does not answer; the work goes on", extra={"error": str(error)})
            self._is_silent = True

    def _push(self, *, is_last: bool = False) -> None:
        assert self._mirror is not None, "made with the work"
        self._mirror.push(is_last=is_last)

    def _lost(self) -> LeaseWord:
        self._hold("")  # its process is ended next; the folder is emptied before the next work
        return LeaseWord.LOST

    def _forget(self) -> None:
        self._hold("")
        shutil.rmtree(self._folder, ignore_errors=True)

    def _hold(self, lease: str) -> None:
        with self._lock:
            self._held = lease


def _with_inputs(order: dict[str, Any], place: Path) -> dict[str, Any]:
    """The order with the places where this machine has what it names."""
    if order.get("version"):
        return {**order, "version": [str(place / "run"), order["version"][1]]}
    if (place / "model").is_dir():
        return {**order, "settings": {**order["settings"], "model": str(place / "model")}}
    return order
