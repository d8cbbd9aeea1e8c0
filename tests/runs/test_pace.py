"""How long it will still take, as far as one can know."""

from __future__ import annotations

import pytest

from mettle.runs.pace import StepPace, time_left


def paced(*readings):
    pace = StepPace()
    for now, done in readings:
        pace.read(now, done)
    return pace


def test_the_pace_is_that_of_the_last_half_minute():
    slow_then_quick = [(float(s), s // 10) for s in range(0, 100, 10)] + [(100.0 + s, 10 + s) for s in range(60)]
    assert paced(*slow_then_quick).seconds_left(159.0, 20) == pytest.approx(20, rel=0.1)


@pytest.mark.parametrize("readings", [[], [(0.0, 5)], [(0.0, 5), (1.0, 6)], [(0.0, 5), (9.0, 5)], [(0.0, 5), (9.0, 2)]])
def test_nothing_is_said_before_the_pace_is_known(readings):
    assert paced(*readings).seconds_left(10.0, 100) is None


def test_a_slow_start_is_no_pace():
    assert paced((0.0, 0), (20.0, 1)).seconds_left(20.0, 399) is None
    assert paced((0.0, 0), (20.0, 1), (23.0, 31)).seconds_left(23.0, 100) == 10.0


def test_nothing_is_said_of_what_has_stopped_or_is_done():
    pace = paced((0.0, 1), (10.0, 11))
    assert pace.seconds_left(11.0, 5) == 5.0
    assert pace.seconds_left(60.0, 5) is None
    assert pace.seconds_left(11.0, 0) is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, ""),
        (2.0, "about 5 s left"),
        (48.0, "about 50 s left"),
        (600.0, "about 10 min left"),
        (9000.0, "about 2.5 h left"),
    ],
)
def test_it_is_rounded_as_far_as_it_may_be_wrong(seconds, text):
    assert time_left(seconds) == text
