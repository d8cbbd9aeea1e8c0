"""The functions of `verifiers.utils.logging_utils`: where log records go, and a few formats for people.

Invariant: handlers are put on this library's logger and on that named `verifiers`, which environments use for their
own records; the root logger is left alone.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from mettle.envs.errors import ErrorChain

LOGGER_NAME = "verifiers"
LOGGER_NAMES = ("mettle", LOGGER_NAME)
_warned: set[tuple[str, str]] = set()


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        entry = {
            "timestamp": datetime.now(UTC).isoformat(),
            "level": record.levelname,
            "name": record.name,
            "message": record.getMessage(),
            "module": record.module,
            "function": record.funcName,
            "line": record.lineno,
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def setup_logging(
    level: str | None = "INFO",
    log_format: str | None = None,
    date_format: str | None = None,
    log_file: str | None = None,
    console_logging: bool = True,
    file_logging: bool = False,
    json_logging: bool = False,
) -> None:
    """Send records of `level` and above to stderr, to a file, or to both; None silences the library."""
    if file_logging and log_file is None:
        raise ValueError("file_logging needs a log_file")
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)] if console_logging else []
    if file_logging and log_file is not None:
        handlers.append(logging.FileHandler(log_file, mode="a", encoding="utf-8"))
    formatter = JsonFormatter() if json_logging else _formatter(log_format, date_format)
    for handler in handlers:
        handler.setFormatter(formatter)
    for name in LOGGER_NAMES:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = False
        if level is not None:
            logger.setLevel(level.upper())
            logger.handlers.extend(handlers)


def _formatter(log_format: str | None, date_format: str | None) -> logging.Formatter:
    return logging.Formatter(
        log_format or "%(asctime)s - %(name)s - %(levelname)s - %(message)s", date_format or "%Y-%m-%d %H:%M:%S"
    )


@contextmanager
def log_level(level: str | int) -> Iterator[None]:
    """Another level for the duration of a block."""
    loggers = [logging.getLogger(name) for name in LOGGER_NAMES]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(level.upper() if isinstance(level, str) else level)
    try:
        yield
    finally:
        for logger, previous in zip(loggers, before, strict=True):
            logger.setLevel(previous)


def quiet_verifiers() -> Any:
    """Only warnings for the duration of a block."""
    return log_level("WARNING")


def warning_once(logger: logging.Logger, msg: str) -> None:
    """Log a warning the first time that this logger says it."""
    if (logger.name, msg) not in _warned:
        _warned.add((logger.name, msg))
        logger.warning(msg)


log_once = warning_once


def print_prompt_completions_sample(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    errors: Sequence[Any] | None = None,
    rewards: Sequence[float] | None = None,
    step: int = 0,
    num_samples: int = 1,
) -> None:
    """Print a few rollouts as a table: prompt, completion, reward, error."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    from mettle.envs.legacy.messages import format_messages

    table = Table("Prompt", "Completion", "Reward", expand=True, show_lines=True)
    for index in range(min(num_samples, len(prompts))):
        said = format_messages(completions[index])
        error = errors[index] if errors is not None and index < len(errors) else None
        if error is not None:
            said.append(f"\n\nerror: {_error_text(error)}", style="bold red")
        reward = rewards[index] if rewards is not None and index < len(rewards) else None
        table.add_row(format_messages(prompts[index]), said, Text("" if reward is None else f"{reward:.2f}"))
    Console().print(Panel(table, title=f"Step {step}", expand=False))


def _error_text(error: Any) -> str:
    return str(ErrorChain(error)) if isinstance(error, BaseException) else str(error.get("error_chain_repr", error))


def print_time(time_s: float) -> str:
    """A duration in its two largest units: `1d 2h`, `3m 4s`, `56ms`."""
    if time_s < 1:
        return f"{time_s * 1000:.0f}ms"
    for unit, size, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if time_s >= size:
            rest = int(time_s % size // part)
            return f"{int(time_s // size)}{unit}" + (f" {rest}{smaller}" if rest else "")
    return f"{time_s:.0f}s"


def print_size(num_bytes: float) -> str:
    """A number of bytes in its largest unit."""
    for unit, size in (("GB", 1024**3), ("MB", 1024**2), ("KB", 1024)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} bytes"


def truncate(s: str, limit: int = 200) -> str:
    """At most `limit` characters of a text."""
    return f"{s[:limit]}..." if len(s) > limit else s
