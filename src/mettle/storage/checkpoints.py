"""Checkpoints: a trainer half, an orchestrator half, and one manifest written last.

A folder without a manifest, or whose files do not match it, does not exist: resume takes the newest that is complete.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mettle.storage.files import folder_aside, sha256_file, sync_folder, write_json

FileNote = dict[str, int | str]
"""`bytes` and `sha256` of a file."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint: the policy is v{step}, made by training steps 1 to `step`."""

    step: int
    path: Path

    @property
    def trainer(self) -> Path:
        return self.path / "trainer"

    @property
    def orchestrator(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.path / "orchestrator.json").read_text())
        return state


class OpenCheckpoint:
    """A checkpoint under way in a scratch folder beside its place. It exists when `complete` has returned.

    `trainer` is the folder of the trainer's half. One that is never completed leaves nothing behind but, in a process
    that is killed, its scratch folder.
    """

    def __init__(self, root: Path, step: int) -> None:
        self.step = step
        self._final = root / f"step-{step}"
        self._aside = ExitStack()
        self._scratch = self._aside.enter_context(folder_aside(self._final))
        self.trainer = self._scratch / "trainer"
        self.trainer.mkdir()

    def digests(self) -> dict[str, FileNote]:
        """Size and digest of every file that is there, by its name in the checkpoint."""
        return {
            str(path.relative_to(self._scratch)): {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
            for path in sorted(self._scratch.rglob("*"))
            if path.is_file()
        }

    def complete(self, written: Callable[[], dict[str, FileNote]], orchestrator_state: dict[str, Any]) -> Checkpoint:
        """Call `written` for the notes of the trainer's half, then write the other half and the manifest; durable when
        this returns. Raises: what `written` raises, a full disk as StorageError."""
        with self._aside:
            files = written()
            path = self._scratch / "orchestrator.json"
            write_json(path, orchestrator_state, is_durable=True)
            files |= {path.name: {"bytes": path.stat().st_size, "sha256": sha256_file(path)}}
            write_json(self._scratch / "manifest.json", {"step": self.step, "files": files}, is_durable=True)
        sync_folder(self._final.parent)
        return Checkpoint(self.step, self._final)


def write_checkpoint(
    root: Path, step: int, save_trainer: Callable[[Path], None], orchestrator_state: dict[str, Any]
) -> Checkpoint:
    """Save both halves, then the manifest with the size and digest of every file; durable when this returns."""
    begun = OpenCheckpoint(root, step)

    def written() -> dict[str, FileNote]:
        save_trainer(begun.trainer)
        return begun.digests()

    return begun.complete(written, orchestrator_state)


def newest_checkpoint(root: Path, *, at_step: int | None = None) -> Checkpoint | None:
    """The newest complete checkpoint (or the one at `at_step`), passing over any that is cut short or damaged."""
    for folder in sorted(root.glob("step-*"), key=_step_of, reverse=True):
        if at_step is not None and _step_of(folder) != at_step:
            continue
        if damage_of(folder) is None:
            return Checkpoint(_step_of(folder), folder)
    return None


def damage_of(folder: Path) -> str | None:
    """What is wrong with a checkpoint folder, in a few words; None when it is complete."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        for name, expected in manifest["files"].items():
            path = folder / name
            if not path.exists():
                return f"{name} is missing"
            if path.stat().st_size != expected["bytes"]:
                return f"{name} has {path.stat().st_size} bytes instead of {expected['bytes']}"
            if sha256_file(path) != expected["sha256"]:
                return f"{name} does not match its digest"
    except (OSError, ValueError, KeyError) as error:
        return f"manifest.json: {error}"
    return None


def remove_checkpoints(root: Path, *, keep_last: int, keep_step: int | None = None) -> None:
    """Keep the newest `keep_last` complete checkpoints, and that of `keep_step`, and delete the other older ones."""
    complete = [f for f in sorted(root.glob("step-*"), key=_step_of, reverse=True) if (f / "manifest.json").exists()]
    for folder in complete[keep_last:]:
        if _step_of(folder) == keep_step:
            continue
        shutil.rmtree(folder, ignore_errors=True)


def set_aside_after(root: Path, step: int) -> list[int]:
    """Rename the checkpoints after `step`, so that they do not count; returns their steps."""
    later = [folder for folder in root.glob("step-*") if _step_of(folder) > step]
    for folder in later:
        folder.rename(folder.with_name(f"unknown-{folder.name}-{time.time_ns()}"))
    return sorted(_step_of(folder) for folder in later)


def _step_of(folder: Path) -> int:
    number = folder.name.removeprefix("step-")
    return int(number) if number.isdigit() else -1
