"""Kill -9 any process of a run at several points: it recovers or is resumed, and the accounts hold.

After every story: each step has one batch, each task that trained did so in one step, none is left in between, a
replayed version has the same bytes as before, and the run reached its last step.
"""

import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from stories import STEPS, Run, check_accounts, published, rolling_out, shipped

from mettle.storage.ledger import Ledger

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500), pytest.mark.usefixtures("forked")]


@dataclass(frozen=True)
class Kill:
    victim: str
    point: Callable[[Ledger], bool]


EACH_ONCE = (
    Kill("inference", rolling_out),
    Kill("orchestrator", shipped(4)),
    Kill("hub", published(4)),
    Kill("trainer", published(6)),
    Kill("supervisor", published(STEPS - 2)),
)
MATRIX = {
    "inference: while rollouts run, between steps, near the end": (rolling_out, published(3), published(STEPS - 2)),
    "orchestrator: while rollouts run, after shipping, near the end": (rolling_out, shipped(4), published(STEPS - 1)),
    "trainer: before its first step, between checkpoints, after one": (shipped(1), published(3), published(6)),
    "supervisor: while rollouts run, between checkpoints, near the end": (
        rolling_out,
        published(5),
        published(STEPS - 1),
    ),
}


def test_each_process_killed_once_costs_no_task_and_trains_none_twice(tmp_path):
    survive(tmp_path, EACH_ONCE, "--deployment.hub", "true")


@pytest.mark.nightly
@pytest.mark.parametrize("name", MATRIX)
def test_a_killed_process_costs_no_task_and_trains_none_twice(tmp_path, name):
    victim = name.partition(":")[0]
    survive(tmp_path, tuple(Kill(victim, point) for point in MATRIX[name]))


def survive(folder: Path, kills: tuple[Kill, ...], *overrides: str) -> None:
    """Play the kills out on one run, and check what it has at its end."""
    run = Run(folder, "--orchestrator.env_workers", "1", *overrides)
    try:
        for kill in kills:
            run.wait_for(kill.point)
            if kill.victim == "hub":
                kill_page(run)
                continue
            run.kill(kill.victim)
            time.sleep(0.3)
        assert run.end() == 0, run.said()
    finally:
        run.close()
    ledger = Ledger(run.run_dir.ledger, is_read_only=True)
    try:
        check_accounts(ledger)
        victims = Counter(kill.victim for kill in kills)
        if "supervisor" not in victims:
            restarts = {p.name: p.restarts for p in ledger.journal.processes()}
            assert {name: restarts[name] for name in victims} == victims
        if "trainer" in victims:
            assert max(batch.trainings for batch in ledger.batches()) > 1, "no step was replayed: the test saw nothing"
    finally:
        ledger.close()


def page_of(run: Run) -> dict[str, int]:
    """Where the page is served, and by which process; nothing while it is not."""
    try:
        found: dict[str, int] = json.loads(run.run_dir.endpoint("hub").read_text())
    except FileNotFoundError:
        return {}
    return found


def kill_page(run: Run) -> None:
    """The page comes back where it was, and the run goes on meanwhile."""
    run.wait_for(lambda _: bool(page_of(run)))
    before = page_of(run)
    run.kill("hub")
    run.wait_for(lambda _: page_of(run).get("pid", before["pid"]) != before["pid"])
    assert page_of(run)["port"] == before["port"]


WARM_CONFIG = """
[warm_up]
enabled = true

[warm_up.sft]
target_reward = 0.1

[orchestrator]
batch_size = 64
group_size = 16
max_staleness = 4
eval = { num_examples = 0 }
sampling = { max_tokens = 8 }
envs = [{ id = "reverse-text" }]
"""


def warming_up(ledger: Ledger) -> bool:
    return len(ledger.journal.metric("sft/loss")) >= 5


@pytest.mark.nightly  # in one process: `test_a_warm_up_that_was_killed_continues_as_if_nothing_had_been`
def test_a_killed_warm_up_starts_over_and_a_killed_page_comes_back_where_it_was(tmp_path):
    run = Run(tmp_path, steps=3, text=WARM_CONFIG)
    try:
        run.wait_for(warming_up)
        run.wait_for(lambda _: bool(page_of(run)))
        before = page_of(run)
        run.kill("sft")
        run.kill("hub")
        run.wait_for(published(1))
        run.wait_for(lambda _: page_of(run).get("pid", before["pid"]) != before["pid"])
        assert page_of(run)["port"] == before["port"]
        assert run.end() == 0, run.said()
    finally:
        run.close()
    ledger = Ledger(run.run_dir.ledger, is_read_only=True)
    try:
        assert ledger.journal.fact("state") == "finished"
        assert ledger.journal.fact("warm_up")["reward"] >= 0.1
        assert {p.name: p.restarts for p in ledger.journal.processes()} == {
            "hub": 1, "sft": 1, "inference": 0, "orchestrator": 0, "trainer": 0,
        }  # fmt: skip
    finally:
        ledger.close()
