"""A run that workers from outside join while it goes: one honest and killed, one that lies, one that comes late."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from stories import CONFIG, Run, environment, published

from mettle.inference.outside.door import DOOR_FILE, read_door
from mettle.inference.outside.roster import OutsideWorker, read_roster
from mettle.runs.outside import invite_worker

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]
OPEN = CONFIG + "\n[inference.outside]\nmax_lag = 3\nlease_s = 5\n"
STEPS = 120
LIAR = Path(__file__).parents[1] / "lying_worker.py"


class OutsideStory:
    """A run with a door, and the workers that a test sends there."""

    def __init__(self, folder: Path) -> None:
        self.run = Run(folder, steps=STEPS, text=OPEN)
        self.folder = folder
        self.workers: list[subprocess.Popen[str]] = []

    def send(self, name: str, *, is_liar: bool = False) -> subprocess.Popen[str]:
        self.run.wait_for(lambda _: (self.run.run_dir.outside / DOOR_FILE).exists())
        token = invite_worker(self.run.run_dir, name).token
        url = str(read_door(self.run.run_dir.outside)["url"])
        command = [str(LIAR), url, token] if is_liar else ["-m", "mettle.cli", "rl", "work", url, "--token", token]
        place = [str(self.folder / name)] if is_liar else ["--dir", str(self.folder / name)]
        self.workers.append(
            subprocess.Popen(
                [sys.executable, *command, *place], env=environment(), text=True, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )  # fmt: skip
        return self.workers[-1]

    def known(self, name: str) -> OutsideWorker | None:
        return next((one for one in read_roster(self.run.run_dir.outside) if one.name == name), None)

    def worked(self, name: str) -> None:
        """Until something of a worker was used."""
        self.run.wait_for(lambda _: (one := self.known(name)) is not None and one.sampled > 0)

    def events(self, kind: str) -> list[str]:
        return self.run.read(lambda ledger: [event.message for event in ledger.journal.events(kind=kind)], [])

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.wait()
            assert worker.stdout is not None
            worker.stdout.close()
        self.run.close()


def test_workers_come_while_the_run_goes_and_one_is_killed(tmp_path: Path) -> None:
    story = OutsideStory(tmp_path)
    try:
        ann = story.send("ann")
        story.worked("ann")
        bob = story.send("bob")
        os.kill(ann.pid, signal.SIGKILL)
        story.worked("bob")
        assert story.run.end() == 0, story.run.said()
        story.run.check_accounts()
        assert bob.wait(120.0) == 0
        assert any("ann" in text for text in story.events("worker_left"))
        assert len(story.events("worker_joined")) >= 2
        assert all(worker.refused == 0 for worker in read_roster(story.run.run_dir.outside))
    finally:
        story.close()


def test_a_liar_is_banned_and_the_run_trains_nothing_of_it(tmp_path: Path) -> None:
    story = OutsideStory(tmp_path)
    try:
        story.run.wait_for(published(1))
        liar = story.send("liar", is_liar=True)
        deadline = time.monotonic() + 400.0
        while liar.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert "is banned: tokens" in liar.communicate()[0]
        assert story.run.end() == 0, story.run.said()
        story.run.check_accounts()
        known = story.known("liar")
        assert known is not None
        assert (known.state, known.sampled) == ("banned", 0)
        assert any("liar" in text and "seed draws" in text for text in story.events("worker_banned"))
    finally:
        story.close()
