"""Whole runs in simulated time: what the orchestrator promises, whatever the speeds and whoever dies.

The numbers in the names of the helpers are those of the properties in the specification of training.
"""

import asyncio
import random
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mettle.errors import ProviderError, ServiceError, UserError
from mettle.orchestrator.config import OrchestratorConfig
from mettle.orchestrator.simulator import SimulatedEngine, SimulatedWorld, simulate
from mettle.processes.virtual_time import Deadlock, run_virtually
from mettle.storage.evals import read_evals
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir
from mettle.storage.shards import BlockRef, read_group


def config(**overrides):
    values = {
        "max_steps": 5,
        "batch_size": 8,
        "group_size": 4,
        "envs": [{"id": "words"}, {"id": "sums", "ratio": 0.5}],
        "eval": {"num_examples": 3, "interval": 2},
        "poll_s": 0.05,  # each look is an event to play
        "retry": {"max_attempts": 3, "backoff_s": 0.1, "max_failed_groups": 50},
        **overrides,
    }
    return OrchestratorConfig.model_validate(values)


def played(options, world):
    """Play a run; returns (simulated, ledger, run directory), the ledger open for reading."""
    folder = tempfile.TemporaryDirectory()
    simulated = run_virtually(simulate(Path(folder.name), options, world))
    ledger = Ledger(RunDir(Path(folder.name)).ledger)
    return simulated, ledger, folder


def check_accounts(options, simulated, ledger):
    """1, 2, 7: every draw ends once; trained at most once and none lost; one batch a step, all trained."""
    counts = ledger.task_counts()
    assert {name.split(":")[0] for name in counts} <= {"trained", "dropped"}
    shipped = [draw_id for batch in simulated.trainer.batches.values() for draw_id in batch.draw_ids]
    assert len(simulated.trainer.batches) == options.max_steps
    assert counts.get("trained", 0) == len(shipped) == len(set(shipped))
    trained = [draw for batch in simulated.trainer.batches.values() for draw in batch.draw_ids]
    assert max(Counter(trained).values(), default=1) == 1
    assert sorted(simulated.trainer.batches) == list(range(1, options.max_steps + 1))
    assert sum(counts.values()) == ledger.database.value("SELECT max(draw_id) FROM tasks")


def check_batches(options, simulated):
    """3: no token is staler than the bound; whole groups, no more than fit; tokens are those of the draws."""
    for step, batch in simulated.trainer.batches.items():
        assert batch.step == step
        assert 1 <= len(batch.draw_ids) <= options.groups_per_batch
        staleness = (step - 1) - batch.versions[batch.loss_mask]
        assert staleness.max() <= options.max_staleness
        assert staleness.min() >= 0
        assert set(batch.token_ids[batch.loss_mask].tolist()) == set(batch.draw_ids)


def check_evals(options, ledger):
    """17: each evaluation is recorded once and comes from one version."""
    rows = read_evals(ledger.database)
    keys = [(row.kind, row.step, row.env_id) for row in rows]
    assert len(set(keys)) == len(keys)
    for row in rows:
        if row.num_errors < row.num_rollouts:
            assert row.version_min == row.version_max == row.step
    for env in options.eval_envs:
        assert ("baseline", 0, env.name) in keys
        assert ("final", options.max_steps, env.name) in keys


worlds = st.builds(
    SimulatedWorld,
    seed=st.integers(0, 2**16),
    rollout_s=st.sampled_from([0.05, 0.5, 1.0, 5.0]),
    train_s=st.sampled_from([0.01, 0.5, 2.0, 10.0]),
    update_s=st.sampled_from([0.0, 0.05, 1.0]),
    error_rate=st.sampled_from([0.0, 0.1, 0.4]),
    equal_rate=st.sampled_from([0.0, 0.3, 0.6]),
    engine_deaths=st.lists(st.floats(0.0, 40.0), max_size=3).map(tuple),
    engine_down_s=st.sampled_from([0.0, 3.0]),
    straggler_rate=st.sampled_from([0.0, 0.1]),
    trainer_deaths=st.lists(st.integers(1, 4), max_size=2, unique=True).map(tuple),
    refusals=st.integers(0, 2),
    kills_at_transaction=st.lists(st.integers(1, 80), max_size=6).map(tuple),
    kills_at=st.lists(st.floats(0.01, 40.0), max_size=3).map(tuple),
)


lags = st.sampled_from([(0, 0), (0, 1), (1, 1), (1, 2), (2, 4)])
inflights = st.sampled_from([None, 1, 5])
samplers = st.sampled_from(["standard", "difficulty_pool"])


@settings(max_examples=20, deadline=None)
@given(world=worlds, lag=lags, inflight=inflights, sampler=samplers)
def test_no_task_is_lost_or_trained_twice_whatever_dies(world, lag, inflight, sampler):
    check_a_run(world, lag, inflight, sampler)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=120, deadline=None)
@given(world=worlds, lag=lags, inflight=inflights, sampler=samplers)
def test_no_task_is_lost_or_trained_twice_in_many_worlds(world, lag, inflight, sampler):
    check_a_run(world, lag, inflight, sampler)


def check_a_run(world, lag, inflight, sampler):
    options = config(
        max_lag=lag[0],
        max_staleness=lag[1],
        max_inflight_groups=inflight,
        curriculum={"sampler": sampler},
        max_empty_batches=1000,  # by chance alone, a world of many errors and equal rewards has 20 such groups in a row
    )
    simulated, ledger, folder = played(options, world)
    with folder:
        check_accounts(options, simulated, ledger)
        check_batches(options, simulated)
        check_evals(options, ledger)
        ledger.close()


@pytest.mark.parametrize(
    "transaction", [pytest.param(n, marks=() if n % 6 == 1 else pytest.mark.nightly) for n in range(1, 40)]
)
def test_a_kill_before_or_after_any_transaction_is_survived(transaction):
    options = config(max_steps=3)
    world = SimulatedWorld(seed=transaction, equal_rate=0.3, error_rate=0.1, kills_at_transaction=(transaction,))
    simulated, ledger, folder = played(options, world)
    with folder:
        check_accounts(options, simulated, ledger)
        check_batches(options, simulated)
        check_evals(options, ledger)
        ledger.close()


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**16), kills=st.lists(st.floats(0.01, 20.0), max_size=3).map(tuple))
def test_environments_have_algorithms_of_their_own_whose_baselines_survive_kills(seed, kills):
    envs = [{"id": "words", "algorithm": "rae"}, {"id": "sums"}, {"id": "logic", "algorithm": "turn_returns"}]
    options = config(envs=envs, max_steps=3)
    simulated, ledger, folder = played(options, SimulatedWorld(seed=seed, kills_at=kills))
    with folder:
        check_accounts(options, simulated, ledger)
        baseline, found = 0.0, {}
        for _, ref in ledger_blocks(ledger):
            group = read_group(RunDir(Path(folder.name)).rollouts, ref)
            for rollout in group.rollouts:
                if group.draw.env_id == "words":
                    # Groups are written in the order in which they are credited, whoever died in between.
                    assert rollout.credit["advantages"] == pytest.approx(rollout.reward - baseline)
                    baseline = 0.95 * baseline + 0.05 * rollout.reward
            found[group.draw.env_id] = [rollout.credit["advantages"] for rollout in group.rollouts]
        assert ledger.journal.fact("algorithm_state") == {"rae{}": {"baselines": {"words": pytest.approx(baseline)}}}
        assert sum(found["sums"]) == pytest.approx(0.0)
        assert sum(advantages[0] for advantages in found["logic"]) == pytest.approx(0.0)
        ledger.close()


def ledger_blocks(ledger):
    """(draw, block) of every scored training group, in the order of the files."""
    query = "SELECT DISTINCT draw_id, shard, offset, length FROM rollouts WHERE kind = 'train' ORDER BY shard, offset"
    return [
        (row["draw_id"], BlockRef(row["shard"], row["offset"], row["length"])) for row in ledger.database.rows(query)
    ]


def test_tasks_in_flight_at_a_kill_are_the_first_to_be_rolled_out_again():
    options = config(max_steps=6, eval={"num_examples": 0})
    _, ledger, folder = played(options, SimulatedWorld(rollout_s=1.0, kills_at=(0.4,)))
    with folder:
        query = "SELECT attempts, reason FROM tasks ORDER BY draw_id LIMIT ?"
        rows = ledger.database.rows(query, (options.inflight_groups,))
        assert [row["attempts"] for row in rows] == [2] * options.inflight_groups
        assert "run_ended" not in {row["reason"] for row in rows}
        ledger.close()


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**16), rollout_s=st.sampled_from([0.2, 3.0]), train_s=st.sampled_from([0.1, 2.0]))
def test_a_group_never_starts_on_weights_older_than_its_label(seed, rollout_s, train_s):
    """4: the version that a new group sees has been acknowledged by the engine."""
    options = config(max_lag=2, max_staleness=3)
    _, ledger, folder = played(options, SimulatedWorld(seed=seed, rollout_s=rollout_s, train_s=train_s, update_s=1.0))
    with folder:
        rows = ledger.database.rows("SELECT shard, offset, length FROM groups")
        assert rows
        for row in rows:
            group = read_group(Path(folder.name) / "rollouts", BlockRef(*row))
            oldest = min(r.version_range[0] for r in group.rollouts if r.num_completion_tokens)
            assert oldest >= group.version_at_start
        ledger.close()


def test_with_lag_0_every_token_comes_from_the_policy_that_it_trains():
    simulated, ledger, folder = played(config(max_lag=0, max_staleness=0), SimulatedWorld(rollout_s=0.5, train_s=2.0))
    with folder:
        assert all(batch.staleness == (0.0, 0) for batch in simulated.trainer.batches.values())
        ledger.close()


def test_rollouts_go_on_while_the_trainer_steps():
    """One version of lag hides the shorter of the two: 12 steps of 4 s of training are not held up by 3 s rollouts."""
    world = SimulatedWorld(rollout_s=1.0, train_s=4.0)
    options = config(max_steps=12, eval={"num_examples": 0}, envs=[{"id": "words"}])
    simulated, ledger, folder = played(options, world)
    with folder:
        assert simulated.duration_s < 12 * 4.0 * 1.25
        ledger.close()


def test_a_batch_is_not_shipped_before_the_policy_is_close_enough():
    """6: batch s is shipped once v{s-1-max_lag} is acknowledged."""
    options = config(max_lag=1, max_staleness=2, eval={"num_examples": 0})
    _, ledger, folder = played(options, SimulatedWorld(rollout_s=0.01, train_s=5.0))
    with folder:
        acked = {row.weights.version: row.acked_at for row in ledger.versions()}
        for batch in ledger.batches():
            needed = batch.step - 1 - options.max_lag
            assert needed < 0 or acked[needed] <= batch.shipped_at
        ledger.close()


def test_an_engine_that_comes_back_with_old_weights_gets_the_new_ones_first():
    world = SimulatedWorld(engine_deaths=(6.0, 14.0), rollout_s=0.5, train_s=0.5)
    simulated, ledger, folder = played(config(max_steps=8), world)
    with folder:
        kinds = Counter(event.kind for event in ledger.journal.events())
        assert kinds["engine_lost"] + kinds["engine_changed"] >= 1
        assert simulated.engine.version == 8
        check_batches(config(max_steps=8), simulated)
        ledger.close()


@pytest.mark.parametrize("seed", range(4))
def test_stragglers_and_unnoticed_restarts_bring_stale_tokens_which_are_not_trained(seed):
    """The sweep at shipping is what holds the bound: such groups come back, and are dropped."""
    world = SimulatedWorld(
        seed=seed, pace_seed=seed, rollout_s=1.0, train_s=0.2, straggler_rate=0.1,
        engine_deaths=(3.0, 6.0, 9.0, 12.0, 15.0), engine_down_s=0.0,
    )  # fmt: skip
    options = config(max_steps=10, eval={"num_examples": 3, "interval": 3})
    simulated, ledger, folder = played(options, world)
    with folder:
        assert ledger.task_counts()["dropped:stale"] > 0
        check_accounts(options, simulated, ledger)
        check_batches(options, simulated)
        check_evals(options, ledger)
        ledger.close()


def test_equal_rewards_for_ever_end_the_run_and_say_why():
    with pytest.raises(ExceptionGroup) as raised, tempfile.TemporaryDirectory() as folder:
        run_virtually(simulate(Path(folder), config(max_empty_batches=3), SimulatedWorld(equal_rate=1.0)))
    (error,) = flat(raised.value)
    assert isinstance(error, UserError)
    assert "6 groups (3 batches' worth) gave nothing to train on: 100% had equal rewards (mean 0.5)" in str(error)


def test_a_policy_that_solves_its_tasks_ends_the_run_early_and_well():
    options = config(max_empty_batches=3, solved_reward=0.4, eval={"num_examples": 4})
    with tempfile.TemporaryDirectory() as folder:
        run_virtually(simulate(Path(folder), options, SimulatedWorld(equal_rate=1.0)))
        ledger = Ledger(RunDir(Path(folder)).ledger)
        assert ledger.journal.fact("state") == "finished"
        assert [e.kind for e in ledger.journal.events() if e.kind in ("solved", "no_signal")] == ["solved"]
        assert {(row.kind, row.step) for row in read_evals(ledger.database)} == {("baseline", 0), ("final", 0)}
        assert set(ledger.task_counts()) <= {"dropped:zero_advantage", "dropped:run_ended"}
        ledger.close()


def test_an_environment_that_always_fails_ends_the_run_with_its_first_error():
    options = config(retry={"max_failed_groups": 4}, eval={"num_examples": 0})
    with pytest.raises(ExceptionGroup) as raised, tempfile.TemporaryDirectory() as folder:
        run_virtually(simulate(Path(folder), options, SimulatedWorld(error_rate=1.0)))
    (error,) = flat(raised.value)
    assert isinstance(error, UserError)
    assert "failed every rollout of 4 groups in a row; the first error was environment: the tool broke" in str(error)


def test_tasks_do_not_pile_up_without_end_while_every_request_is_refused_at_once(monkeypatch):
    """An engine that says that it is well, and is not, for 3 s: as one does whose replicas have just been lost."""
    sample, refused = SimulatedEngine.sample, []

    async def sample_later(engine, count, pause_s, share=None):
        now = asyncio.get_running_loop().time()
        if now < 3.0 and len(refused) < 5000:  # the time would never pass
            refused.append(now)
            raise ProviderError("no replica can take the request now")
        return await sample(engine, count, pause_s, share)

    monkeypatch.setattr(SimulatedEngine, "sample", sample_later)
    options = config(max_inflight_groups=4, eval={"num_examples": 0}, max_empty_batches=1000)
    simulated, ledger, folder = played(options, SimulatedWorld())
    with folder:
        assert 0 < len(refused) < 2000
        check_accounts(options, simulated, ledger)
        ledger.close()


def test_an_update_refused_again_and_again_ends_the_run():
    with pytest.raises(ExceptionGroup) as raised, tempfile.TemporaryDirectory() as folder:
        run_virtually(simulate(Path(folder), config(), SimulatedWorld(refusals=9)))
    (error,) = flat(raised.value)
    assert isinstance(error, ServiceError)
    assert "the canary of v0 does not match" in str(error)
    assert "refused 3 times" in str(error)


def test_an_engine_that_stays_away_is_a_stall_that_names_the_wait():
    options = config(budgets={"inference_s": 20.0})
    world = SimulatedWorld(engine_deaths=(0.5,), engine_down_s=1e9)
    with pytest.raises(ExceptionGroup) as raised, tempfile.TemporaryDirectory() as folder:
        run_virtually(simulate(Path(folder), options, world))
    (error,) = flat(raised.value)
    assert isinstance(error, ServiceError)
    assert "stalled: orchestrator/updater waited 20 s on inference for: engine answers /health" in str(error)
    assert "orchestrator waits on rollouts" in str(error)


def test_a_trainer_that_never_publishes_is_a_stall_that_names_the_wait():
    options = config(budgets={"weights_s": 30.0}, eval={"num_examples": 0})
    with pytest.raises(ExceptionGroup) as raised, tempfile.TemporaryDirectory() as folder:
        run_virtually(simulate(Path(folder), options, SimulatedWorld(train_s=1e9)))
    (error,) = flat(raised.value)
    assert isinstance(error, ServiceError)
    assert "orchestrator waited 30 s on weights for: trainer publishes v1" in str(error)


def test_the_simulator_reports_a_run_that_does_not_end():
    options = config(budgets={"weights_s": 1e6}, eval={"num_examples": 0})
    with pytest.raises(Deadlock, match="trainer publishes v1"), tempfile.TemporaryDirectory() as folder:
        run_virtually(simulate(Path(folder), options, SimulatedWorld(train_s=1e9, limit_s=100.0)))


def flat(error):
    """The leaves of nested exception groups."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in flat(inner)]
    return [error]


def shipped(options, world):
    """The digests of a run's batches by step, and what its evaluations found."""
    simulated, ledger, folder = played(options, world)
    with folder:
        check_accounts(options, simulated, ledger)
        digests = {row.step: row.digest for row in ledger.batches()}
        means = {(row.kind, row.step, row.env_id): row.mean for row in read_evals(ledger.database)}
        ledger.close()
    return digests, means


@pytest.mark.parametrize("number", [*range(4), *(pytest.param(n, marks=pytest.mark.nightly) for n in range(4, 80))])
def test_with_nothing_stale_the_seed_decides_the_batches_whatever_the_speeds_and_whoever_dies(number):
    rng = random.Random(number)
    options = config(
        max_lag=0, max_staleness=0, max_inflight_groups=rng.choice([None, 1, 5]), batch_size=16,
        curriculum={"sampler": rng.choice(["standard", "difficulty_pool"])}, max_empty_batches=1000,
    )  # fmt: skip
    luck = {"seed": number, "error_rate": rng.choice([0.0, 0.3]), "equal_rate": rng.choice([0.0, 0.5])}
    wild = SimulatedWorld(
        **luck, pace_seed=number + 1, rollout_s=rng.choice([0.05, 1.0, 5.0]), train_s=rng.choice([0.01, 2.0]),
        straggler_rate=0.1, engine_down_s=rng.choice([0.0, 3.0]),
        kills_at=tuple(rng.uniform(0.0, 30.0) for _ in range(rng.randrange(3))),
        kills_at_transaction=tuple(rng.randrange(1, 60) for _ in range(rng.randrange(3))),
        engine_deaths=tuple(rng.uniform(0.0, 30.0) for _ in range(rng.randrange(3))),
        trainer_deaths=tuple(range(1, 1 + rng.randrange(3))),
    )  # fmt: skip
    assert shipped(options, SimulatedWorld(**luck)) == shipped(options, wild)


def test_another_seed_gives_other_batches():
    options = config(max_lag=0, max_staleness=0, max_steps=2)
    other = options.model_copy(update={"seed": options.seed + 1})
    (ours, our_means), (theirs, their_means) = shipped(options, SimulatedWorld()), shipped(other, SimulatedWorld())
    assert set(ours.values()).isdisjoint(theirs.values())
    assert our_means != their_means


@pytest.mark.parametrize(("seq_len", "share"), [(2048, 0.0), (3, 1.0)])
def test_ends_that_do_not_train_are_told_once(seq_len, share):
    simulated, ledger, folder = played(config(seq_len=seq_len), SimulatedWorld())
    with folder:
        assert set(dict(ledger.journal.metric("rollouts/too_long_rate")).values()) == {share}
        told = ledger.journal.events(kind="too_long")
        assert [event.message.partition(":")[0] for event in told] == [
            "100% of the rollouts of step 1 are longer than orchestrator.seq_len (3), and their ends don't train"
        ] * (share > 0)
        assert all((batch.sequence_lengths <= seq_len).all() for batch in simulated.trainer.batches.values())
        ledger.close()
