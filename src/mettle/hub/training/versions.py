"""The versions of weights or adapters that a hosted run still has on disk."""

from __future__ import annotations

from pathlib import Path

from mettle.errors import MettleError
from mettle.hub.training.jobs import run_folder
from mettle.runs.adapters import find_adapter
from mettle.storage.run_dir import RunDir


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
