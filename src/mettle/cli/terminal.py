"""What commands print: JSON for programs, tables and lines for people, and what to do next."""

from __future__ import annotations

import json
import math
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from mettle.errors import UserError
from mettle.runs.program import program
from mettle.wording import figure

if TYPE_CHECKING:
    from rich.console import Console

    from mettle.processes.importer import Importer

PLAIN_WIDTH = 200
"""Columns to write when nobody is looking: wide enough that nothing is cut from a pipe or a file."""

_go_on: ContextVar[str | None] = ContextVar("go_on", default=None)

CommandT = TypeVar("CommandT", bound=Callable[..., Any])


def json_option(command: CommandT) -> CommandT:
    """The `--json` of everything that reads."""
    return click.option("--json", "is_json", is_flag=True, help="Print JSON for a program to read.")(command)


def print_json(value: Any) -> None:
    """One JSON document on standard output; a figure that is not finite becomes null."""
    click.echo(json.dumps(_finite(value), indent=2, default=str, allow_nan=False))


def print_json_line(value: Any) -> None:
    """One JSON document on one line."""
    click.echo(json.dumps(_finite(value), default=str, allow_nan=False))


def print_next(command: str, *, is_aside: bool = False) -> None:
    """Name the command that comes next, as it can be typed here; aside (standard error) where the output is a value."""
    click.echo(f"next: {program()}{command.removeprefix('mettle')}", err=is_aside)


def console() -> Console:
    """A console that colours only a terminal, honours NO_COLOR, and cuts nothing that goes to a pipe."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, title: str | None = None) -> None:
    """A plain table. Numbers stand to the right."""
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=title, title_justify="left", box=None, pad_edge=False, header_style="bold", show_header=any(columns)
    )
    for index, name in enumerate(columns):
        cells = [row[index] for row in rows if row[index] is not None]
        is_number = bool(cells) and all(isinstance(cell, (int, float)) for cell in cells)
        table.add_column(name, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(figure(cell)) for cell in row))
    if sys.stdout.isatty():
        console().print(table)
        return
    screen = console()
    with screen.capture() as capture:
        screen.print(table)
    click.echo("\n".join(line.rstrip() for line in capture.get().splitlines()))


@contextmanager
def going_on(how: str) -> Iterator[None]:
    """While the block runs, Ctrl-C ends the program with "stopped" and this sentence."""
    token = _go_on.set(how)
    try:
        yield
    except (KeyboardInterrupt, click.Abort):
        raise  # The sentence stays set: `main` prints it.
    except BaseException:
        _go_on.reset(token)
        raise
    else:
        _go_on.reset(token)


@contextmanager
def going_on_from_any_stop(how: str) -> Iterator[None]:
    """`going_on` where SIGTERM ends the program as Ctrl-C does. To be entered before anything of a run is imported: a
    run's supervisor listens for both signals only later."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        with going_on(how):
            yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def beginning_run(how: str) -> Iterator[Importer | None]:
    """`going_on_from_any_stop` for a run of its own; torch begins to be imported (see `head_start`)."""
    with going_on_from_any_stop(how):
        from mettle.runs.head_start import head_start

        with head_start() as begun:
            yield begun


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def take_how_to_go_on() -> str | None:
    """What to say after "stopped"; said once."""
    how = _go_on.get()
    _go_on.set(None)
    return how


def find_run(run: str) -> Path:
    """The run directory that a RUN argument means: a path, or the name of a run under `runs/`."""
    path = Path(run)
    named = Path("runs") / run
    return named if not (path / "run.db").exists() and (named / "run.db").exists() else path


def check_free(folder: Path) -> None:
    """Raises: UserError when there is something already where a folder is to be written."""
    if folder.exists():
        raise UserError(f"{folder} is there already; name a folder that is not")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
