"""Other people's libraries, imported when an adapter first needs them.

Parts: `imported`; `guest`, the boundary around their code. Invariant: a library that is missing is a single line that
says what to install; what another's code raises is an `EnvironmentFault`, a person's mistake stays one.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mettle.errors import EnvironmentFault, RolloutError, UserError

SHIPPED = Path(__file__).resolve().parents[3] / "adapters"
"""The adapters of a source checkout."""


def imported(module: str, *, adapter: str, needed_by: str) -> Any:
    """The module `module`, for the adapter in that folder of `adapters/`.

    Raises: UserError when its package is not installed.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise UserError(
                f"{needed_by} could not import {package}: it needs {error.name!r}, not installed"
            ) from error
        raise UserError(
            f"{needed_by} needs {package}, which is not installed: {install_line(adapter)} brings it"
        ) from error


def install_line(adapter: str) -> str:
    """The command that installs an adapter with all that it needs."""
    folder = SHIPPED / adapter
    return f"pip install {folder if folder.is_dir() else f'mettle-{adapter}'.replace('_', '-')}"


@contextmanager
def guest(what: str) -> Iterator[None]:
    """Attribute what escapes another's code to the environment, saying `what` was going on."""
    try:
        yield
    except (RolloutError, UserError):
        raise
    except Exception as error:
        raise EnvironmentFault(f"{what}: {type(error).__name__}: {error}") from error
