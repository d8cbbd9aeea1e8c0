"""A disk that is really full: a run ends with one line, and goes on when there is space."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from standstill import ENDLESS, LIMIT_S, note
from stories import Run, environment

from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]


class SmallDisk:
    """A tmpfs in a mount namespace of its own, which a process holds open. Its size changes while it is in use."""

    def __init__(self, folder: Path, size: str) -> None:
        self._place = folder / "disk"
        self._place.mkdir()
        script = f'mount -t tmpfs -o size={size} tmpfs "{self._place}" && echo mounted && exec sleep 1000'
        self._holder = subprocess.Popen(
            ["unshare", "-rm", "sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "mounted\n":
            _, said = self._holder.communicate()
            pytest.skip(f"this host mounts nothing in a user namespace: {said.strip()}")
        enter = ["nsenter", "-t", str(self._holder.pid), "-U", "-m", "--preserve-credentials"]
        self.prefix = (*enter, f"--wd={Path.cwd()}") if os.getuid() else ("nsenter", "-t", str(self._holder.pid), "-m")
        self.inside = self._place
        self.seen = Path(f"/proc/{self._holder.pid}/root") / self._place.relative_to("/")

    def resize(self, size: str) -> None:
        subprocess.run(
            [*self.prefix, "mount", "-t", "tmpfs", "-o", f"remount,size={size}", "tmpfs", str(self.inside)], check=True
        )

    def close(self) -> None:
        self._holder.kill()
        self._holder.communicate()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    if shutil.which("unshare") is None or shutil.which("nsenter") is None:
        pytest.skip("a small disk needs unshare and nsenter (util-linux)")
    made = SmallDisk(tmp_path, "400m")
    yield made
    made.close()


def test_a_disk_with_too_little_space_is_refused_at_the_start(disk, config):
    disk.resize("4m")
    command = [
        *disk.prefix,
        sys.executable,
        "-m",
        "mettle.cli",
        "rl",
        "run",
        str(config),
        "--dir",
        str(disk.inside / "r"),
    ]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "only 4 MiB are free" in done.stderr
    assert not (disk.seen / "r").exists()


@pytest.mark.slow
@pytest.mark.nightly  # in one process: what meets a full disk in `storage`, `trainer`, and `runs/test_supervisor.py`
@pytest.mark.parametrize("size", ["3m", "7m", "12m"])
def test_a_full_disk_ends_a_run_with_one_line_and_nothing_lost(disk, tmp_path, size):
    run = Run(tmp_path, prefix=disk.prefix, at=disk.inside)
    try:
        # SQLite follows the link from outside, out of the namespace again; so the ledger is read from a copy, later.
        while not (disk.seen / "run" / "supervisor.lock").exists():
            assert run.process.poll() is None, run.said()
            time.sleep(0.05)
        disk.resize(size)
        assert run.end() == 2, run.said()
        assert "no space left" in run.complaint()
        assert "free some space" in run.complaint()
        disk.resize("400m")
        run.resume()
        assert run.end() == 0, run.said()
        shutil.copytree(disk.seen / "run", tmp_path / "copy", symlinks=True)
        run.check_accounts(RunDir(tmp_path / "copy"))
    finally:
        run.close()


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_disk_that_fills_under_a_run_is_named_and_the_run_goes_on_when_there_is_room(disk, tmp_path):
    run = Run(tmp_path, steps=ENDLESS, prefix=disk.prefix, at=disk.inside)
    try:
        while "training: step" not in run.said():
            assert run.process.poll() is None, run.said()
            time.sleep(0.1)
        filler = disk.seen / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(2**16))
        filled = time.monotonic()
        while "MiB are free at" not in run.said() and "no space left" not in run.said():
            assert time.monotonic() - filled < LIMIT_S, run.said()
            time.sleep(0.1)
        named_s = time.monotonic() - filled
        assert run.end() == 2, run.said()
        note("full disk", {"terminal": named_s, "goes_on_s": time.monotonic() - filled})
        assert "no space left" in run.complaint()
        filler.unlink()
        shutil.copytree(disk.seen / "run", tmp_path / "copy", symlinks=True)
        ledger = Ledger(RunDir(tmp_path / "copy").ledger, is_read_only=True)
        assert {"disk_low", "failed"} & {event.kind for event in ledger.journal.events()}
        assert "no space left" in ledger.journal.fact("failure")
        ledger.close()
        run.resume()
        while run.said().count("training: step") < 2:
            assert run.process.poll() is None, run.said()
            time.sleep(0.1)
    finally:
        run.close()
