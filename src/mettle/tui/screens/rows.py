"""A rollout as a row of a table.

Parts: `columns_of`, `row_of` (the rollouts of a run), `member_columns`, `member_row` (those of one task). Invariant: a
row comes from the figures alone; no conversation is read for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from mettle.evals.facts import RolloutFacts
from mettle.tui.details import tone_of
from mettle.tui.opened import OpenRun
from mettle.tui.record_table import Cell, Column
from mettle.wording import DASH, bar, compact, duration, format_reward

MAX_METRICS = 3


def columns_of(metrics: Sequence[str]) -> list[Column]:
    """The columns of a run's rollouts."""
    return [
        Column("mark", "", 1),
        Column("number", "#", 5, is_right=True, is_sortable=True),
        Column("task", "task", 6, is_right=True, is_sortable=True),
        Column("reward", "reward", 8, is_right=True, is_sortable=True),
        Column("bar", "", 5, rank=1),
        Column("turns", "turns", 7, is_right=True, rank=2, is_sortable=True),
        Column("tokens", "tokens", 8, is_right=True, rank=1, is_sortable=True),
        Column("time", "time", 7, is_right=True, rank=2, is_sortable=True),
        Column("stop", "stopped by", 13, rank=3, is_sortable=True),
        Column("said", "last said", min_width=12),
    ]


def row_of(run: OpenRun, index: int) -> list[Cell]:
    """A row of them."""
    facts = run.facts(index)
    if facts is None:
        return [Cell("")] * 10
    tone = tone_of(facts, run.reader.pass_rule)
    return [
        Cell("\N{BULLET}" if index in run.found else "", "mark"),
        Cell(str(index), "dim"),
        Cell(str(facts.example_id)),
        _reward(facts, tone),
        Cell(_bar(facts, 5), tone),
        Cell(str(facts.num_turns), "dim"),
        Cell(compact(facts.output_tokens)),
        Cell(duration(facts.total_s)),
        Cell(*_stop(facts)),
        Cell(facts.excerpt, "bad" if facts.cause is not None else "dim"),
    ]


def member_columns(metrics: Sequence[str]) -> list[Column]:
    """The columns of one task's rollouts."""
    return [
        Column("number", "#", 6, is_right=True),
        Column("reward", "reward", 8, is_right=True),
        Column("bar", "", 12, rank=1),
        *(
            Column(f"metric {name}", name, min(14, max(7, len(name))), is_right=True, rank=2)
            for name in metrics[:MAX_METRICS]
        ),
        Column("turns", "turns", 6, is_right=True, rank=2),
        Column("tokens", "tokens", 7, is_right=True, rank=1),
        Column("time", "time", 8, is_right=True, rank=1),
        Column("stop", "stopped by", 17, rank=3),
        Column("said", "last said", min_width=14),
    ]


def member_row(run: OpenRun, index: int, metrics: Sequence[str]) -> list[Cell]:
    """A row of them."""
    facts = run.facts(index)
    if facts is None:
        return [Cell("")] * (8 + len(metrics[:MAX_METRICS]))
    tone = tone_of(facts, run.reader.pass_rule)
    return [
        Cell(str(index), "dim"),
        _reward(facts, tone),
        Cell(_bar(facts, 12), tone),
        *(Cell(format_reward(facts.metrics.get(name))) for name in metrics[:MAX_METRICS]),
        Cell(str(facts.num_turns), "dim"),
        Cell(compact(facts.output_tokens)),
        Cell(duration(facts.total_s)),
        Cell(*_stop(facts)),
        Cell(facts.excerpt, "bad" if facts.cause is not None else "dim"),
    ]


def _bar(facts: RolloutFacts, width: int) -> str:
    return "" if facts.reward is None else bar(max(0.0, min(1.0, facts.reward)), width).rstrip()


def _stop(facts: RolloutFacts) -> tuple[str, str]:
    if facts.cause is not None:
        return str(facts.error_type or facts.cause), "bad"
    return str(facts.stop_condition or DASH), "middling" if facts.is_truncated else "dim"


def _reward(facts: RolloutFacts, tone: str) -> Cell:
    return Cell("error", "bad") if facts.reward is None else Cell(format_reward(facts.reward), tone)
