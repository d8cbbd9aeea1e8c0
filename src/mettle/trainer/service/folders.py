"""Where the service keeps weights: a folder for each state and each saved adapter, under names that nobody chooses.

Invariant: a folder is complete once it has its name, and is never changed; what no row of the database names is left
over from a crash and is removed at the start.
"""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from mettle.storage.files import folder_aside

_OWN_NAME: Final = re.compile(r"\.?[0-9a-f]{32}(\.|$)")
"""A name that `write` gives, or one of its scratch folders."""


class WeightFolders:
    """The folders under one directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)

    def write(self, fill: Callable[[Path], None]) -> str:
        """A new folder, complete; its name."""
        name = uuid.uuid4().hex
        with folder_aside(self.root / name) as scratch:
            fill(scratch)
        return name

    def path(self, name: str) -> Path:
        return self.root / name

    def size(self, name: str) -> int:
        """Bytes of its files."""
        return sum(file.stat().st_size for file in self.path(name).iterdir())

    def remove(self, name: str) -> None:
        """Remove a folder, if it is there."""
        if name:
            shutil.rmtree(self.path(name), ignore_errors=True)

    def sweep(self, kept: Iterable[str]) -> None:
        """Remove what is not kept, of folders with names of ours: the directory may hold what is somebody else's."""
        wanted = set(kept)
        for folder in self.root.iterdir():
            if folder.name not in wanted and _OWN_NAME.match(folder.name):
                shutil.rmtree(folder, ignore_errors=True)
