"""What /etc/subuid and /etc/subgid give a user, and what is said where it is not enough."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mettle.sandbox import host_ids
from mettle.sandbox.host_ids import HostIds, find_subordinates


@pytest.fixture
def etc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of an ordinary user's, on a host that has the programs."""
    monkeypatch.setattr(host_ids.os, "geteuid", lambda: 1)
    monkeypatch.setattr(host_ids.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(host_ids, "_names", lambda: ("ann", "1"))
    (tmp_path / "subgid").write_text("ann:300000:65536\n")
    return tmp_path


def test_the_largest_range_of_the_user_is_taken_by_name_or_number(etc: Path) -> None:
    (etc / "subuid").write_text("bob:100000:65536\nann:200000:4096\n1:500000:8192\nann:x:y\n\n")
    assert find_subordinates(etc) == HostIds((500_000, 8192, 300_000, 65_536))


@pytest.mark.parametrize("text", [None, "", "bob:100000:65536\n", "ann:100000:4095\n"])
def test_too_few_are_none_and_the_file_is_named(etc: Path, text: str | None) -> None:
    if text is not None:
        (etc / "subuid").write_text(text)
    found = find_subordinates(etc)
    assert found.ids == ()
    assert str(etc / "subuid") in found.why_not
    assert "user ann" in found.why_not


def test_without_the_programs_there_are_none(etc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_ids.shutil, "which", lambda name: None)
    assert find_subordinates(etc).why_not == "this host has no newuidmap and no newgidmap"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's pools take users that are nobody's")
def test_root_looks_into_no_file(tmp_path: Path) -> None:
    assert find_subordinates(tmp_path).ids == ()
