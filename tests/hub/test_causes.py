"""Why a run is as it is: ages of what is trained, causes of errors, the graph of waits, idle time, figures by step."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mettle.hub.causes import MAX_BARS, ages_of, causes_of, chains_of, waiting_part
from mettle.hub.models import ShownWait
from mettle.hub.reader import RunReader
from mettle.hub.steps import GatheredRollouts, ScoredRollout, StepFigures
from mettle.storage.run_dir import RunDir


def wait(owner, target, waited_s=1.0):
    return ShownWait(
        owner=owner, edge="e", target=target, awaits=f"{target} does it", since=0.0, waited_s=waited_s, budget_s=9.0,
        is_overdue=False, pid=1,
    )  # fmt: skip


def scored(draw, reward, *, tokens=10, is_truncated=False):
    return ScoredRollout(0.0, draw, reward, tokens, is_truncated)


def test_a_step_counts_passes_by_rollout_and_by_group_and_failures_of_all():
    gathered, figures = GatheredRollouts(), StepFigures(1, 0.0, None, 0, 0.0, 0)
    for rollout in (
        scored(1, 1.0), scored(1, 0.0), scored(2, 0.5, is_truncated=True), scored(2, None, tokens=0), scored(3, 1.0),
    ):  # fmt: skip
        gathered.add(rollout)
    gathered.fill(figures)
    assert (figures.pass_at_1, figures.pass_at_group) == (2 / 4, 2 / 3)
    assert (figures.length_mean, figures.truncated_rate, figures.error_rate) == (40 / 5, 1 / 5, 1 / 5)
    assert figures.reward.num_rollouts == 4


def test_a_step_of_failures_has_no_reward_and_no_pass_rate():
    gathered, figures = GatheredRollouts(), StepFigures(1, 0.0, None, 0, 0.0, 0)
    gathered.add(scored(1, None))
    gathered.fill(figures)
    assert (figures.reward, figures.pass_at_1, figures.pass_at_group, figures.error_rate) == (None, None, None, 1.0)


@given(st.dictionaries(st.integers(0, 40), st.integers(1, 10**9), max_size=12))
def test_the_bars_of_ages_hold_every_token_once(tokens):
    bars = ages_of(tokens)
    assert sum(bar.num_tokens for bar in bars) == sum(tokens.values())
    assert len(bars) <= MAX_BARS
    assert [bar.age for bar in bars] == list(range(len(bars)))
    assert [bar.is_open for bar in bars] == [bar.age == MAX_BARS - 1 and max(tokens) >= MAX_BARS for bar in bars]


def test_waits_are_told_from_whom_nobody_waits_for_to_whom_all_wait_for():
    found = chains_of([wait("orchestrator", "environments"), wait("trainer/rank-0", "orchestrator")])
    assert [[each.owner for each in chain] for chain in found] == [["trainer/rank-0", "orchestrator"]]
    assert found[0][-1].target == "environments"


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.sampled_from("abcde")), max_size=9))
def test_each_wait_stands_in_one_chain_circles_too(edges):
    waits = [wait(owner, target) for owner, target in edges]
    found = chains_of(waits)
    assert sorted(id(each) for chain in found for each in chain) == sorted(map(id, waits))
    for chain in found:
        assert all(one.target == other.owner for one, other in pairwise(chain))


def test_ages_causes_and_idle_time_of_a_run_are_read_as_it_is_written(tmp_path, run_writer):
    writer = run_writer(tmp_path / "run", steps=6, groups=2)
    reader = RunReader(RunDir(tmp_path / "run"))
    for step in range(1, 4):
        writer.train_step(step)
        reader.refresh()
    fresh = RunReader(RunDir(tmp_path / "run"))
    fresh.refresh()
    assert reader.steps.staleness == fresh.steps.staleness
    shipped = writer.ledger.database.value(
        "SELECT sum(num_tokens) FROM rollouts WHERE kind = 'train' AND step IS NOT NULL AND version_min >= 0"
    )
    assert sum(reader.steps.staleness.values()) == shipped
    found = causes_of(reader.steps, reader.metrics, [])
    newest = writer.ledger.database.rows(
        "SELECT name, avg(value) AS v FROM metrics WHERE name LIKE 'time/%' GROUP BY name"
    )
    times = {row["name"]: row["v"] for row in newest}
    assert found.waiting_part == pytest.approx(
        times["time/wait_for_batch_s"]
        / (times["time/step_s"] + times["time/publish_s"] + times["time/wait_for_batch_s"])
    )
    assert waiting_part(reader.metrics) == found.waiting_part
    for each in (reader, fresh):
        each.close()
    writer.ledger.close()


def test_errors_of_one_kind_and_type_are_one_cause_with_the_newest_words(tmp_path, run_writer):
    writer = run_writer(tmp_path / "run", steps=2, groups=2)
    reader = RunReader(RunDir(tmp_path / "run"))
    for kind, named, words in (
        ("sandbox", "Timeout", "first\n words"), ("sandbox", "Timeout", "newest words"), ("provider", "", "HttpError: 500"),
    ):  # fmt: skip
        reader.steps._count_error(kind, named, words)
    assert [(c.kind, c.type, c.num_rollouts, c.newest) for c in causes_of(reader.steps, reader.metrics, []).causes] == [
        ("sandbox", "Timeout", 2, "newest words"), ("provider", "HttpError", 1, "500"),
    ]  # fmt: skip
    reader.close()
    writer.ledger.close()
