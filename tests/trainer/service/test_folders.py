"""Folders of weights: complete or not there, and nobody else's is touched."""

from __future__ import annotations

import pytest

from mettle.trainer.service.folders import WeightFolders


def test_a_folder_is_complete_or_not_there(tmp_path):
    folders = WeightFolders(tmp_path / "weights")
    name = folders.write(lambda folder: (folder / "a").write_bytes(b"12345") and None)
    assert folders.size(name) == 5

    def fail(folder):
        (folder / "a").write_bytes(b"1")
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011 - our own
        folders.write(fail)
    assert [path.name for path in folders.root.iterdir()] == [name]


def test_a_sweep_removes_what_a_crash_left_and_nothing_that_is_somebodys(tmp_path):
    folders = WeightFolders(tmp_path / "weights")
    kept, left = (folders.write(lambda folder: None) for _ in range(2))
    (folders.root / f".{left}.x1").mkdir()
    (folders.root / "my-model").mkdir()
    folders.sweep([kept])
    assert {path.name for path in folders.root.iterdir()} == {kept, "my-model"}
