"""Reading the logs of a run: several files of JSON lines as one stream in the order of time."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from mettle.errors import UserError

POLL_S = 0.25
TAIL_BYTES_PER_LINE = 600
"""How far back a tail looks at first; it doubles until there are enough lines."""

_OWN = ("time", "level", "logger", "message", "traceback")


def show_logs(
    folder: Path, process: str | None, *, num_lines: int, is_following: bool, is_raw: bool, is_json: bool
) -> None:
    """Print the newest lines of a run's logs, and go on when following.

    Raises: UserError when there is no such log; it names those there are.
    """
    paths = log_files(folder, process, is_raw=is_raw)
    ends = {path: path.stat().st_size for path in paths}
    lines = [(path, line) for path in paths for line in tail(path, ends[path], num_lines)]
    if not is_raw:
        lines.sort(key=lambda entry: _parsed(entry[1]).get("time", 0.0))
    for path, line in lines[-num_lines:] if num_lines else []:
        _print(path, line, is_raw=is_raw, is_json=is_json)
    if is_following:
        for path, line in follow(folder, process, ends, is_raw=is_raw):
            _print(path, line, is_raw=is_raw, is_json=is_json)


def tail(path: Path, end: int, num_lines: int) -> list[str]:
    """The last whole lines of the first `end` bytes of a file, oldest first; reads no more of it than it must."""
    span = num_lines * TAIL_BYTES_PER_LINE
    with path.open("rb") as file:
        while True:
            start = max(0, end - span)
            file.seek(start)
            lines = file.read(end - start).splitlines()
            if start == 0 or len(lines) > num_lines:
                kept = lines if start == 0 else lines[1:]  # the first may be cut
                return [line.decode("utf-8", "replace") for line in kept[max(0, len(kept) - num_lines) :]]
            span *= 2


def follow(folder: Path, process: str | None, ends: dict[Path, int], *, is_raw: bool) -> Iterator[tuple[Path, str]]:
    """Lines as they are written after the given ends of the files, and in files that appear, until interrupted."""
    rest = dict.fromkeys(ends, b"")
    while True:
        is_quiet = True
        for path in log_files(folder, process, is_raw=is_raw):
            if path not in ends:
                ends[path], rest[path] = 0, b""
        for path, end in ends.items():
            size = path.stat().st_size if path.exists() else end
            if size < end:  # started anew
                end = 0
            if size > end:
                is_quiet = False
                with path.open("rb") as file:
                    file.seek(end)
                    data = rest[path] + file.read(size - end)
                *whole, rest[path] = data.split(b"\n")
                for line in whole:
                    yield path, line.decode("utf-8", "replace")
            ends[path] = size
        if is_quiet:
            time.sleep(POLL_S)


def readable(entry: dict[str, Any]) -> str:
    """A JSON log line for people: time, room, message, figures."""
    clock = time.strftime("%H:%M:%S", time.localtime(entry.get("time", 0.0)))
    room = str(entry.get("logger", "")).removeprefix("mettle.").split(".")[0]
    level = str(entry.get("level", "info"))
    mark = f"{level}: " if level not in ("info", "debug") else ""
    pairs = " ".join(f"{key}={_short(value)}" for key, value in entry.items() if key not in _OWN)
    line = f"{clock} {room:<12} {mark}{entry.get('message', '')} {pairs}".rstrip()
    return f"{line}\n{entry['traceback']}" if entry.get("traceback") else line


def log_files(folder: Path, process: str | None, *, is_raw: bool) -> list[Path]:
    """The logs of a run's processes, or of one.

    Raises: UserError when there is none.
    """
    suffix = ".out" if is_raw else ".log"
    found = {path.stem: path for path in sorted(folder.glob(f"*{suffix}"))}
    if process is None:
        if not found:
            raise UserError(f"no logs in {folder} yet")
        return list(found.values())
    if process not in found:
        known = ", ".join(found) or "none yet"
        raise UserError(f"no log of a process {process!r} in {folder}; there are {known}")
    return [found[process]]


def _parsed(line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}


def _print(path: Path, line: str, *, is_raw: bool, is_json: bool) -> None:
    if is_raw:
        click.echo(json.dumps({"process": path.stem, "line": line}) if is_json else f"{path.stem:<12} {line}")
        return
    entry = _parsed(line)
    if is_json:
        click.echo(json.dumps({"process": path.stem, **(entry or {"message": line})}))
    elif entry:
        text = readable(entry)
        is_bad = entry.get("level") in ("error", "critical")
        is_doubtful = entry.get("level") == "warning"
        click.secho(text, fg="red" if is_bad else "yellow" if is_doubtful else None, color=_has_colour())
    else:
        click.echo(line)


def _has_colour() -> bool | None:
    return False if os.environ.get("NO_COLOR") else None


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
