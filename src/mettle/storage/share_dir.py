"""The names of things in a share's folder: several runs whose adapters are trained and served beside one base.

Parts: `ShareDir`, `Membership` (a run that wants its adapter trained, written by the run's supervisor) and `TenantWord`
(what the trainer says of it). Invariant: each file has one writer and appears complete or not at all; a word counts for
the life of the run that it names alone, so that what was said before a resume is never taken for news.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mettle.errors import StorageError, UserError
from mettle.storage.files import storage_errors, write_json
from mettle.storage.run_dir import RunDir


@dataclass(frozen=True, slots=True)
class Membership:
    """A run beside the base, by the name of its adapter. `life` changes when the run is taken up again."""

    name: str
    run_dir: Path
    life: str


@dataclass(frozen=True, slots=True)
class TenantWord:
    """Where the trainer stands with a run: `state` is "training", "done" or "failed", with a message and exit code."""

    life: str
    state: str
    step: int
    message: str = ""
    code: int = 0


@dataclass(frozen=True, slots=True)
class ShareDir:
    """A share on disk: a run directory without a run of its own (`as_run`), and:

    share.json             the base, the settings that its runs have in common, and the runs that it starts
    model -> BASE          the base, whose files all runs read
    runs/{name}/           the runs that were started with it
    members/{name}.json    the runs that want to be trained now
    tenants/{name}.json    what the trainer says of each
    """

    path: Path

    @property
    def as_run(self) -> RunDir:
        """Its ledger, logs, endpoints and beats, which are named as a run's are."""
        return RunDir(self.path)

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def runs(self) -> Path:
        return self.path / "runs"

    @property
    def endpoint(self) -> Path:
        """Where its engine says that it listens."""
        return self.as_run.endpoint("inference")

    def about(self) -> dict[str, Any]:
        """What the share was made with. Raises: UserError when there is none."""
        path = self.path / "share.json"
        if not path.exists():
            raise UserError(f"no share at {self.path}: it has no share.json; `mettle rl share FILES` makes one")
        with storage_errors(path, "reading"):
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    def write_about(self, about: Mapping[str, Any]) -> None:
        """Say what the share is."""
        write_json(self.path / "share.json", dict(about))

    def join(self, member: Membership) -> None:
        """Ask for a run to be trained. Raises: UserError when another run has its name."""
        for other in self.members():
            if other.name == member.name and other.run_dir != member.run_dir:
                raise UserError(
                    f"the share at {self.path} has a run {member.name!r} already, at {other.run_dir}; give this one"
                    " another name"
                )
        with storage_errors(self.path, "writing"):
            (self.path / "members").mkdir(parents=True, exist_ok=True)
            write_json(self._member(member.name), {**asdict(member), "run_dir": str(member.run_dir)})

    def leave(self, member: Membership) -> None:
        """The run is over, or stopped; a later life of it stays."""
        if member in self.members():
            self._member(member.name).unlink(missing_ok=True)

    def members(self) -> list[Membership]:
        """The runs that want to be trained, by name."""
        found = []
        for path in sorted((self.path / "members").glob("*.json")):
            try:
                row = json.loads(path.read_text(encoding="utf-8"))
                found.append(Membership(str(row["name"]), Path(row["run_dir"]), str(row["life"])))
            except FileNotFoundError:
                continue  # it has just left
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise StorageError(f"{path} cannot be read: {error}") from error
        return found

    def tell(self, name: str, word: TenantWord) -> None:
        """Say where the trainer stands with a run."""
        (self.path / "tenants").mkdir(parents=True, exist_ok=True)
        write_json(self.path / "tenants" / f"{name}.json", asdict(word))

    def told(self, member: Membership) -> TenantWord | None:
        """What the trainer says of this life of a run; None as long as it says nothing."""
        try:
            word = TenantWord(**json.loads((self.path / "tenants" / f"{member.name}.json").read_text()))
        except (OSError, ValueError, TypeError):
            return None
        return word if word.life == member.life else None

    def _member(self, name: str) -> Path:
        return self.path / "members" / f"{name}.json"
