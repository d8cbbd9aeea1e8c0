"""What differs between two sources, and what hostile ones may cost."""

from __future__ import annotations

import difflib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.hub.archives_made import push, source, tar

from mettle.errors import UserError
from mettle.hub.registry import differences
from mettle.hub.registry.differences import _Room, changed_lines, difference_of


@pytest.fixture
def compared(tmp_path):
    """The difference of two sets of files, by path."""

    def of(old, new):
        for name, files in (("old", old), ("new", new)):
            (tmp_path / name).write_bytes(tar(list(files.items())))
        difference_of.cache_clear()
        found = difference_of(tmp_path / "old", tmp_path / "new")
        return found, {each.path: each for each in found.files}

    return of


def text_of(change):
    return [[hunk.head, *(f"{line.edit}{line.text}" for line in hunk.lines)] for hunk in change.hunks]


def test_files_that_came_went_or_changed_are_named_with_their_lines(compared):
    lines = [f"line {i}\n" for i in range(40)]
    changed = [*lines[:4], "new\n", *lines[5:30], *lines[31:]]
    found, by_path = compared(
        {"a.py": "".join(lines).encode(), "same.py": b"x", "gone.py": b"one\ntwo\n"},
        {"a.py": "".join(changed).encode(), "same.py": b"x", "came.py": b"end"},
    )
    assert (found.num_same, found.num_hidden, list(by_path)) == (1, 0, ["a.py", "came.py", "gone.py"])
    assert (by_path["a.py"].kind, by_path["a.py"].num_added, by_path["a.py"].num_removed) == ("changed", 1, 2)
    first, second = text_of(by_path["a.py"])
    assert first == [
        "@@ -2,7 +2,7 @@", " line 1", " line 2", " line 3", "-line 4", "+new", " line 5", " line 6", " line 7"
    ]  # fmt: skip
    assert second[0] == "@@ -28,7 +28,6 @@"
    assert text_of(by_path["came.py"]) == [["@@ -0,0 +1,1 @@", "+end [no newline at the end]"]]
    assert (by_path["gone.py"].num_removed, by_path["gone.py"].after_bytes) == (2, None)


lines = st.lists(st.sampled_from(["a\n", "b\n", "c\n"]), max_size=14)


@given(lines, lines)
def test_the_lines_shown_make_both_files_and_no_edits_are_fewer(before, after):
    edits = list(changed_lines(before, after, _Room(10_000, 0)))
    assert [line.text for line in edits if line.edit != "+"] == before
    assert [line.text for line in edits if line.edit != "-"] == after
    assert [line.before for line in edits if line.before] == list(range(1, len(before) + 1))
    assert [line.after for line in edits if line.after] == list(range(1, len(after) + 1))
    found = difflib.SequenceMatcher(None, before, after, autojunk=False)
    other = len(before) + len(after) - 2 * sum(block.size for block in found.get_matching_blocks())
    assert sum(line.edit != " " for line in edits) <= other


def test_binary_and_large_files_are_named_and_not_compared_by_line(compared, monkeypatch):
    monkeypatch.setattr(differences, "MAX_FILE_BYTES", 1000)
    _, by_path = compared(
        {"a.bin": b"\0\1", "b.txt": b"x" * 2000, "latin": b"\xff"},
        {"a.bin": b"\0\2", "b.txt": b"y" * 2000, "latin": b"\xfe"},
    )
    assert {path: change.note for path, change in by_path.items()} == {
        "a.bin": "binary", "b.txt": "too large to show its lines", "latin": "binary",
    }  # fmt: skip
    assert (by_path["b.txt"].before_bytes, by_path["b.txt"].after_bytes, by_path["b.txt"].hunks) == (2000, 2000, [])


def test_hostile_sources_cost_no_more_than_the_bounds(compared, monkeypatch, tmp_path):
    shuffled = [f"{i * 7919 % 2000}\n" for i in range(2000)]
    old = {f"{i}.txt": "".join(f"{j}\n" for j in range(2000)).encode() for i in range(40)}
    new = {f"{i}.txt": "".join(shuffled).encode() for i in range(40)}
    room = _Room(differences.MAX_STEPS, differences.MAX_LINES)
    monkeypatch.setattr(differences, "_Room", lambda *_: room)
    found, _ = compared(old, new)
    assert room.steps > -differences.MAX_EDITS * 2 - 2 * 4000, "no more than the last file over what is allowed"
    assert sum(len(hunk.lines) for each in found.files for hunk in each.hunks) <= differences.MAX_LINES
    assert found.files[-1].note.startswith("not compared by line")
    assert len(found.files) == 40
    monkeypatch.setattr(differences, "MAX_SOURCE_BYTES", 1 << 20)
    (tmp_path / "old").write_bytes(tar([("big", b"\0" * (4 << 20))]))
    difference_of.cache_clear()
    with pytest.raises(UserError, match="unpacks to more than 1 MiB"):
        difference_of(tmp_path / "old", tmp_path / "new")


def test_long_lines_are_cut_and_controls_are_seen(compared):
    _, by_path = compared({"a": b"x\r\n"}, {"a": b"x\n\x1b[31m" + b"y" * 1000 + b"\n"})
    (hunk,) = text_of(by_path["a"])
    assert hunk[1] == "-x\u240d"
    assert "\x1b" not in "".join(hunk)
    assert hunk[3].endswith(" more]")


def test_two_versions_are_compared_by_program_and_on_the_page_by_who_may_see_them(hub):
    bob = hub.with_token("bob")
    assert push(bob).status_code == 200
    files = {"my_task.py": b"x = 2\n", "<b>.py": b"y\n"}
    assert push(bob, version="0.2.0", source_bytes=source(version="0.2.0", files=files)).status_code == 200
    address = "/api/v1/environmentshub/bob/my-task/difference"
    told = bob.get(address).json()["data"]
    assert (told["before"], told["after"]) == ("0.1.0", "0.2.0")
    kinds = {each["path"]: each["kind"] for each in told["files"]}
    assert kinds == {"<b>.py": "added", "my_task.py": "changed", "pyproject.toml": "changed"}
    back = bob.get(address, params={"before": "0.2.0", "after": "0.1.0"}).json()["data"]
    assert {each["path"]: each["kind"] for each in back["files"]}["<b>.py"] == "removed"
    assert bob.get(address, params={"before": "latest"}).json()["data"]["files"] == []
    assert bob.get(address, params={"after": "0.1.0"}).status_code == 404
    assert bob.get(address, params={"before": "9"}).status_code == 404
    page = bob.get("/environments/bob/my-task/difference").text
    assert "&lt;b&gt;.py" in page
    assert "x = 2" in page
    assert "<b>.py" not in page
    assert "since 0.1.0" in bob.get("/environments/bob/my-task?tab=versions").text
    assert hub.with_token("eve").get(address).status_code == 404
    assert hub.anonymous().get("/environments/bob/my-task/difference").status_code == 404
