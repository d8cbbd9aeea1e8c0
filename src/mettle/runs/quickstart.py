"""The main job: a small policy learns a verifiable task on this machine, from nothing, while one watches.

It is an ordinary run with a config that comes with Mettle (`quickstart.toml`); everything here is also possible with
`mettle rl run`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import webbrowser
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console

from mettle.config import Loaded
from mettle.errors import ServiceError
from mettle.processes.importer import Importer
from mettle.processes.managed import ManagedProcess, ProcessSpec, wait_ready
from mettle.runs.config import RunConfig
from mettle.runs.create import create_run
from mettle.runs.launch import RUNS_FOLDER, RunOutcome, drive, load_run_config
from mettle.runs.program import program
from mettle.runs.summary import summary_lines
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir


@dataclass(frozen=True, slots=True)
class QuickstartOptions:
    """What the command line offers. On a terminal `is_browser` opens the page, and keeps it up until Ctrl-C."""

    seed: int = 0
    steps: int | None = None
    dir: Path | None = None
    is_browser: bool = True
    is_json: bool = False
    is_hard: bool = False
    port: int | None = None


def quickstart(options: QuickstartOptions, begun: Importer | None = None) -> dict[str, Any]:
    """Make the run, train it, show what came of it. Returns the summary. `begun`: see `head_start`.

    Raises: UserError for options that cannot be met, ServiceError when a process cannot go on.
    """
    run_dir = _create(options)
    is_shown = options.is_browser and not options.is_json and sys.stdout.isatty()
    outcome = drive(run_dir, is_quiet=options.is_json, on_page=_open_browser if is_shown else None, begun=begun)
    if options.is_json:
        print(json.dumps(outcome.summary))
    else:
        _tell(outcome)
        if is_shown and not outcome.is_stopped and outcome.page is not None:
            _keep_page(run_dir, outcome.page)
    return outcome.summary


def config_files(*, is_hard: bool) -> list[Path]:
    """The quickstart's config, as files that `mettle rl run` takes as well."""
    folder = Path(str(resources.files("mettle.runs")))
    return [folder / "quickstart.toml", *([folder / "quickstart-hard.toml"] if is_hard else [])]


def recipe(options: QuickstartOptions) -> Loaded[RunConfig]:
    """The config of a quickstart with these options."""
    files = config_files(is_hard=options.is_hard)
    overrides = ["--seed", str(options.seed)]
    if options.steps is not None:
        overrides += ["--max_steps", str(options.steps), *_shorter_warm_up(files, options.steps)]
    if options.port is not None:
        overrides += ["--deployment.hub_port", str(options.port)]
    return load_run_config(files, overrides)


def _create(options: QuickstartOptions) -> RunDir:
    name = f"quickstart-{'hard-' if options.is_hard else ''}seed{options.seed}-{time.strftime('%m%d-%H%M%S')}"
    return create_run(recipe(options), options.dir or RUNS_FOLDER / name)


def _shorter_warm_up(files: list[Path], steps: int) -> list[str]:
    """A run of few steps spends at most a fifth of them on raising the learning rate."""
    whole: int = load_run_config(files, []).config.trainer.scheduler.warmup_steps
    return ["--trainer.scheduler.warmup_steps", str(steps // 5)] if steps // 5 < whole else []


def _tell(outcome: RunOutcome) -> None:
    console = Console(highlight=False)
    ledger = Ledger(outcome.run_dir.ledger, is_read_only=True)
    try:
        lines = summary_lines(outcome.summary, ledger)
    finally:
        ledger.close()
    path = _short(outcome.run_dir.path)
    console.print()
    for line in [*lines, f"{'run':<10} {path}"]:
        console.print(line, markup=False, soft_wrap=True)
    if outcome.is_stopped:
        following = f"\nStopped. Next: {program()} rl resume {path}"
    else:
        following = f'\nNext: {program()} inference chat {path}/policy -q "reverse badge"'
    console.print(following, markup=False, soft_wrap=True)


def _open_browser(address: str) -> None:
    """Open the page where there is a browser to open it in; elsewhere its address is printed, and that must do."""
    if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or sys.platform == "darwin":
        with contextlib.suppress(webbrowser.Error):
            webbrowser.open(address)


def _keep_page(run_dir: RunDir, address: str) -> None:
    """Go on serving the run page, at the address that it had, until Ctrl-C."""
    port = str(urlsplit(address).port)
    arguments = ("--runs", str(run_dir.path), "--port", port, "--ready-file", str(run_dir.endpoint("hub")))
    page = ManagedProcess(
        ProcessSpec("hub", "mettle.hub", arguments, ready_file=run_dir.endpoint("hub")), run_dir.logs / "hub.out"
    )
    page.start()
    try:
        wait_ready(page)
        print(f"\nThe run page stays at {address} until Ctrl-C.")
        while page.exit_code() is None:
            time.sleep(0.2)
        raise ServiceError(f"the run page ended: {page.last_line()}")
    except KeyboardInterrupt:
        print()
    finally:
        page.end()


def _short(path: Path) -> str:
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)
