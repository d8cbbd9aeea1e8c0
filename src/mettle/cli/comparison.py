"""Evaluations beside each other: two with what changed from task to task, more in a table of all pairs.

Parts: `compare_evaluations`. A file to hand over (`--out`) always holds the table, for two as for more.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from mettle.cli.terminal import print_json, print_next, print_table
from mettle.evals.compare import Comparison, TaskChange
from mettle.evals.compare import compare_evaluations as compared
from mettle.evals.estimator import Difference, mean_of
from mettle.evals.reader import EvaluationReader
from mettle.wording import between, format_reward, printable


def compare_evaluations(paths: Sequence[Path], num_tasks: int, out: Path | None, *, is_json: bool) -> None:
    """Say what changed from one evaluation to another, or which of several is best; with `out`, in a file too."""
    readers = [EvaluationReader(path) for path in paths]
    if len(readers) == 2:
        _compare_two(readers[0], readers[1], num_tasks, is_json=is_json)
        if out is None:
            return
    _compare_all(readers, out, is_json=is_json, is_shown=len(readers) != 2)


def _compare_all(readers: Sequence[EvaluationReader], out: Path | None, *, is_json: bool, is_shown: bool) -> None:
    from mettle.evals.export.ranking import HEADS, PAIR_HEADS, pair_rows, standing_rows, write_ranking
    from mettle.evals.ranking import rank_evaluations

    found = rank_evaluations(readers)
    if out is not None:
        write_ranking(found, out)
    if is_json:
        if is_shown:
            print_json(found.to_dict() | ({"path": str(out)} if out is not None else {}))
        return
    if is_shown:
        for warning in found.warnings:
            click.echo(f"note: {printable(warning)}", err=True)
        print_table(HEADS, standing_rows(found), title=f"on the {found.num_tasks} tasks that all have")
        click.echo()
        print_table(PAIR_HEADS, pair_rows(found), title="differences, paired by task")
        click.echo(found.verdict)
    if out is not None:
        click.echo(f"wrote {out}")
    elif is_shown:
        best = found.by_reward[0]
        print_next(f"mettle eval view {best.name}")


def _compare_two(a: EvaluationReader, b: EvaluationReader, num_tasks: int, *, is_json: bool) -> None:
    found = compared(a, b)
    if is_json:
        print_json({"before": a.entry.name, "after": b.entry.name, **found.to_dict()})
        return
    for warning in found.warnings:
        click.echo(f"note: {printable(warning)}", err=True)
    for word, reader in (("A", a), ("B", b)):
        click.echo(
            f"{word}: {printable(reader.entry.env_id)} with {printable(reader.entry.model)}, {reader.entry.name}"
        )
    means = [mean_of([getattr(task, name) for task in found.tasks]) for name in ("reward_before", "reward_after")]
    rows = [("reward", *map(format_reward, means), *_change(found.difference))]
    shares = [mean_of([getattr(task, name) for task in found.tasks]) for name in ("passed_before", "passed_after")]
    rows.append(("passed", *map(format_reward, shares), f"{shares[1] - shares[0]:+.3f}", "", ""))
    rows += [
        (name, format_reward(metric.before), format_reward(metric.after), *_change(metric.difference))
        for name, metric in found.metrics.items()
        if len(found.metrics) > 1
    ]
    print_table(("", "A", "B", "B - A", "95 % interval", "p"), rows, title=f"{len(found.tasks)} tasks in both")
    click.echo(
        f"{found.num_risen} tasks rose, {found.num_fallen} fell, "
        f"{len(found.tasks) - found.num_risen - found.num_fallen} stayed (sign test p = {found.sign_p_value:.3g})"
    )
    _print_flips(found, num_tasks)
    click.echo(_verdict(found.difference))
    if found.lost or found.gained:
        print_next(f"mettle eval view {b.entry.name}")


def _print_flips(found: Comparison, num_tasks: int) -> None:
    for word, tasks in (("gained", found.gained), ("lost", found.lost)):
        if tasks:
            more = f", and {len(tasks) - num_tasks} more" if len(tasks) > num_tasks else ""
            click.echo(f"{word} {len(tasks)}: {', '.join(map(_flip, tasks[:num_tasks]))}{more}")


def _flip(task: TaskChange) -> str:
    return f"{task.example_id} ({task.reward_before:.2f} to {task.reward_after:.2f})"


def _change(difference: Difference) -> tuple[Any, ...]:
    p_value = difference.p_value
    return f"{difference.mean:+.3f}", between(difference.interval), "" if p_value is None else f"{p_value:.2g}"


def _verdict(difference: Difference) -> str:
    if difference.interval is None:
        return "one task does not say how sure the difference is"
    low, high = difference.interval
    if low > 0 or high < 0:
        return f"B is {'better' if low > 0 else 'worse'}: the interval of the difference leaves 0 out"
    return f"no clear difference: anything from {low:+.3f} to {high:+.3f} fits"
