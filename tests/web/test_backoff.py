"""How long is waited between attempts, and how often."""

from __future__ import annotations

import time
from email.utils import formatdate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mettle.web.backoff import Backoff, Retries, retry_after_s


@given(st.integers(0, 10**6), st.floats(0.001, 10), st.floats(0.001, 1000), st.floats(0, 1))
def test_a_wait_is_never_longer_than_the_limit_nor_cut_by_more_than_the_jitter(attempt, first_s, max_s, jitter):
    backoff = Backoff(first_s, max_s, jitter=jitter)
    longest = min(max_s, first_s * 2.0 ** min(attempt, 64))
    assert longest * (1 - jitter) - 1e-9 <= backoff.wait_s(attempt) <= longest + 1e-9


def test_waits_double_without_jitter():
    assert [Backoff(1.0, 5.0, jitter=0).wait_s(n) for n in range(4)] == [1.0, 2.0, 4.0, 5.0]


def test_what_a_server_asks_for_is_obeyed_up_to_the_limit():
    backoff = Backoff(1.0, 5.0)
    assert [backoff.wait_s(3, asked) for asked in (0.25, -1.0, 99.0)] == [0.25, 0.0, 5.0]


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    async def sleep(self, seconds):
        self.now += seconds


async def test_retries_end_by_their_number():
    clock = Clock()
    retries = Retries(Backoff(1.0, jitter=0), max_retries=2, sleep=clock.sleep, clock=clock)
    assert [await retries.again() for _ in range(3)] == [True, True, False]
    assert clock.now == 3.0


async def test_retries_end_by_their_time_and_a_wait_that_would_pass_it_is_not_begun():
    clock = Clock()
    retries = Retries(Backoff(1.0, jitter=0), limit_s=4.0, sleep=clock.sleep, clock=clock)
    assert [await retries.again() for _ in range(3)] == [True, True, False]
    assert clock.now == 3.0
    assert not await retries.again(asked_s=2.0)


@pytest.mark.parametrize(("header", "seconds"), [("3", 3.0), ("0.5", 0.5), ("", None), (None, None), ("soon", None), ("inf", None)])  # fmt: skip
def test_retry_after_in_seconds(header, seconds):
    assert retry_after_s(header) == seconds


def test_retry_after_as_a_date():
    assert retry_after_s(formatdate(time.time() + 60, usegmt=True)) == pytest.approx(60, abs=2)
