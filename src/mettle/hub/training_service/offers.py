"""Which base models are offered for training, and where the process of each answers.

Parts: `ServiceOffer` (of the operator's settings), `offers_of`; `ServiceState`, which whoever runs the process writes
and every server of the Hub's folder reads. Invariant: a state leads to a process that lives, or to none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from mettle.errors import UserError
from mettle.processes.child import process_state
from mettle.storage.files import write_json

FOLDER: Final = "training-service"
STATE: Final = "state.json"
SETTING: Final = "train_models"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True)
class ServiceOffer:
    """A base model. `name` is its part of the address, `model_name` what clients ask for."""

    name: str
    model_name: str
    path: Path


@dataclass(frozen=True, slots=True)
class ServiceState:
    """What the process of an offer is doing. `url` is "" until it answers; `why` says why it does not."""

    url: str = ""
    key: str = ""
    pid: int = 0
    num_restarts: int = 0
    why: str = ""

    @property
    def is_ready(self) -> bool:
        """Whether it answers: a port of one that was killed may be somebody else's by now."""
        return bool(self.url) and bool(process_state(self.pid))

    @property
    def words(self) -> str:
        """For a page."""
        if self.is_ready:
            return "ready"
        return f"not ready: {self.why}" if self.why else "starting"


def offers_of(models: Path, entries: Sequence[str]) -> tuple[ServiceOffer, ...]:
    """What the setting offers: `DIRECTORY` or `DIRECTORY=NAME`. Raises: UserError for a model that is not there."""
    found: dict[str, ServiceOffer] = {}
    for entry in entries:
        name, _, model_name = entry.partition("=")
        path = models / name
        if not _NAME.fullmatch(name) or not (path / "config.json").is_file():
            there = ", ".join(sorted(each.parent.name for each in models.glob("*/config.json"))) or "none"
            raise UserError(f"{SETTING}: no model {name!r} in {models}; there are: {there}")
        if name in found:
            raise UserError(f"{SETTING}: {name!r} stands there twice")
        found[name] = ServiceOffer(name, model_name or name, path.resolve())
    return tuple(found.values())


def folder_of(hub: Path, name: str) -> Path:
    """Where the service of a base model keeps its database and checkpoints."""
    return hub / FOLDER / name


def read_state(hub: Path, name: str) -> ServiceState:
    """The state of a service; that of one that starts where nothing is said."""
    try:
        return ServiceState(**json.loads((folder_of(hub, name) / STATE).read_bytes()))
    except (OSError, ValueError, TypeError):
        return ServiceState()


@dataclass(frozen=True, slots=True)
class ShownService:
    """A service as a page shows it."""

    name: str
    model_name: str
    address: str
    state: str


def shown_services(hub: Path, offers: Sequence[ServiceOffer], root: str) -> list[ShownService]:
    """Those that are offered, with the addresses that clients of a Hub at `root` know them by."""
    return [
        ShownService(each.name, each.model_name, f"{root}/train/{each.name}", read_state(hub, each.name).words)
        for each in offers
    ]


def write_state(hub: Path, name: str, state: ServiceState) -> None:
    """Tell every server of the folder. The Hub's folder is its user's alone, as the key has to be."""
    write_json(folder_of(hub, name) / STATE, asdict(state))
