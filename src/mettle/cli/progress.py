"""How far running evaluations are: a live table on a terminal, a line now and then elsewhere.

Parts: `EvalProgress`. Invariants: it is drawn a few times a second, however many rollouts end in between; a log gets a
line at least once a minute, also while no rollout ends, so that whoever reads it can tell slow from dead.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import click

from mettle.evals.tally import Tally
from mettle.wording import duration, format_reward, printable, usd

DRAW_EVERY_S = 0.25
LINE_EVERY_S = 5.0
LINE_AT_LEAST_EVERY_S = 60.0
"""Lines come every 5 seconds at first, and ever more rarely, down to this."""
LINES_GROW = 1.5
BAR_WIDTH = 24


class EvalProgress:
    """Shows `tallies` on standard error while the block runs; quiet shows nothing."""

    def __init__(self, tallies: Sequence[Tally], *, is_quiet: bool, is_plain: bool = False) -> None:
        self._tallies = tallies
        self._is_quiet = is_quiet
        self._is_live = not is_quiet and not is_plain and sys.stderr.isatty()
        self._live: Any = None
        self._ticker: asyncio.Task[None] | None = None
        self._shown: dict[int, int] = {}

    async def __aenter__(self) -> EvalProgress:
        if self._is_live:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(self._table(), console=Console(stderr=True), auto_refresh=False)
            self._live.start()
        if not self._is_quiet:
            self._ticker = asyncio.create_task(self._tick())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        self._draw()
        if self._live is not None:
            self._live.stop()

    async def _tick(self) -> None:
        pause_s = DRAW_EVERY_S if self._is_live else LINE_EVERY_S
        while True:
            await asyncio.sleep(pause_s)
            self._draw(is_due=pause_s >= LINE_AT_LEAST_EVERY_S)
            if not self._is_live:
                pause_s = min(LINE_AT_LEAST_EVERY_S, pause_s * LINES_GROW)

    def _draw(self, *, is_due: bool = False) -> None:
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
        elif not self._is_quiet:
            for number, tally in enumerate(self._tallies):
                is_new = self._shown.get(number) != tally.num_done
                if tally.total and (is_new or (is_due and not tally.is_over)):
                    self._shown[number] = tally.num_done
                    click.echo(line_of(tally), err=True)

    def _table(self) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="dim")
        for name in ("", "", "done", "reward", "errors", "tokens/s", "cost", "left"):
            table.add_column(name, justify="left" if not name else "right", no_wrap=True)
        for tally in self._tallies:
            bar = ProgressBar(total=tally.total or 1, completed=tally.num_done, width=BAR_WIDTH)
            errors = Text(str(tally.num_errors), style="red" if tally.num_errors else "")
            cells = (f"{tally.num_done}/{tally.total or '?'}", format_reward(tally.avg_reward), errors, *_pace(tally))
            table.add_row(Text(printable(tally.title)), bar, *cells)
        return table


def line_of(tally: Tally) -> str:
    """One line for a log."""
    pace, cost, left = _pace(tally)
    parts = [f"{tally.num_done}/{tally.total} rollouts", f"reward {format_reward(tally.avg_reward)}"]
    parts.append(f"errors {tally.num_errors / max(1, tally.num_done):.0%}")
    parts += [_rate(tally.rollouts_per_s)] if tally.rollouts_per_s else []
    parts += [f"{pace} tokens/s"] if pace else []
    parts += [cost] if cost else []
    parts += [f"{left} left"] if left else []
    quiet_s = tally.quiet_s
    if not tally.is_over and quiet_s >= LINE_AT_LEAST_EVERY_S:
        parts.append(f"no rollout ended for {duration(quiet_s)}")
    return f"{time.strftime('%H:%M:%S')} {printable(tally.title)}: {', '.join(parts)}"


def _rate(rollouts_per_s: float) -> str:
    """Rollouts in a unit of time in which there is at least one, or an hour."""
    for unit, unit_s in (("s", 1), ("min", 60), ("h", 3600)):
        if rollouts_per_s * unit_s >= 1 or unit == "h":
            return f"{rollouts_per_s * unit_s:,.1f} rollouts/{unit}"
    raise AssertionError("an hour is the last unit")


def _pace(tally: Tally) -> tuple[str, str, str]:
    rate = tally.tokens_per_s
    is_running = not tally.is_over and tally.num_done < tally.total
    left = duration(float(math.ceil(tally.eta_s))) if is_running and tally.eta_s is not None else ""
    return (f"{rate:,.0f}" if rate else "", usd(tally.cost_usd) if tally.cost_usd is not None else "", left)
