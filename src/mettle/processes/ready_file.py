"""The file in which a server says that it can answer, and where: written by it, read and removed by who started it.

Invariant: it belongs to the process that runs, because whoever starts one removes a stale one first.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class ReadyFile:
    """`path` is None for a worker, which answers nobody and is ready as soon as it runs."""

    path: Path | None

    def prepare(self) -> None:
        """A process is about to start: it finds the folder, and no word of the one before."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self.remove()

    def endpoint(self) -> dict[str, Any] | None:
        """What it says, or None while there is none."""
        if self.path is None:
            return None
        try:
            found: dict[str, Any] = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return None
        return found

    def remove(self) -> None:
        """The process is gone: nobody answers at that address."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    @property
    def is_satisfied(self) -> bool:
        """True when a running process is ready: it is no server, or has said that it can answer."""
        return self.path is None or self.endpoint() is not None
