"""How values read: the same everywhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mettle import wording


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "$0.00"), (0.012345, "$0.0123"), (0.0200, "$0.02"), (12.5, "$12.50"), (1234.5, "$1,234.50")],
)
def test_money_has_as_many_digits_as_it_needs(value, text):
    assert wording.usd(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"), (0, "0.0 s"), (0.04, "40 ms"), (3.21, "3.2 s"), (59.4, "59 s"), (59.6, "1 min 00 s"),
        (192, "3 min 12 s"), (7500, "2 h 05 min"), (3 * 86400 + 4 * 3600, "3 d 4 h"),
    ],
)  # fmt: skip
def test_a_duration_has_the_two_largest_units(seconds, text):
    assert wording.duration(seconds) == text


def test_bytes_counts_and_shares():
    assert [wording.num_bytes(n) for n in (None, 12, 1536, 2**21, 5 * 2**40)] == [
        "-",
        "12 B",
        "1.5 KiB",
        "2.0 MiB",
        "5.0 TiB",
    ]
    assert [wording.compact(n) for n in (None, 12, 1804, 999_600, 2.5e9)] == ["-", "12", "1.8k", "1000k", "2.5G"]
    assert wording.share_of(130, 16_000, "rollout") == "130 of 16,000 rollouts"
    assert wording.share_of(1, 1, "rollout") == "1 rollout"
    assert wording.share_of(40, None, "rollout") == "40 rollouts"


def test_a_reward_and_its_interval_read_the_same_everywhere():
    assert [wording.format_reward(value) for value in (None, 0.5, -1.0, 123456.0)] == [
        "-",
        "0.500",
        "-1.000",
        "1.235e+05",
    ]
    assert wording.format_interval((0.0126, 0.98)) == "[0.013, 0.980]"
    assert wording.format_interval(None) == wording.format_interval((None, None)) == ""


@given(st.lists(st.floats(-5, 5), max_size=200), st.integers(1, 60))
def test_a_sparkline_fits_its_width(values, width):
    assert len(wording.sparkline(values, width)) <= width


@given(st.text())
def test_printable_text_drives_no_terminal(text):
    drawn = wording.printable(text)
    assert all(
        char == "\n" or char.isprintable() or char == "\N{REPLACEMENT CHARACTER}" for char in drawn if ord(char) < 0xA0
    )
    assert wording.printable("\x1b[2J\rab") == "\u241b[2J\u240dab"
