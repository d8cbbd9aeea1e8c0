"""Where a run's door for workers from outside is, for whoever invites them: a file in the run's folder for workers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

from mettle.errors import StorageError
from mettle.storage.files import write_json

DOOR_FILE: Final = "door.json"


def write_door(folder: Path, url: str, host: str, port: int) -> None:
    """Say that this process has opened the door."""
    write_json(folder / DOOR_FILE, {"url": url, "host": host, "port": port, "pid": os.getpid()})


def read_door(folder: Path) -> dict[str, Any]:
    """Where the door is, as it was written last. Raises: StorageError when it never was."""
    try:
        found: dict[str, Any] = json.loads((folder / DOOR_FILE).read_text())
        return found
    except (OSError, ValueError) as error:
        raise StorageError(f"no door for workers was opened in {folder}: {error}") from error
