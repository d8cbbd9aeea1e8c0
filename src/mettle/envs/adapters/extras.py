"""Other people's libraries, imported when an adapter first needs them.

Parts: `imported`. Invariant: one that is missing is a single line that says what to install.
"""

from __future__ import annotations

import importlib
from typing import Any

from mettle.errors import UserError


def imported(module: str, *, extra: str, needed_by: str) -> Any:
    """The module `module`.

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
            f"{needed_by} needs {package}, which is not installed: pip install 'mettle[{extra}]'"
        ) from error
