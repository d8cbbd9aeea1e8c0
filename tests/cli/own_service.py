"""A sandbox service of a test's own: where it listens, what is typed to it, and its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mettle.sandbox import SandboxConfig, probe

SOURCE = str(Path(__file__).parents[2] / "src")


@pytest.fixture(scope="module")
def _isolated() -> None:
    if not probe(SandboxConfig()).is_at_least("ns"):
        pytest.skip("this host cannot isolate code")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, _isolated: None) -> Iterator[Path]:
    """A runtime directory, and the end of whatever was started there."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", SOURCE)
    monkeypatch.delenv("METTLE_SANDBOX_URL", raising=False)
    yield tmp_path
    for pid in services(tmp_path):
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 100
        while pid in services(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.05)


def services(home: Path) -> list[int]:
    """Services that listen in this directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:
            continue
        if b"mettle.sandbox.service" in words and str(home).encode() in words:
            found.append(int(path.parent.name))
    return found


def typed(*words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "mettle.cli", "sandbox", *words],
        input=stdin,
        capture_output=True,
        check=False,
        timeout=300,
    )
