"""Places on a leaderboard: no order where the intervals do not give one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mettle.hub.results.leaderboard import Ranked, leaderboard


def result(model, mean, half, at=1.0):
    return Ranked(f"c{model}", "/x", "ann/x", model, mean, mean - half, mean + half, 10, 5, at, False)


def shown(*results):
    return [(p.result.model, p.shown) for p in leaderboard(results)]


def test_models_whose_intervals_overlap_share_a_place():
    assert shown(result("a", 0.9, 0.02), result("b", 0.5, 0.1), result("c", 0.55, 0.1)) == [
        ("a", "1"), ("c", "2-3"), ("b", "2-3"),
    ]  # fmt: skip


def test_each_model_stands_with_its_newest():
    assert shown(result("a", 0.2, 0.1, at=1), result("a", 0.9, 0.05, at=2)) == [("a", "1")]


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.001, 0.5)), min_size=1, max_size=8))
def test_a_place_never_orders_two_whose_intervals_overlap(values):
    places = leaderboard([result(f"m{i}", mean, half) for i, (mean, half) in enumerate(values)])
    for one in places:
        assert 1 <= one.first <= one.last <= len(places)
        assert one.first == 1 + sum(other.result.ci_low > one.result.ci_high for other in places)
        assert one.last == len(places) - sum(other.result.ci_high < one.result.ci_low for other in places)
        for other in places:
            if one.last < other.first:
                assert one.result.ci_low > other.result.ci_high
