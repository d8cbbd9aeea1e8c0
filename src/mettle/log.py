"""Logging: JSON lines to a file, short lines to a terminal. Built on the standard library.

One line per step or per state change at INFO; no prompts and no secrets there. Components call
`logging.getLogger(__name__)` and pass figures in `extra=`.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path

_STANDARD = frozenset(vars(logging.LogRecord("", 0, "", 0, "", (), None))) | {"message", "asctime", "taskName"}

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class JsonLineFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and whatever was passed in `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry.update(_extra(record))
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str, ensure_ascii=True)


class TerminalFormatter(logging.Formatter):
    """`12:03:44 trainer  stepped step=3 loss=0.12`: for people."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        room = record.name.removeprefix("mettle.").split(".")[0]
        pairs = " ".join(f"{key}={_short(value)}" for key, value in _extra(record).items())
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        line = f"{clock} {room:<12} {level}{record.getMessage()} {pairs}".rstrip()
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _FileHandler(logging.FileHandler):
    """A full disk costs log lines and nothing else; whoever stores something that matters says so in one line."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def checked_level(level: str) -> str:
    """A log level as it is, if it is one. Raises: ValueError."""
    if level.upper() not in LEVELS:
        raise ValueError(f"there is no level {level!r}; there are {', '.join(LEVELS)}")
    return level


def setup_logging(path: Path | None = None, *, level: str = "INFO", is_terminal: bool = True) -> None:
    """Send Mettle's log to `path` as JSON lines, to standard error for people, or to both."""
    root = logging.getLogger("mettle")
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level.upper())
    root.propagate = False
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        file_handler = _FileHandler(path, encoding="utf-8")
        file_handler.setFormatter(JsonLineFormatter())
        root.addHandler(file_handler)
    if is_terminal:
        stream = logging.StreamHandler(sys.stderr)
        stream.setFormatter(TerminalFormatter())
        root.addHandler(stream)


def _extra(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD and not key.startswith("_")}


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
