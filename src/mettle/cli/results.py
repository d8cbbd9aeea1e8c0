"""Looking at saved evaluations: which there are, the rollouts of one, one rollout, one exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from mettle.cli.terminal import console, print_json, print_next, print_table
from mettle.evals.entries import EvaluationEntry, evaluations_in, list_evaluations
from mettle.evals.facts import RolloutFacts
from mettle.evals.output import messages_of
from mettle.evals.places import PLACES, is_collection
from mettle.evals.reader import EvaluationReader, evaluation_folder
from mettle.evals.report import plain
from mettle.records.tasks import content_of
from mettle.wording import (
    DASH,
    count,
    duration,
    figure,
    format_interval,
    format_reward,
    num_bytes,
    percent,
    printable,
    share_of,
)


def view_evaluations(num_rows: int, *, is_json: bool, folder: Path | None = None) -> None:
    """List the evaluations saved here, under a folder, or of one run, newest first."""
    if folder is None or is_collection(folder):
        found = [entry for entry in list_evaluations(Path() if folder is None else folder) if entry.kind != "probe"]
    else:
        found = evaluations_in(evaluation_folder(folder))[::-1]
    found = found[:num_rows]
    if is_json:
        print_json([{"path": entry.name, **entry.metadata, **_standing(entry)} for entry in found])
        return
    if not found:
        click.echo(f"no evaluations under {folder}" if folder else f"no evaluations in {', '.join(PLACES)}")
        print_next("mettle eval run ENV -m MODEL")
        return
    columns = ("environment", "model", "kind", "reward", "95 % interval", "failed", "rollouts", "time", "path")
    rows = [
        (
            entry.env_id, entry.model, entry.kind, format_reward(entry.reward), format_interval(entry.interval),
            percent(entry.error_rate or 0.0), progress_of(entry), duration(entry.time_s), entry.problem or entry.name,
        )
        for entry in found
    ]  # fmt: skip
    print_table(columns, rows)
    for entry in found:
        _warn(entry)
    readable = [entry for entry in found if entry.problem is None]
    print_next(f"mettle eval view {readable[0].name}" if readable else "mettle eval run ENV -m MODEL")


def _warn(entry: EvaluationEntry) -> None:
    """A line about a file that could not be read whole."""
    if entry.warning is not None:
        click.echo(f"note: {printable(entry.warning)}", err=True)


def progress_of(entry: EvaluationEntry) -> str:
    """How much of it is there: "130 of 16,000 rollouts, running", "40 rollouts"."""
    done = entry.num_planned if entry.num_done is None else entry.num_done
    if done is None:
        return DASH
    told = share_of(done, entry.num_planned, "rollout")
    return told if entry.is_complete else f"{told}, {entry.state}"


def _standing(entry: EvaluationEntry) -> dict[str, Any]:
    """What a list says of an evaluation beside its metadata."""
    return {
        "kind": entry.kind, "state": entry.state, "reward": entry.reward, "interval": entry.interval,
        "num_rollouts": entry.num_done, "planned_rollouts": entry.num_planned,
        **({"problem": entry.problem} if entry.problem else {}),
        **({"warning": entry.warning} if entry.warning else {}),
    }  # fmt: skip


def view_evaluation(path: Path, num_rows: int, *, is_json: bool) -> None:
    """List the rollouts of one evaluation, in the order in which they finished."""
    reader = EvaluationReader(path)
    entry = reader.entry
    if is_json:
        rollouts = list(reader.rows())
        print_json(
            {
                "path": entry.name,
                **_standing(entry),
                "metadata": reader.metadata,
                "stats": plain(reader.stats()),
                "rollouts": rollouts,
            }
        )
        return
    reward = reader.stats()["reward"]
    told = f"{format_reward(reward.mean)} {format_interval(reward.interval)}".rstrip() if reward else DASH
    much = share_of(len(reader), entry.num_planned, "rollout") + ("" if entry.is_complete else f", {entry.state}")
    head = f"{printable(entry.env_id)} with {printable(entry.model)}: reward {told}, {much}"
    columns = ("#", "task", "reward", "stopped by", "tokens", "answer")
    rows = [
        (index, facts.example_id, format_reward(facts.reward), _stop(facts), _whole(facts.output_tokens), facts.excerpt)
        for index, facts in enumerate(reader.facts[:num_rows])
    ]
    click.echo(head)
    print_table(columns, rows)
    if len(reader) > num_rows:
        click.echo(f"{len(reader) - num_rows} more; -n {len(reader)} shows all")
    _warn(entry)
    if reader.num_broken:
        click.echo(f"note: {reader.path}: {count(reader.num_broken, 'line')} could not be read", err=True)
    print_next(f"mettle eval view {entry.name} -i 0" if len(reader) else f"mettle eval run --resume {reader.path}")


def view_rollout(path: Path, index: int, *, is_json: bool) -> None:
    """Show one rollout: its conversation, its reward and the parts of it, its error."""
    reader = EvaluationReader(path)
    row = reader.row(index)
    if is_json:
        print_json(row)
        return
    screen = console()
    for message in [*messages_of(row.get("prompt")), *messages_of(row.get("completion"))]:
        screen.print(f"[bold]{message.get('role', 'text')}[/bold]")
        screen.print(printable(_said(message)), markup=False)
        screen.print()
    print_table(("", ""), [(name, figure(value)) for name, value in _facts(row, reader.facts[index])])
    if index + 1 < len(reader):
        print_next(f"mettle eval view {reader.entry.name} -i {index + 1}")


def export_evaluation(
    path: Path, output: Path | None, kind: str | None, num_rollouts: int | None, *, is_json: bool
) -> None:
    """Write an evaluation as a page, as a table, or as other programs of the field read it."""
    from mettle.evals.export.page import write_page
    from mettle.evals.export.table import write_csv, write_jsonl, write_parquet
    from mettle.evals.results import publish

    ending = output.suffix.removeprefix(".").lower() if output is not None else ""
    kind = kind or (ending if ending in ("csv", "parquet", "jsonl") else "html")
    reader = EvaluationReader(path)
    chosen = "" if reader.entry.name == str(reader.path) else f"-{reader.eval_id}"
    target = output or reader.path / f"report{chosen}.{kind}"
    if kind == "jsonl" and output is not None and ending:
        write_jsonl(reader, output)
    elif kind == "jsonl":
        # A folder with the metadata too: beside the store where it holds this evaluation alone, or the one -o names.
        target = publish(reader, output or (reader.path / f"results{chosen}" if chosen else reader.path))
    if kind == "html":
        write_page(reader, target, num_rollouts=num_rollouts)
    elif kind == "csv":
        write_csv(reader, target)
    elif kind == "parquet":
        write_parquet(reader, target)
    size = target.stat().st_size
    if is_json:
        print_json({"path": str(target), "format": kind, "bytes": size, "num_rollouts": len(reader)})
        return
    click.echo(f"wrote {target} ({num_bytes(size)}, {len(reader)} rollouts)")
    print_next(f"mettle eval view {reader.entry.name}")


def _facts(row: dict[str, Any], facts: RolloutFacts) -> list[tuple[str, Any]]:
    told: list[tuple[str, Any]] = [("task", facts.example_id), ("reward", facts.reward), *facts.metrics.items()]
    if row.get("answer"):
        told.append(("expected", row["answer"]))
    told += [("stopped by", facts.stop_condition), ("truncated", facts.is_truncated)]
    told += [("tokens", _whole(facts.output_tokens)), ("time", duration(facts.total_s))]
    if facts.cause is not None:
        told.append(("error", f"{facts.error_type} ({facts.cause}): {facts.error_message or ''}"))
    return told


def _said(message: dict[str, Any]) -> str:
    calls = [f"-> {call if isinstance(call, str) else json.dumps(call)}" for call in message.get("tool_calls") or []]
    reasoning, content = message.get("reasoning_content"), content_of(message)
    return "\n".join([*([f"({reasoning})"] if reasoning else []), *([content] if content else []), *calls])


def _stop(facts: RolloutFacts) -> str | None:
    if facts.cause is not None:
        return "error"
    return f"{facts.stop_condition} (cut)" if facts.is_truncated else facts.stop_condition


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
