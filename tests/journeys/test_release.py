"""A release's changelog and lock."""

from __future__ import annotations

import datetime
import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DAY = datetime.date(2026, 12, 24)


@pytest.fixture(scope="module")
def release():
    spec = importlib.util.spec_from_file_location("release", ROOT / ".ci" / "release.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_was_unreleased_gets_its_version_and_date(release):
    text = "# Changelog\n\n## Unreleased\n\n- One.\n\n## 0.1.0 (2026-11-22)\n\n- Zero.\n"
    assert release.dated(text, "0.2.0", DAY) == (
        "# Changelog\n\n## Unreleased\n\n## 0.2.0 (2026-12-24)\n\n- One.\n\n## 0.1.0 (2026-11-22)\n\n- Zero.\n"
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("## Unreleased\n\n## 0.1.0 (2026-11-22)\n", "nothing under"),
        ("- One.\n", "nothing under"),
        ("## 0.2.0 (2026-01-01)\n", "has 0.2.0 already"),
    ],
)
def test_a_release_without_changes_or_made_before_is_refused(release, text, why):
    with pytest.raises(SystemExit, match=why):
        release.dated(text, "0.2.0", DAY)


def test_a_version_that_is_none_is_refused_in_one_line(release, capsys):
    assert release.main(["make", "next"]) == 2
    assert capsys.readouterr().err == "'next' is no version like 1.2.3 or 1.2.3rc1\n"


def test_the_lock_names_every_dependency_of_the_core_once_and_nothing_of_the_machine():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[^ +]+", line) for line in lines), lines
    names = [line.partition("==")[0] for line in lines]
    assert len(names) == len(set(names))
    assert {"aiohttp", "click", "numpy", "pydantic", "rich", "transformers"} <= set(names)
    assert not {"torch", "mettle-lab", "pip"} & set(names)


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the lock is of Python 3.11")
def test_the_lock_leaves_out_what_is_ours(release):
    assert "mettle" not in release.locked().replace("Mettle", "")
