"""Looking at saved evaluations: which there are, the rollouts of one, one rollout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from mettle.cli.terminal import console, figure, print_json, print_next, print_table, printable, seconds
from mettle.errors import UserError

RESULTS, METADATA = "results.jsonl", "metadata.json"
EXCERPT = 60


def view_evaluations(num_rows: int, *, is_json: bool) -> None:
    """List the evaluations saved here, newest first."""
    folders = sorted(find_evaluations(Path()), key=lambda folder: (folder / METADATA).stat().st_mtime, reverse=True)
    found = [(folder, _metadata(folder)) for folder in folders[:num_rows]]
    if is_json:
        print_json([{"path": str(folder), **metadata} for folder, metadata in found])
        return
    if not found:
        click.echo("no evaluations in outputs/evals or environments/*/outputs/evals")
        print_next("mettle eval run ENV -m MODEL")
        return
    columns = ("environment", "model", "reward", "failed", "tasks", "rollouts each", "time", "path")
    rows = [
        (
            m.get("env_id"), m.get("model"), m.get("avg_reward"), f"{m.get('avg_error') or 0:.0%}",
            m.get("num_examples"), m.get("rollouts_per_example"), seconds(_time(m)), str(folder),
        )
        for folder, m in found
    ]  # fmt: skip
    print_table(columns, rows)
    print_next(f"mettle eval view {found[0][0]}")


def view_evaluation(path: Path, num_rows: int, *, is_json: bool) -> None:
    """List the rollouts of one evaluation, in the order in which they finished."""
    folder = evaluation_folder(path)
    metadata, rollouts = _metadata(folder), read_rollouts(folder)
    if is_json:
        print_json({"path": str(folder), "metadata": metadata, "rollouts": rollouts})
        return
    head = f"{metadata.get('env_id')} with {metadata.get('model')}: reward {figure(metadata.get('avg_reward'))}"
    columns = ("#", "task", "reward", "stopped by", "tokens", "answer")
    rows = [
        (index, row.get("example_id"), row.get("reward"), _stop(row), _tokens(row), excerpt(row))
        for index, row in enumerate(rollouts[:num_rows])
    ]
    print_table(columns, rows, title=head)
    if len(rollouts) > num_rows:
        click.echo(f"{len(rollouts) - num_rows} more; -n {len(rollouts)} shows all")
    print_next(f"mettle eval view {folder} -i 0")


def view_rollout(path: Path, index: int, *, is_json: bool) -> None:
    """Show one rollout: its conversation, its reward and the parts of it, its error."""
    folder = evaluation_folder(path)
    rollouts = read_rollouts(folder)
    if index >= len(rollouts):
        raise UserError(f"{folder} has rollouts 0 to {len(rollouts) - 1}, not {index}")
    row = rollouts[index]
    if is_json:
        print_json(row)
        return
    screen = console()
    for message in [*_messages(row.get("prompt")), *_messages(row.get("completion"))]:
        screen.print(f"[bold]{message.get('role', 'text')}[/bold]")
        screen.print(printable(_content(message)), markup=False)
        screen.print()
    facts: list[tuple[str, Any]] = [("task", row.get("example_id")), ("reward", row.get("reward"))]
    facts += list((row.get("metrics") or {}).items())
    if row.get("answer"):
        facts.append(("expected", row["answer"]))
    facts += [("stopped by", row.get("stop_condition")), ("truncated", row.get("is_truncated"))]
    facts += [("tokens", _tokens(row)), ("time", seconds((row.get("timing") or {}).get("total")))]
    if row.get("error"):
        facts.append(("error", f"{row['error'].get('error')}: {row['error'].get('message', '')}"))
    print_table(("", ""), [(name, figure(value)) for name, value in facts])
    if index + 1 < len(rollouts):
        print_next(f"mettle eval view {folder} -i {index + 1}")


def find_evaluations(root: Path) -> list[Path]:
    """Folders with results under `outputs/evals`, here and beside each environment."""
    bases = [root / "outputs" / "evals", *sorted(root.glob("environments/*/outputs/evals"))]
    return [file.parent for base in bases for file in sorted(base.glob(f"*/*/{METADATA}"))]


def evaluation_folder(path: Path) -> Path:
    """The evaluation that a path means: its folder, or one of its files.

    Raises: UserError when there is none.
    """
    folder = path.parent if path.name in (RESULTS, METADATA) else path
    if not (folder / METADATA).exists() or not (folder / RESULTS).exists():
        raise UserError(f"no evaluation in {path}: it has no {METADATA} and {RESULTS}; `mettle eval view` lists them")
    return folder


def read_rollouts(folder: Path) -> list[dict[str, Any]]:
    """The rows that can be read; a last line that a kill cut short is passed over."""
    rows: list[dict[str, Any]] = []
    with (folder / RESULTS).open(encoding="utf-8") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                rows.append(row)
    return rows


def excerpt(row: dict[str, Any]) -> str:
    """The error, or the beginning of the last thing the model said."""
    error = row.get("error")
    if error:
        text = f"{error.get('error')}: {error.get('message', '')}" if isinstance(error, dict) else str(error)
    else:
        said = [m for m in _messages(row.get("completion")) if m.get("role") in ("assistant", "text")]
        text = _content(said[-1]) if said else ""
    text = " ".join(text.split())
    return text if len(text) <= EXCERPT else text[: EXCERPT - 3] + "..."


def _metadata(folder: Path) -> dict[str, Any]:
    try:
        metadata = json.loads((folder / METADATA).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / METADATA} cannot be read: {error}") from error
    if not isinstance(metadata, dict):
        raise UserError(f"{folder / METADATA} is not a JSON object")
    return metadata


def _time(metadata: dict[str, Any]) -> float | None:
    """Seconds; older files have milliseconds under another name."""
    if metadata.get("time") is not None:
        return float(metadata["time"])
    return float(metadata["time_ms"]) / 1000 if metadata.get("time_ms") is not None else None


def _messages(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, str):
        return [{"role": "text", "content": value}]
    return [message for message in value or [] if isinstance(message, dict)]


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        parts = [p.get("text") or f"[{p.get('type')}]" if isinstance(p, dict) else str(p) for p in content]
        content = " ".join(parts)
    calls = [f"-> {call if isinstance(call, str) else json.dumps(call)}" for call in message.get("tool_calls") or []]
    reasoning = message.get("reasoning_content")
    return "\n".join([*([f"({reasoning})"] if reasoning else []), *([str(content)] if content else []), *calls])


def _stop(row: dict[str, Any]) -> str | None:
    if row.get("error"):
        return "error"
    stop = row.get("stop_condition")
    return f"{stop} (cut)" if row.get("is_truncated") else stop


def _tokens(row: dict[str, Any]) -> int | None:
    tokens = (row.get("token_usage") or {}).get("output_tokens")
    return None if tokens is None else int(tokens)
