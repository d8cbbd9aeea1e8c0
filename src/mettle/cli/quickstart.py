"""`mettle quickstart`: the whole loop, with nothing to prepare."""

from __future__ import annotations

from pathlib import Path

import click

from mettle.cli.terminal import beginning_run

STOPPED = 130


@click.command()
@click.option("--seed", default=0, show_default=True, help="Seed of the model, the data and the sampling.")
@click.option("--steps", type=click.IntRange(min=1), help="Optimiser steps; the recipe's own number by default.")
@click.option("--dir", "directory", type=click.Path(path_type=Path), help="Run directory.  [default: new, under runs/]")
@click.option("--browser/--no-browser", default=True, help="Open the run page and keep it after the end.")
@click.option("--hard", "is_hard", is_flag=True, help="Longer words over the whole alphabet.")
@click.option("--port", type=click.IntRange(0, 65535), help="Port of the run page; a free one by default.")
@click.option("--json", "is_json", is_flag=True, help="Print the summary as JSON, and nothing else.")
def quickstart(
    seed: int,
    steps: int | None,
    directory: Path | None,
    browser: bool,
    is_hard: bool,
    port: int | None,
    is_json: bool,
) -> int:
    """Watch a small model learn a task, on this machine, now.

    Makes a small policy, warms it up, trains it with reinforcement learning while its page shows how, and measures it
    before and after on tasks it has never seen. Needs no GPU, no account and no network.
    """
    with beginning_run("`mettle rl list` shows the run, and `mettle rl resume RUN` continues it") as begun:
        from mettle.runs.quickstart import QuickstartOptions
        from mettle.runs.quickstart import quickstart as run_quickstart

        options = QuickstartOptions(
            seed=seed,
            steps=steps,
            dir=directory,
            is_browser=browser,
            is_json=is_json,
            is_hard=is_hard,
            port=port,
        )
        summary = run_quickstart(options, begun)
    return STOPPED if summary.get("state") == "stopped" else 0
