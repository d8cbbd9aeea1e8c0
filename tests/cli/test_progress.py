"""The live display of evaluations: drawn a few times a second on a terminal, lines elsewhere."""

from __future__ import annotations

import asyncio
import io
import sys

import pytest

from mettle.cli import progress as module
from mettle.cli.progress import EvalProgress, line_of
from mettle.clients.prices import Price
from mettle.evals.facts import RolloutFacts
from mettle.evals.tally import Tally


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def tally_of(num_done: int, total: int, clock=None) -> Tally:
    now = iter(range(10**6))
    tally = Tally("words", Price(1.0, 1e6), clock=clock or (lambda: next(now)))
    tally.start(total, [])
    for i in range(num_done):
        facts = RolloutFacts(i, None if i == 0 else 0.5, "provider" if i == 0 else None, input_tokens=0.0)
        facts.output_tokens = 2.0
        tally.add(facts)
    return tally


async def test_a_terminal_sees_one_line_for_each_evaluation(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("TERM", "xterm")
    async with EvalProgress([tally_of(3, 10), tally_of(0, 4)], is_quiet=False):
        pass
    shown = screen.getvalue()
    for word in ("tokens/s", "words", "3/10", "0.5", "$6.00", "0/4"):
        assert word in shown


async def test_ten_thousand_rollouts_are_not_ten_thousand_drawings(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    drawn = []
    monkeypatch.setattr(EvalProgress, "_table", lambda self: drawn.append(1) or "")
    tally = tally_of(0, 10_000)
    async with EvalProgress([tally], is_quiet=False):
        for i in range(10_000):
            tally.add(RolloutFacts(i, 1.0))
    assert len(drawn) <= 3


async def test_a_log_gets_a_line_now_and_then(monkeypatch, capsys):
    monkeypatch.setattr(module, "LINE_EVERY_S", 0.0)
    tally = tally_of(2, 4)
    async with EvalProgress([tally, tally_of(0, 0)], is_quiet=False):
        pass
    async with EvalProgress([tally], is_quiet=True):
        pass
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "words: 2/4 rollouts, reward 0.500, errors 50%, " in lines[0]


async def test_a_log_is_told_that_nothing_happens(monkeypatch, capsys):
    monkeypatch.setattr(module, "LINE_EVERY_S", 0.001)
    monkeypatch.setattr(module, "LINE_AT_LEAST_EVERY_S", 0.002)
    tally = Tally("words")
    tally.start(4, [])
    lines = []
    async with asyncio.timeout(100), EvalProgress([tally], is_quiet=False):
        while len(lines) < 3:  # one for the start, and more though nothing has ended
            await asyncio.sleep(0.01)
            lines += capsys.readouterr().err.splitlines()
    assert "0/4 rollouts" in lines[-1]
    assert "no rollout ended for " in lines[-1]


@pytest.mark.parametrize(
    ("seconds_each", "text"), [(0.1, "10.0 rollouts/s"), (10.0, "6.0 rollouts/min"), (7200.0, "0.5 rollouts/h")]
)
def test_a_line_tells_the_rate_in_a_unit_that_suits_it(seconds_each, text):
    now = [0.0]
    tally = Tally("words", clock=lambda: now[0])
    tally.start(10, [])
    now[0] = seconds_each
    tally.add(RolloutFacts(0, 1.0))
    assert text in line_of(tally)


def test_a_line_leaves_out_what_is_not_known():
    tally = Tally("words")
    tally.start(4, [])
    assert line_of(tally).endswith(" words: 0/4 rollouts, reward -, errors 0%")
