"""Checkpoints: complete or not there, the newest that is whole, and only old ones removed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from mettle.errors import StorageError
from mettle.storage.checkpoints import (
    Checkpoint,
    damage_of,
    newest_checkpoint,
    remove_checkpoints,
    set_aside_after,
    write_checkpoint,
)


def write(root: Path, step: int) -> Checkpoint:
    def save(folder: Path) -> None:
        (folder / "deep").mkdir()
        (folder / "deep" / "weights.bin").write_bytes(b"w" * (10 + step))

    return write_checkpoint(root, step, save, {"tasks": [step]})


def steps(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in root.glob("step-*"))


def test_what_was_written_is_read(tmp_path):
    assert newest_checkpoint(tmp_path) is None
    written = write(tmp_path, 4)
    assert written == newest_checkpoint(tmp_path) == Checkpoint(4, tmp_path / "step-4")
    assert written.orchestrator == {"tasks": [4]}
    assert (written.trainer / "deep" / "weights.bin").read_bytes() == b"w" * 14
    manifest = json.loads((written.path / "manifest.json").read_text())
    assert manifest["step"] == 4
    assert {name: entry["bytes"] for name, entry in manifest["files"].items()} == {
        "orchestrator.json": (written.path / "orchestrator.json").stat().st_size, "trainer/deep/weights.bin": 14,
    }  # fmt: skip


def test_the_newest_is_the_one_of_the_highest_step_and_not_of_the_longest_name(tmp_path):
    for step in (9, 10, 2):
        write(tmp_path, step)
    (tmp_path / "step-final").mkdir()
    assert newest_checkpoint(tmp_path).step == 10
    assert newest_checkpoint(tmp_path, at_step=9).path == tmp_path / "step-9"
    assert newest_checkpoint(tmp_path, at_step=2).orchestrator == {"tasks": [2]}
    assert newest_checkpoint(tmp_path, at_step=3) is None


def test_those_after_a_step_are_set_aside_and_that_of_the_step_stays(tmp_path):
    for step in (8, 9, 10, 11):
        write(tmp_path, step)
    (tmp_path / "step-final").mkdir()
    assert set_aside_after(tmp_path, 9) == [10, 11]
    assert newest_checkpoint(tmp_path).step == 9
    left = sorted(folder.name.rpartition("-")[0] or folder.name for folder in tmp_path.iterdir())
    assert left == ["step", "step", "step", "unknown-step-10", "unknown-step-11"]
    assert set_aside_after(tmp_path, 9) == []


def test_a_folder_without_a_number_is_older_than_any(tmp_path):
    write(tmp_path, 0)
    shutil.copytree(tmp_path / "step-0", tmp_path / "step-final")
    assert newest_checkpoint(tmp_path).path == tmp_path / "step-0"


def test_both_halves_and_the_manifest_are_on_the_disk_before_the_folder_appears(tmp_path, monkeypatch):
    synced, real = [], os.fsync

    def fsync(descriptor):
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write(tmp_path, 4)
    assert [name for path in synced for name in ("orchestrator.json", "manifest.json") if name in path.name] == [
        "orchestrator.json", "manifest.json",
    ]  # fmt: skip
    assert synced[-1] == tmp_path


def test_a_write_that_fails_leaves_nothing(tmp_path):
    def fail(folder: Path) -> None:
        (folder / "half").write_bytes(b"x")
        raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match="no space left"):
        write_checkpoint(tmp_path, 1, fail, {})
    assert list(tmp_path.iterdir()) == []


def damage(folder: Path, how: str) -> None:
    weights = folder / "trainer" / "deep" / "weights.bin"
    match how:
        case "short":
            os.truncate(weights, 3)
        case "long":
            weights.write_bytes(b"w" * 100)
        case "altered":
            weights.write_bytes(b"v" + weights.read_bytes()[1:])
        case "missing":
            weights.unlink()
        case "no manifest":
            (folder / "manifest.json").unlink()
        case "torn manifest":
            (folder / "manifest.json").write_text('{"step": 5, "files": {')
        case "another manifest":
            (folder / "manifest.json").write_text('{"step": 5}')


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("short", "trainer/deep/weights.bin has 3 bytes instead of 15"),
        ("long", "trainer/deep/weights.bin has 100 bytes instead of 15"),
        ("altered", "trainer/deep/weights.bin does not match its digest"),
        ("missing", "trainer/deep/weights.bin is missing"),
        ("no manifest", "manifest.json: "),
        ("torn manifest", "manifest.json: "),
        ("another manifest", "manifest.json: 'files'"),
    ],
)
def test_what_is_damaged_is_passed_over_and_named(tmp_path, how, words):
    whole, newest = write(tmp_path, 3), write(tmp_path, 5)
    assert damage_of(newest.path) is None
    damage(newest.path, how)
    assert words in (damage_of(newest.path) or "")
    assert newest_checkpoint(tmp_path) == whole
    assert newest_checkpoint(tmp_path, at_step=5) is None


@pytest.mark.parametrize(("keep_last", "left"), [(1, [20]), (2, [9, 20]), (3, [3, 9, 20]), (9, [1, 3, 9, 20])])
def test_the_oldest_are_removed_beyond_those_to_keep(tmp_path, keep_last, left):
    for step in (9, 3, 20, 1):
        write(tmp_path, step)
    remove_checkpoints(tmp_path, keep_last=keep_last)
    assert steps(tmp_path) == left


def test_a_checkpoint_that_is_still_written_is_neither_counted_nor_removed(tmp_path):
    for step in (1, 2, 3):
        write(tmp_path, step)
    (tmp_path / "step-4").mkdir()
    remove_checkpoints(tmp_path, keep_last=2)
    assert steps(tmp_path) == [2, 3, 4]


def test_what_cannot_be_removed_is_left_for_the_next_time(tmp_path, monkeypatch):
    for step in (1, 2):
        write(tmp_path, step)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", lambda *_, **__: (_ for _ in ()).throw(PermissionError(1, "no")))
        remove_checkpoints(tmp_path, keep_last=1)
    assert newest_checkpoint(tmp_path).step == 2
