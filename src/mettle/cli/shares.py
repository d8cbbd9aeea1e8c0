"""`mettle rl share FILES --base-model DIR`: several runs beside one base, each with an adapter of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from mettle.cli.terminal import going_on_from_any_stop, json_option, print_json, print_next, print_table
from mettle.errors import UserError

STOPPED = 130


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("arguments", metavar="FILES... [--KEY VALUE]...", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--base-model", "base", required=True, type=click.Path(path_type=Path), help="Model directory all runs train on."
)
@click.option(
    "--dir", "directory", type=click.Path(path_type=Path), help="Share folder.  [default: new, under shares/]"
)
@json_option
def share(arguments: Sequence[str], base: Path, directory: Path | None, is_json: bool) -> int:
    """Train several runs on one base: one trainer process, one engine, an adapter for each file.

    Each run keeps its directory, ledger and orchestrator; one that fails leaves the others alone.

    \b
    mettle rl share a.toml b.toml c.toml --base-model models/Qwen3-0.6B
    """
    first = next((at for at, word in enumerate(arguments) if word.startswith("--")), len(arguments))
    files, overrides = [Path(word) for word in arguments[:first]], list(arguments[first:])
    if not files:
        raise UserError("name a config file for each run, as in `mettle rl share a.toml b.toml --base-model DIR`")
    path = directory or Path("shares") / time.strftime("share-%m%d-%H%M%S")
    with going_on_from_any_stop(f"`mettle rl resume {path}` continues the share if it was made already"):
        from mettle.runs.launch import load_run_config
        from mettle.runs.shares import NamedRun, create_share

        runs = []
        for file in files:
            loaded = load_run_config([file], overrides)
            runs.append(NamedRun(str(file), loaded.config.name or file.stem, loaded))
        create_share(runs, base, path)
        return go_on(path, is_json=is_json)


def go_on(path: Path, *, is_json: bool) -> int:
    """Drive the share at `path` to the end of its runs and say how each has ended; returns the exit code."""
    with going_on_from_any_stop(f"`mettle rl resume {path}` continues the share"):
        from mettle.runs.sharing import drive_share
        from mettle.storage.share_dir import ShareDir

        def tell(line: str) -> None:
            if not is_json:
                click.echo(line, err=True)

        outcome = drive_share(ShareDir(path.resolve()), tell=tell)
    rows = [_row(outcome.share.runs / name, code, outcome.reasons[name]) for name, code in outcome.codes.items()]
    if is_json:
        print_json({"share": str(path), "runs": rows})
    else:
        columns = ("run", "state", "step", "baseline", "final")
        print_table((*columns, ""), [(*(_cell(row[key]) for key in columns), row["error"]) for row in rows])
    if any(row["code"] == STOPPED for row in rows):
        click.echo(f"stopped; `mettle rl resume {path}` continues the share", err=True)
    elif not is_json:
        print_next(f"mettle rl metrics {outcome.share.runs / next(iter(outcome.codes))}")
    return outcome.code


def _row(run: Path, code: int, reason: str) -> dict[str, Any]:
    from mettle.runs.summary import summarise
    from mettle.storage.ledger import Ledger
    from mettle.storage.run_dir import RunDir

    run_dir = RunDir.existing(run)
    ledger = Ledger(run_dir.ledger, is_read_only=True)
    try:
        found = summarise(ledger, run_dir.path)
    finally:
        ledger.close()
    return {
        "run": run_dir.name,
        "run_dir": str(run_dir.path),
        "code": code,
        "state": found["state"],
        "step": found.get("steps"),
        "baseline": (found.get("baseline") or {}).get("mean"),
        "final": (found.get("final") or {}).get("mean"),
        "error": reason,
    }


def _cell(value: Any) -> Any:
    return f"{value:.3f}" if isinstance(value, float) else value
