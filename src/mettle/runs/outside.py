"""Workers from outside as a run tells of them: who came, who went, who was banned and why.

Parts: `invite_worker` (for the owner of a run), `OutsideWatch` (the supervisor asks it). The list itself is kept by the
process that has the door: see `mettle.inference.outside.roster`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mettle.errors import StorageError, UserError
from mettle.inference.outside.door_file import read_door
from mettle.inference.outside.roster import OutsideWorker, invite, read_roster
from mettle.runs.host import HostNews
from mettle.runs.stored import read_run_config
from mettle.storage.run_dir import RunDir

JOINED, LEFT, BANNED = "worker_joined", "worker_left", "worker_banned"


@dataclass(frozen=True, slots=True)
class WorkInvitation:
    """What an owner passes on: the token, and where the door is, if it is open now."""

    name: str
    token: str
    url: str | None


def has_door(run_dir: RunDir) -> bool:
    """Whether a run lets workers in from outside."""
    return read_run_config(run_dir).inference.outside is not None


def no_door(run_dir: RunDir) -> str:
    """What is to be said of one that doesn't."""
    return f"run {run_dir.name} has no door for workers from outside: it was made without [inference.outside]"


def invite_worker(run_dir: RunDir, name: str) -> WorkInvitation:
    """Make an invitation to a run. Raises: UserError when the run has no door."""
    if not has_door(run_dir):
        raise UserError(no_door(run_dir))
    token = invite(run_dir.outside, name)
    try:
        url = str(read_door(run_dir.outside)["url"])
    except StorageError:
        url = None
    return WorkInvitation(name, token, url)


class OutsideWatch:
    """Looks at the list of a run's workers; `look` tells what is new in it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known = {worker.key: worker for worker in self._read()}

    def look(self) -> list[HostNews]:
        """Who joined, left or was banned since the last look."""
        found = self._read()
        news = [one for worker in found for one in self._told(worker, self._known.get(worker.key))]
        self._known = {worker.key: worker for worker in found} or self._known
        return news

    def _told(self, worker: OutsideWorker, before: OutsideWorker | None) -> list[HostNews]:
        if before is not None and (before.state, before.joined_at) == (worker.state, worker.joined_at):
            return []
        figures = {
            name: float(getattr(worker, name)) for name in ("taken", "sampled", "checked", "returned", "refused")
        }
        match worker.state:
            case "here":
                return [HostNews(JOINED, f"worker {worker.name} ({worker.key[:8]}) samples from outside", figures)]
            case "gone":
                text = f"worker {worker.name} ({worker.key[:8]}) has gone after {worker.sampled} completions"
                return [HostNews(LEFT, text, figures)]
        text = f"worker {worker.name} ({worker.key[:8]}) is banned: {worker.reason}"
        return [HostNews(BANNED, text, figures)]

    def _read(self) -> list[OutsideWorker]:
        try:
            return read_roster(self._folder)
        except StorageError:  # it is shown again when it can be read
            return []
