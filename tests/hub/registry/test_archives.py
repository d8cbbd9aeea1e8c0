"""Archives that strangers send: what is no wheel, is another's, leads out, or unpacks without an end is refused."""

from __future__ import annotations

import gzip
import io
import zipfile

import pytest
from tests.hub.archives_made import source, tar, wheel

from mettle.errors import UserError
from mettle.hub.registry import archives


def write(tmp_path, data):
    path = tmp_path / "archive"
    path.write_bytes(data)
    return path


def linked_wheel():
    made = io.BytesIO(wheel())
    with zipfile.ZipFile(made, "a") as archive:
        link = zipfile.ZipInfo("passwd")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    return made.getvalue()


WHEELS = {
    "no zip": (b"PK\x03\x04 and nothing", "no wheel that can be read"),
    "empty": (b"", "no wheel that can be read"),
    "another name": (wheel("other"), "says that it is other 0.1.0"),
    "another version": (wheel(version="0.2.0"), "says that it is my-task 0.2.0"),
    "a path out": (wheel(files={"../../evil.py": b""}), "leads out"),
    "an absolute path": (wheel(files={"/etc/evil": b""}), "leads out"),
    "a drive": (wheel(files={"C:/evil": b""}), "leads out"),
    "a link": (linked_wheel(), "has a link"),
    "two metadata": (wheel(files={"other-1.dist-info/METADATA": b""}), "2 files"),
    "binary metadata": (wheel(files={"my_task-0.1.0.dist-info/METADATA": b"\xff\xfe"}), "not UTF-8"),
    "long metadata": (wheel(files={"my_task-0.1.0.dist-info/METADATA": b"x" * (2 << 20)}), "longer than"),
    "cut off": (wheel()[:-40], "no wheel that can be read"),
}
SOURCES = {
    "no tar": (b"hello", "no tar.gz that can be read"),
    "gzip of nothing": (gzip.compress(b"", mtime=0), "no tar.gz that can be read"),
    "no README": (source(files={"README.md": b"  \n"}), "needs a README.md"),
    "no project": (source(files={"pyproject.toml": b"[tool]\n"}), "no pyproject.toml with a name"),
    "bad toml": (source(files={"pyproject.toml": b"[["}), "no pyproject.toml with a name"),
    "another name": (source("other"), "says that it is other 0.1.0"),
    "a path out": (source(files={"../evil": b""}), "leads out"),
    "an absolute path": (source(files={"/evil": b""}), "leads out"),
    "a link": (tar([("README.md", b"# x")], links={"x": "/etc/passwd"}), "neither a file nor a folder"),
    "cut off": (source()[:-20], "no tar.gz that can be read"),
    "binary README": (source(files={"README.md": b"\xff\xfe"}), "not UTF-8"),
}


@pytest.mark.parametrize("kind", WHEELS)
def test_a_wheel_that_is_not_what_was_announced_is_refused(tmp_path, kind):
    data, words = WHEELS[kind]
    with pytest.raises(UserError, match=words):
        archives.read_wheel(write(tmp_path, data), name="my-task", version="0.1.0")


@pytest.mark.parametrize("kind", SOURCES)
def test_a_source_that_is_not_what_was_announced_is_refused(tmp_path, kind):
    data, words = SOURCES[kind]
    with pytest.raises(UserError, match=words):
        archives.read_source(write(tmp_path, data), name="my-task", version="0.1.0")


def test_a_bomb_is_refused_before_it_goes_off(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MAX_UNPACKED_BYTES", 1 << 20)
    data = source(files={"zeros": bytes(4 << 20)})
    assert len(data) < 1 << 16
    with pytest.raises(UserError, match="unpacks to more than"):
        archives.read_source(write(tmp_path, data), name="my-task", version="0.1.0")
    bomb = wheel(files={"zeros": bytes(4 << 20)})
    with pytest.raises(UserError, match="unpacks to more than"):
        archives.read_wheel(write(tmp_path, bomb), name="my-task", version="0.1.0")


def test_too_many_entries_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MAX_ENTRIES", 20)
    data = tar([(f"f{number}", b"") for number in range(30)])
    with pytest.raises(UserError, match="more than 20 entries"):
        archives.list_files(write(tmp_path, data))


def test_what_is_good_is_read(tmp_path):
    assert "Name: my-task" in archives.read_wheel(write(tmp_path, wheel()), name="my-task", version="0.1.0")
    path = write(tmp_path, source(files={"tests/test_x.py": b"assert True\n"}))
    assert archives.read_source(path, name="my-task", version="0.1.0").project["tags"] == ["text"]
    assert [f.path for f in archives.list_files(path)] == [
        "README.md",
        "my_task.py",
        "pyproject.toml",
        "tests/test_x.py",
    ]
    assert archives.read_member(path, "tests/test_x.py", 6) == (b"assert", 12)
    assert archives.read_member(path, "nothing", 6) is None


@pytest.mark.parametrize("name", ["", "-x", "a/b", "a b", "x" * 101, "é"])
def test_what_is_no_name_is_refused(name):
    with pytest.raises(UserError, match="is no name of a package"):
        archives.normalized_name(name)


@pytest.mark.parametrize("version", ["", "1.0-1", "v1", "1..0", "latest", "1.0/../2"])
def test_what_is_no_version_is_refused(version):
    with pytest.raises(UserError, match="is no version"):
        archives.checked_version(version)
