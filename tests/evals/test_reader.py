"""Reading saved evaluations: lazily, while they are written, and whatever the lines hold."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mettle.errors import UserError
from mettle.evals.facts import facts_of_row
from mettle.evals.reader import EvaluationReader
from mettle.evals.report import stats_of


def test_figures_are_there_at_once_and_rows_on_demand(saved):
    reader = EvaluationReader(saved([[1.0, 0.0], [None, 1.0]]))
    assert len(reader) == 4
    assert [facts.reward for facts in reader.facts] == [1.0, 0.0, None, 1.0]
    assert (reader.facts[2].cause, reader.facts[2].excerpt) == ("provider", "ModelError: status 500")
    assert reader.facts[0].excerpt == "answer 0"
    assert reader.row(3)["example_id"] == 1
    assert [row["example_id"] for row in reader.rows()] == [0, 0, 1, 1]
    with pytest.raises(UserError, match="has rollouts 0 to 3, not 4"):
        reader.row(4)


def test_lines_that_cannot_be_read_are_counted_and_passed_over(saved):
    folder = saved([[1.0], [0.0]])
    file = folder / "results.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + b"\xff\xfe broken\n[1, 2]\n\n" + lines[1] + b'{"example_id": 2, "rew')
    reader = EvaluationReader(folder)
    assert [facts.example_id for facts in reader.facts] == [0, 1]
    assert reader.num_broken == 2
    assert reader.row(1)["example_id"] == 1


def test_a_running_evaluation_is_read_on_from_its_last_whole_line(saved):
    folder = saved([[1.0], [0.0]])
    file = folder / "results.jsonl"
    whole = file.read_bytes()
    first, second = whole.splitlines(keepends=True)
    file.write_bytes(first + second[:20])
    reader = EvaluationReader(folder)
    assert len(reader) == 1
    assert reader.refresh() == 0
    with file.open("ab") as out:
        out.write(second[20:])
    assert reader.refresh() == 1
    assert reader.row(1)["answer"] == "1"
    file.write_bytes(second)  # a resumed evaluation drops what failed
    assert reader.refresh() == 1
    assert [facts.example_id for facts in reader.facts] == [1]


def test_search_finds_what_was_said_whatever_the_case(saved):
    reader = EvaluationReader(saved([[1.0, 0.0], [None, 1.0]]))
    assert list(reader.search("QUESTION 1")) == [2, 3]
    assert list(reader.search("status 500")) == [2]
    assert list(reader.search("question", lambda facts: facts.reward == 0.0)) == [1]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.text(st.sampled_from('aBk\N{KELVIN SIGN}\N{LATIN SMALL LETTER SHARP S}s7\n \\"/')), max_size=4),
    wanted=st.text(st.sampled_from('abks7"\\/'), min_size=1, max_size=3),
    is_ascii=st.booleans(),
)
def test_search_misses_nothing_that_the_lines_write_in_another_way(tmp_path, texts, wanted, is_ascii):
    rows = [{"example_id": n, "reward": 1.0, "prompt": [{"role": "user", "content": t}]} for n, t in enumerate(texts)]
    (tmp_path / "metadata.json").write_text("{}")
    lines = [json.dumps(row, ensure_ascii=is_ascii) + "\n" for row in rows]
    (tmp_path / "results.jsonl").write_text("".join(lines), encoding="utf-8")
    reader = EvaluationReader(tmp_path)
    told = json.dumps(wanted)[1:-1].casefold()
    expected = [n for n, text in enumerate(texts) if told in json.dumps(text, ensure_ascii=False).casefold()]
    assert set(expected) <= set(reader.search(told))


def test_statistics_are_worked_out_from_the_rows(saved):
    cost = {"input_usd": 0.1, "output_usd": 0.2, "total_usd": 0.3}
    stats = EvaluationReader(saved([[1.0, 0.0], [None, 1.0]], metadata={"cost": cost})).stats()
    assert (stats.reward.mean, stats.errors.num, stats.cost.total_usd) == (0.75, 1, 0.3)


def test_a_folder_without_an_evaluation_says_so(tmp_path):
    with pytest.raises(UserError, match=r"it has no metadata.json and results.jsonl"):
        EvaluationReader(tmp_path)


def test_rows_of_older_releases_can_be_read():
    row = {
        "example_id": 3,
        "prompt": "1+1=",
        "completion": "2",
        "reward": 1,
        "generation_ms": 5,
        "timing": {"total_ms": 250.0},
    }
    facts = facts_of_row(row)
    assert (facts.reward, facts.total_s, facts.num_turns, facts.excerpt) == (1.0, 0.25, 1, "2")
    failed = facts_of_row({"example_id": 3, "reward": 0.0, "error": "SandboxError('gone')"})
    assert (failed.reward, failed.cause, failed.error_message) == (None, "rollout", "SandboxError('gone')")
    assert facts_of_row({"reward": 1.0, "error": {"error": "TunnelError"}}).cause == "sandbox"
    assert facts_of_row({"reward": float("nan")}).cause == "unscored"


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
names = ("example_id", "prompt", "completion", "reward", "error", "timing", "metrics", "token_usage", "stop_condition")


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(names, anything)))
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_no_row_is_so_odd_that_its_facts_cannot_be_had(row):
    facts = facts_of_row(json.loads(json.dumps(row)))
    assert facts.reward is None or facts.cause is None
    json.dumps(stats_of([facts, facts], rollouts_per_example=2), allow_nan=False)
