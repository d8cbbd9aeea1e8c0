"""Figures as the pages write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mettle.hub import filters


@pytest.mark.parametrize(
    ("value", "words"),
    [(1.8e-7, "2e-7"), (2e-7, "2e-7"), (9.5e-8, "1e-7"), (0.0, "the last bit"), (None, filters.DASH)],
)
def test_a_bound_is_never_below_the_value(value, words):
    assert filters.bound(value) == words


@given(st.floats(1e-12, 1e3))
def test_bounds_hold(value):
    assert float(filters.bound(value)) >= value * (1 - 1e-9)


def test_heat_grows_as_probability_falls():
    shades = [filters.heat(lp) for lp in (0.0, -0.2, -0.5, -1.0, -2.0, -4.0, -9.0, float("-inf"))]
    assert shades == [0, 1, 2, 3, 4, 5, 6, 6]
    assert filters.probability(float("-inf")) == "0%"
