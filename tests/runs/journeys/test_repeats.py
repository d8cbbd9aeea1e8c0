"""Two runs with one seed in which nothing stale is trained: the same batches, the same weights, whoever dies between;
and a branch of one of them."""

import pytest
from stories import CONFIG, Run, mettle_in, published, rolling_out

from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir

STEPS = 6
SYNCHRONOUS = CONFIG.replace("max_staleness = 4", "max_staleness = 0\nmax_lag = 0")


def accounts(run):
    """For each step the batch and the weights that it made; the rewards of the evaluations."""
    batches = run.read(lambda ledger: [(row.step, row.digest, row.weights_digest) for row in ledger.batches()], [])
    rewards = "SELECT eval_id, example_id, position, reward FROM rollouts WHERE kind = 'eval' ORDER BY 1, 2, 3"
    return batches, run.read(lambda ledger: [tuple(row) for row in ledger.database.rows(rewards)], [])


def check_branch(run_dir, batches):
    ledger = Ledger(run_dir.ledger, is_read_only=True)
    assert [(row.step, row.digest, row.weights_digest) for row in ledger.batches()] == batches
    ledger.close()


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_seed_decides_batches_and_weights_to_the_last_bit_also_across_kills(tmp_path):
    found = []
    for name in ("calm", "killed"):
        (tmp_path / name).mkdir()
        run = Run(tmp_path / name, steps=STEPS, text=SYNCHRONOUS)
        try:
            if name == "killed":
                run.wait_for(published(1), limit_s=300.0)
                run.kill("inference")
                run.wait_for(published(3), limit_s=300.0)
                run.wait_for(rolling_out, limit_s=300.0)
                run.kill("orchestrator")
                run.wait_for(published(5), limit_s=300.0)
                run.kill("supervisor")
            assert run.end(400.0) == 0, run.said()
            found.append(accounts(run))
            if name == "calm":
                branch = mettle_in(tmp_path, "rl", "branch", run.run_dir.path, "--step", 4, "--dir", "branch")
                assert branch.returncode == 0, branch.stderr
                check_branch(RunDir(tmp_path / "branch"), found[0][0])
        finally:
            run.close()
    calm, killed = found
    assert [step for step, _, _ in calm[0]] == list(range(1, STEPS + 1))
    assert calm == killed
