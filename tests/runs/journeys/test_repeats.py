"""Two runs with one seed in which nothing stale is trained: the same batches, the same weights, whoever dies between."""

import pytest
from stories import CONFIG, Run, published, rolling_out

STEPS = 6
SYNCHRONOUS = CONFIG.replace("max_staleness = 4", "max_staleness = 0\nmax_lag = 0")


def accounts(run):
    """For each step the batch and the weights that it made; the rewards of the evaluations."""
    batches = run.read(lambda ledger: [(row.step, row.digest, row.weights_digest) for row in ledger.batches()], [])
    rewards = "SELECT eval_id, example_id, position, reward FROM rollouts WHERE kind = 'eval' ORDER BY 1, 2, 3"
    return batches, run.read(lambda ledger: [tuple(row) for row in ledger.database.rows(rewards)], [])


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
        finally:
            run.close()
    calm, killed = found
    assert [step for step, _, _ in calm[0]] == list(range(1, STEPS + 1))
    assert calm == killed
