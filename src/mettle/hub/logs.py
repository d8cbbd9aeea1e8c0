"""The end of a run's logs: JSON lines from `logs/*.log`, plain lines from what a process printed (`logs/*.out`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mettle.storage.files import storage_errors

TAIL_BYTES = 256 * 1024
LEVELS = ("debug", "info", "warning", "error", "critical")


def log_names(folder: Path) -> list[str]:
    """The log files there are."""
    try:
        return sorted(p.name for p in folder.iterdir() if p.suffix in (".log", ".out") and p.is_file())
    except OSError:
        return []


def read_tail(
    folder: Path,
    name: str,
    *,
    max_lines: int,
    level: str | None = None,
    words: str = "",
    hidden: Sequence[tuple[str, str]] = (),
) -> tuple[list[dict[str, Any]], bool]:
    """The newest `max_lines` entries, oldest first, and whether earlier ones were left out.

    `level` keeps entries of at least that level, `words` those that contain the words. `name` must be of
    `log_names`. What is `hidden` is replaced by the word beside it, before anything is looked for.
    """
    path = folder / name
    with storage_errors(path, "reading"), path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - TAIL_BYTES))
        data = file.read(TAIL_BYTES)
    lines = hide(data.decode("utf-8", "replace"), hidden).splitlines()
    is_cut = size > TAIL_BYTES
    if is_cut:
        lines = lines[1:]
    lowest = LEVELS.index(level) if level in LEVELS else 0
    entries = [entry for entry in map(parse_line, lines) if _rank(entry) >= lowest and _contains(entry, words)]
    return entries[-max_lines:], is_cut or len(entries) > max_lines


def hide(text: str, hidden: Sequence[tuple[str, str]]) -> str:
    """A text without what is hidden."""
    for value, word in hidden:
        text = text.replace(value, word)
    return text


def parse_line(line: str) -> dict[str, Any]:
    """A JSON line as {time, level, logger, message, extra, traceback}; any other line as its message."""
    try:
        entry = json.loads(line)
    except ValueError:
        entry = None
    if not isinstance(entry, dict) or "message" not in entry:
        return {"time": None, "level": "", "logger": "", "message": line, "extra": {}, "traceback": ""}
    known = {key: entry.pop(key, "") for key in ("level", "logger", "message", "traceback")}
    time = entry.pop("time", None)
    known = {key: str(value) for key, value in known.items()}
    return {**known, "time": time if isinstance(time, int | float) else None, "extra": entry}


def _rank(entry: dict[str, Any]) -> int:
    return LEVELS.index(entry["level"]) if entry["level"] in LEVELS else len(LEVELS)


def _contains(entry: dict[str, Any], words: str) -> bool:
    return not words or words.lower() in f"{entry['message']} {entry['extra']}".lower()
