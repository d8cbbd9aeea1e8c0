"""Kill -9 any process of a run at several points: it recovers or is resumed, and the accounts hold.

After every story: each step has one batch, each task that trained did so in one step, none is left in between, a
replayed version has the same bytes as before, and the run reached its last step.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from stories import STEPS, Run, check_accounts, published, rolling_out, shipped

from mettle.storage.ledger import Ledger

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]


@dataclass(frozen=True)
class Story:
    victim: str
    points: tuple[Callable[[Ledger], bool], ...]


STORIES = {
    "inference: while rollouts run, between steps, near the end": Story(
        "inference", (rolling_out, published(3), published(STEPS - 2))
    ),
    "orchestrator: while rollouts run, after shipping, near the end": Story(
        "orchestrator", (rolling_out, shipped(4), published(STEPS - 1))
    ),
    "trainer: before its first step, between checkpoints, after one": Story(
        "trainer", (shipped(1), published(3), published(6))
    ),
    "supervisor: while rollouts run, between checkpoints, near the end": Story(
        "supervisor", (rolling_out, published(5), published(STEPS - 1))
    ),
}


@pytest.mark.parametrize("name", STORIES)
def test_a_killed_process_costs_no_task_and_trains_none_twice(tmp_path, name):
    story = STORIES[name]
    run = Run(tmp_path)
    try:
        for point in story.points:
            run.wait_for(point)
            run.kill(story.victim)
            time.sleep(0.3)
        assert run.end() == 0, run.said()
    finally:
        run.close()
    ledger = Ledger(run.run_dir.ledger, is_read_only=True)
    try:
        check_accounts(ledger)
        if story.victim != "supervisor":
            restarts = {p.name: p.restarts for p in ledger.journal.processes()}
            assert restarts[story.victim] == len(story.points)
        if story.victim == "trainer":
            assert max(batch.trainings for batch in ledger.batches()) > 1, "no step was replayed: the test saw nothing"
    finally:
        ledger.close()
