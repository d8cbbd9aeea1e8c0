"""The names of the tests are the same in every process: `pytest -n` gives up the whole run when they are not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = """
import gzip, time
import pytest

@pytest.mark.parametrize(("body", "said"), [(gzip.compress(b"x"), repr(object())), (b"y", "plain")])
def test_one(body, said):
    assert body
"""


def collected(where: Path, seed: str, *arguments: str) -> list[str]:
    """The names that a process collects, in order."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=where, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONHASHSEED": seed, "CI": "true"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    names = [line for line in done.stdout.splitlines() if "::" in line]
    assert names
    return names


def test_what_a_clock_or_an_address_decides_is_in_no_name(tmp_path: Path) -> None:
    (tmp_path / "test_example.py").write_text(EXAMPLE)
    (tmp_path / "conftest.py").write_text((ROOT / "conftest.py").read_text())
    names = collected(tmp_path, "1", "test_example.py")
    assert names == ["test_example.py::test_one[body-said]", "test_example.py::test_one[body-plain]"]


@pytest.mark.nightly
@pytest.mark.slow
def test_another_hash_seed_directory_and_time_collect_the_same(tmp_path: Path) -> None:
    """The two come seconds apart, as the processes of one run do."""
    here = [f"--rootdir={ROOT}", f"-c{ROOT / 'pyproject.toml'}"]
    places = [str(ROOT / name) for name in ("tests", "environments", "adapters")]
    first = collected(ROOT, "1", *here, *places)
    second = collected(tmp_path, "2", *here, *places)
    assert second == first
