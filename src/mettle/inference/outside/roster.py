"""Who works from outside: by which invitation, under which key, what became of their work, and who was banned.

Parts: `invite` and `Invitation` (what the owner of a run gives away), `OutsideWorker`, `Roster` (the engine's own,
which alone writes the list), `read_roster` (for whoever shows it). The folder has `invites/{digest}.json` and
`roster.json`.
Invariant: an invitation is for the first key that comes with it, and a ban is of both, also after a restart.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Final, Literal

from mettle.errors import MettleError, StorageError
from mettle.inference.outside.checks import WorkFault
from mettle.storage.files import write_json
from mettle.web.doors import secret_digest

ROSTER_FILE: Final = "roster.json"
INVITES: Final = "invites"
MAX_NAME: Final = 60
WorkerState = Literal["here", "gone", "banned"]


class JoinRefused(MettleError):
    """A worker that is not let in."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """A token, which is kept as its digest alone, and the name of whoever it was given to."""

    digest: str
    name: str


@dataclass(slots=True)
class OutsideWorker:
    """One key. Completions were `taken`; of them `sampled` were used, `returned` never came, `refused` were wrong.

    `checked` were computed again. `heard` is monotonic, `joined_at` the wall's time; `room` is for how many completions
    more it has asked.
    """

    key: str
    name: str
    invite: str
    state: WorkerState = "here"
    joined_at: float = 0.0
    relay: str = ""
    version: int = -1
    taken: int = 0
    sampled: int = 0
    num_tokens: int = 0
    checked: int = 0
    returned: int = 0
    refused: int = 0
    reason: str = ""
    heard: float = 0.0
    room: int = 0
    count: int = -1


_OF_THE_MOMENT: Final = ("heard", "room", "count", "version")


def invite(folder: Path, name: str) -> str:
    """Write an invitation and return its token, which is shown once."""
    token = secrets.token_urlsafe(32)
    digest = secret_digest(token).hex()
    path = folder / INVITES / f"{digest}.json"
    write_json(path, {"name": name[:MAX_NAME], "invited_at": time.time()}, is_durable=True)
    return token


def read_roster(folder: Path) -> list[OutsideWorker]:
    """The list as it was written last; empty before anybody came. Raises: StorageError for a file that is none."""
    path = folder / ROSTER_FILE
    known = {field.name for field in fields(OutsideWorker)}
    try:
        rows = json.loads(path.read_text())["workers"]
        return [OutsideWorker(**{name: value for name, value in row.items() if name in known}) for row in rows]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{path} cannot be read: {error}") from error


class Roster:
    """The workers of one run. Not for several threads: its engine's lock is around it."""

    def __init__(
        self, folder: Path, *, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
    ) -> None:
        self._folder, self._clock, self._wall = folder, clock, wall
        self._workers = {worker.key: worker for worker in read_roster(folder)}
        self._is_changed = False
        for worker in self._workers.values():
            if worker.state == "here":
                worker.state = "gone"

    def invitation(self, token: str) -> Invitation | None:
        """What a token is of, if the run gave it away. Raises: JoinRefused when its worker was banned."""
        digest = secret_digest(token).hex()
        for known in self._workers.values():
            if known.invite == digest and known.state == "banned":
                raise JoinRefused(f"worker {known.name} is banned: {known.reason}")
        try:
            found = json.loads((self._folder / INVITES / f"{digest}.json").read_text())
            return Invitation(digest, str(found["name"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def join(self, key: str, invitation: Invitation, relay: str = "") -> OutsideWorker:
        """Let a key in, anew or for the first time.

        Raises: JoinRefused for one that is banned, and for an invitation that is another key's.
        """
        for known in self._workers.values():
            if known.invite == invitation.digest and known.key != key:
                raise JoinRefused(f"this invitation is worker {known.name}'s, which has another key; ask for one more")
        worker = self._workers.get(key)
        if worker is not None and worker.state == "banned":
            raise JoinRefused(f"worker {worker.name} is banned: {worker.reason}")
        if worker is None:
            worker = self._workers[key] = OutsideWorker(key, invitation.name, invitation.digest)
        worker.state, worker.joined_at, worker.relay = "here", self._wall(), relay
        worker.heard, worker.room, worker.count, worker.version = self._clock(), 0, -1, -1
        self._is_changed = True
        return worker

    def hear(self, key: str, count: int) -> OutsideWorker:
        """A word of a worker. Raises: JoinRefused when it has not joined, and for a number that it has used."""
        worker = self._workers.get(key)
        if worker is None or worker.state != "here":
            why = f"is banned: {worker.reason}" if worker is not None and worker.state == "banned" else "is to join"
            raise JoinRefused(f"the worker {why}")
        if count <= worker.count:
            raise JoinRefused(f"word {count} was said before; the last one was {worker.count}")
        worker.count, worker.heard = count, self._clock()
        return worker

    def ban(self, worker: OutsideWorker, fault: WorkFault) -> None:
        """Let it in no more."""
        worker.state, worker.room, worker.reason = "banned", 0, f"{fault.kind}: {fault.text}"
        self._is_changed = True
        self.save()

    def leave(self, worker: OutsideWorker) -> None:
        """It says that it goes, or has not been heard of."""
        if worker.state == "here":
            worker.state, worker.room = "gone", 0
            self._is_changed = True

    def changed(self) -> None:
        """Figures of a worker have changed."""
        self._is_changed = True

    def here(self) -> Iterable[OutsideWorker]:
        """Those who are there."""
        return [worker for worker in self._workers.values() if worker.state == "here"]

    def silent(self, lease_s: float) -> list[OutsideWorker]:
        """Those of whom nothing was heard for as long as a lease lasts."""
        now = self._clock()
        return [worker for worker in self.here() if now - worker.heard > lease_s]

    def save(self) -> None:
        """Write the list down, if it has changed."""
        if self._is_changed:
            self._is_changed = False
            rows = [
                {name: value for name, value in asdict(worker).items() if name not in _OF_THE_MOMENT}
                for worker in self._workers.values()
            ]
            write_json(self._folder / ROSTER_FILE, {"workers": rows})
