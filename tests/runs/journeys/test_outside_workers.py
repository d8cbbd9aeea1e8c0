"""A run that workers from outside join while it goes: one honest and killed, one that lies, one that comes late."""

import os
import signal
import time
from pathlib import Path

import pytest
from outside_stories import OutsideStory
from stories import published

from mettle.inference.outside.roster import read_roster

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


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
