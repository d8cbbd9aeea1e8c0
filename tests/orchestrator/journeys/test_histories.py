"""Histories of whole runs in simulated time, each a function of its number: speeds, faults, kills and limits differ.

What the orchestrator promises is checked of each (`test_simulation.py` has the checks); a number that fails fails again.
"""

import random
from collections import Counter

import pytest
from tests.orchestrator.journeys.test_simulation import check_accounts, check_batches, check_evals, config, played

from mettle.orchestrator.simulator import SimulatedWorld

DAILY, NIGHTLY = 60, 4000
CUT_SHORT, THROTTLED = 41, 44
CHUNKS = 6


def history(number):
    """(configuration, world) of a history. The generator is its own: whoever seeds the global one changes nothing."""
    draw = random.Random(f"history {number}")
    max_lag = draw.choice([0, 1, 1, 2])
    max_steps, max_staleness = draw.randint(2, 4), max_lag + draw.choice([0, 0, 1, 2])
    most, fewest = draw.choice([None, 1, 3, 6]), draw.choice([None, 1])
    options = config(
        max_steps=max_steps,
        max_lag=max_lag,
        max_staleness=max_staleness,
        max_inflight_groups=most,
        min_inflight_groups=fewest if max_staleness else None,
        curriculum={"sampler": draw.choice(["standard", "difficulty_pool"])},
        eval={"num_examples": draw.choice([0, 2]), "interval": draw.choice([0, 2])},
        max_empty_batches=1000,
    )
    world = SimulatedWorld(
        seed=number,
        pace_seed=draw.randrange(2**16),
        rollout_s=draw.choice([0.05, 0.5, 2.0]),
        train_s=draw.choice([0.01, 0.5, 2.0]),
        update_s=draw.choice([0.0, 0.05, 1.0]),
        error_rate=draw.choice([0.0, 0.0, 0.2]),
        equal_rate=draw.choice([0.0, 0.3]),
        straggler_rate=draw.choice([0.0, 0.1, 0.3]),
        engine_deaths=tuple(draw.uniform(0, 20) for _ in range(draw.choice([0, 0, 1, 2]))),
        engine_down_s=draw.choice([0.0, 3.0]),
        trainer_deaths=tuple(draw.sample(range(1, 4), draw.choice([0, 0, 1]))),
        refusals=draw.choice([0, 0, 2]),
        kv_groups=draw.choice([None, 1, 2]),
        kills_at_transaction=tuple(draw.randint(1, 60) for _ in range(draw.choice([0, 1, 3]))),
        kills_at=tuple(draw.uniform(0.01, 20) for _ in range(draw.choice([0, 0, 1]))),
    )
    return options, world


def lived(number):
    """Live through a history and check it; returns what happened in it."""
    options, world = history(number)
    simulated, ledger, folder = played(options, world)
    with folder:
        check_accounts(options, simulated, ledger)
        check_batches(options, simulated)
        if options.eval.num_examples:
            check_evals(options, ledger)
        metric = ledger.journal.metric
        happened = Counter(
            {
                "lives": simulated.num_lives - 1,
                "cut short": int(sum(value for _, value in metric("staleness/cut_short"))),
                "throttled": sum(value < options.inflight_groups for _, value in metric("queue/inflight_limit")),
                "trained again": simulated.trainer.num_trainings - options.max_steps,
            }
        )
        ledger.close()
    return happened


def check_histories(numbers, *, must_happen=()):
    total = Counter()
    for number in numbers:
        total += lived(number)
    assert {what for what in must_happen if not total[what]} == set()


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_sixty_histories_a_day_keep_every_promise(chunk):
    check_histories(range(chunk, DAILY, CHUNKS), must_happen=("lives",))


def test_the_histories_have_in_them_what_they_are_for():
    """One in which groups are cut short, one in which the engine runs out of memory."""
    assert lived(CUT_SHORT)["cut short"]
    assert lived(THROTTLED)["throttled"]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("chunk", range(40))
def test_four_thousand_histories_a_night_keep_every_promise(chunk):
    check_histories(range(DAILY + chunk, NIGHTLY, 40), must_happen=("lives", "throttled", "trained again"))
