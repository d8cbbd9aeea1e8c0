"""What is published of a folder: the same bytes at any time, nothing hidden; and unpacking what others published."""

from __future__ import annotations

import os

import pytest
from tests.hub.archives_made import tar

from mettle.envs.packages import archive
from mettle.errors import UserError
from mettle.storage.files import sha256_file


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "task"
    (made / "tests").mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "task.py", "tests/test_task.py", ".env", "x.pyc"):
        (made / name).write_text(name)
    (made / "__pycache__").mkdir()
    (made / "__pycache__" / "task.pyc").write_text("x")
    (made / "link").symlink_to("/etc/passwd")
    return made


def test_the_same_files_make_the_same_archive_and_hash(folder):
    files = sorted(archive._files(folder))
    assert [str(f) for f in files] == ["README.md", "pyproject.toml", "task.py", "tests/test_task.py", "x.pyc"]
    before = archive._archive(folder, files), archive._content_hash(folder, files)
    os.utime(folder / "task.py", (1, 1))
    assert (archive._archive(folder, files), archive._content_hash(folder, files)) == before
    (folder / "task.py").write_text("changed")
    assert archive._content_hash(folder, files) != before[1]


def test_nothing_is_unpacked_outside(tmp_path):
    path = tmp_path / "a.tar.gz"
    path.write_bytes(tar([("../evil", b"x")]))
    with pytest.raises(UserError, match="cannot be unpacked"):
        archive.unpack(path, tmp_path / "out" / "in", sha256=sha256_file(path))
    assert not (tmp_path / "out" / "in").exists()
    assert not (tmp_path / "out" / "evil").exists()


def test_links_and_other_bytes_are_refused(tmp_path):
    path = tmp_path / "a.tar.gz"
    path.write_bytes(tar([("a", b"x")], links={"b": "/etc/passwd"}))
    with pytest.raises(UserError, match="neither a file nor a folder"):
        archive.unpack(path, tmp_path / "out", sha256=sha256_file(path))
    with pytest.raises(UserError, match="not the one that the Hub names"):
        archive.unpack(path, tmp_path / "out", sha256="0" * 64)
