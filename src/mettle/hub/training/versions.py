"""The versions of weights or adapters that a hosted run still has on disk."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from mettle.errors import MettleError
from mettle.hub.training.jobs import run_folder
from mettle.runs.adapters import find_adapter
from mettle.storage.run_dir import RunDir


class ShownVersion(NamedTuple):
    """A version as a page lists it."""

    step: int
    num_bytes: int
    written_at: float


def shown_versions(root: Path, run_id: str) -> list[ShownVersion]:
    """The newest first."""
    found = []
    for step, path in versions_on_disk(root, run_id):
        try:
            size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            found.append(ShownVersion(step, size, path.stat().st_mtime))
        except OSError:
            continue  # a run that goes on is just removing it
    return found[::-1]


def versions_on_disk(root: Path, run_id: str) -> list[tuple[int, Path]]:
    """(number, folder), the oldest first."""
    folder = run_folder(root, run_id)
    if not folder.is_dir():
        return []
    run_dir = RunDir(folder)
    found = []
    for path in sorted(run_dir.version(0).parent.glob("v*")):
        number = path.name[1:]
        if number.isdigit() and path.is_dir():
            found.append((int(number), path))
    if not found:
        try:
            adapter = find_adapter(folder)
        except MettleError:
            return []
        found = [(int(adapter.name.lstrip("v") or 0), adapter)]
    return sorted(found)
