"""Several evaluations beside each other: on the tasks that all have, with differences that know how many they are."""

from __future__ import annotations

import json

import pytest

from mettle.errors import UserError
from mettle.evals.export.ranking import ranking_markdown, ranking_page, write_ranking
from mettle.evals.ranking import rank_evaluations
from mettle.evals.reader import EvaluationReader


@pytest.fixture
def readers(saved):
    """Twelve tasks: a fails all, b half of them, c none; c has two more that are hard."""
    low = saved([[0.0, 0.0]] * 12, "a", {"model": "<low>"})
    half = saved([[0.0, 1.0], [1.0, 0.0]] * 6, "b")
    high = saved([[1.0, 1.0]] * 12 + [[0.0, 0.0]] * 2, "c", {"env_id": "toy|2"})
    return [EvaluationReader(path) for path in (low, half, high)]


def test_means_are_over_the_tasks_that_all_have(readers):
    found = rank_evaluations(readers)
    assert found.num_tasks == 12
    assert [each.reward.mean for each in found.standings] == [0.0, 0.5, 1.0]
    assert all(each.reward.interval is not None for each in found.standings)
    assert [each.num_scored for each in found.standings] == [24, 24, 28]
    assert [(pair.before, pair.after, pair.difference.mean) for pair in found.pairs] == [
        ("A", "B", 0.5), ("A", "C", 1.0), ("B", "C", 0.5),
    ]  # fmt: skip
    assert found.verdict == "C is best: its difference to each other one is no luck"
    assert any("'toy' and 'toy|2'" in told for told in found.warnings)


def test_p_values_allow_for_the_number_of_pairs(readers):
    for pair in rank_evaluations(readers).pairs:
        assert pair.p_holm is not None
        assert pair.difference.p_value <= pair.p_holm <= min(1.0, 3 * pair.difference.p_value)


def test_equal_ones_are_not_told_apart(saved):
    paths = [saved([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], name) for name in "abc"]
    found = rank_evaluations([EvaluationReader(path) for path in paths])
    assert found.verdict == "A is highest, and B, C may be as good: the difference could be luck"


@pytest.mark.parametrize("ending", ["html", "md", "json"])
def test_one_file_holds_all_of_it(readers, tmp_path, ending):
    path = tmp_path / f"report.{ending}"
    found = rank_evaluations(readers)
    write_ranking(found, path)
    text = path.read_text()
    assert "1.000" in text or json.loads(text)["evaluations"][2]["reward"]["mean"] == 1.0
    assert found.verdict[1:] in text
    assert "<low>" not in text or ending == "json"


def test_the_page_and_the_markdown_hold_text_and_no_markup(readers):
    found = rank_evaluations(readers)
    assert "&lt;low&gt;" in ranking_page(found)
    assert "<script" not in ranking_page(found)
    assert "toy\\|2" in ranking_markdown(found)
    assert ranking_markdown(found).count("| C - B |") == 1


def test_what_cannot_be_compared_says_why(readers, saved, tmp_path):
    with pytest.raises(UserError, match="1 evaluations were named; 2 to 26"):
        rank_evaluations(readers[:1])
    with pytest.raises(UserError, match=r"ends in none of \.html, \.md, \.json"):
        write_ranking(rank_evaluations(readers), tmp_path / "report.pdf")
    other = EvaluationReader(saved([[1.0]], "d", {"env_id": "other"}))
    other.facts[0].example_id = "x"
    with pytest.raises(UserError, match="no scored task in common"):
        rank_evaluations([*readers, other])
