"""Results in a notebook: a table of figures as HTML, and every rollout as a row of a pandas `DataFrame`.

Parts: `notebook_html`, `frame_of`. Invariants: pandas is needed by nobody who does not ask for a frame; what a model
or an environment said is text in the HTML, never markup.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mettle.errors import UserError
from mettle.evals.export.table import figures_and_texts
from mettle.evals.facts import RolloutFacts
from mettle.evals.report import Stats
from mettle.wording import between, duration, format_reward, printable, usd

NUM_ROWS = 10
"""Rollouts that a notebook shows."""
_CELL = "text-align:left;padding:2px 12px 2px 0"


def frame_of(rows: Iterable[Mapping[str, Any]]) -> Any:
    """A `DataFrame` of published rows. Raises: UserError when pandas is not installed."""
    try:
        import pandas
    except ModuleNotFoundError as error:
        raise UserError("a data frame needs pandas, which is not installed: pip install pandas") from error
    return pandas.DataFrame([figures_and_texts(row) for row in rows])


def notebook_html(metadata: Mapping[str, Any], stats: Stats, facts: Sequence[RolloutFacts]) -> str:
    """What was measured, its figures, and the first rollouts."""
    title = f"{metadata.get('env_id')} with {metadata.get('model')}"
    shown = [
        (at, each.example_id, format_reward(each.reward), each.error_type or each.stop_condition or "", each.excerpt)
        for at, each in enumerate(facts[:NUM_ROWS])
    ]
    more = f"<p>{len(facts) - NUM_ROWS} more rollouts; <code>.to_dataframe()</code> has all</p>"
    return (
        f"<div><b>{_text(title)}</b>{_table(('', ''), _figures(metadata, stats))}"
        f"{_table(('#', 'task', 'reward', 'ended by', 'answer'), shown)}{more if len(facts) > NUM_ROWS else ''}</div>"
    )


def _figures(metadata: Mapping[str, Any], stats: Stats) -> list[tuple[str, str]]:
    found = [("reward", stats.reward), *stats.metrics.items()]
    found += [(f"pass@{k}", estimate) for k, estimate in stats.pass_at_k.items()]
    rows = [(name, _with_interval(estimate)) for name, estimate in found]
    rows.append(("rollouts", f"{stats.num_rollouts} of {stats.num_tasks} tasks, {stats.errors.num} failed"))
    if stats.cost:
        rows.append(("cost", usd(stats.cost.total_usd)))
    rows.append(("time", duration(metadata.get("time"))))
    return rows


def _with_interval(estimate: Stats | None) -> str:
    if estimate is None:
        return format_reward(None)
    bounds = f" (95 % interval {between(estimate.interval)})" if estimate.interval else ""
    return f"{format_reward(estimate.mean)}{bounds}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    if not rows:
        return ""
    head = "".join(f'<th style="{_CELL}">{_text(name)}</th>' for name in heads) if any(heads) else ""
    body = "".join("<tr>" + "".join(f'<td style="{_CELL}">{_text(c)}</td>' for c in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _text(value: Any) -> str:
    return html.escape(printable(str(value)))
