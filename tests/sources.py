"""The source files of Mettle as tests look at them."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path


@cache
def syntax_tree(path: Path) -> ast.Module:
    """What a file says.

    Garbage is not collected meanwhile: a finaliser of another test that prints a traceback would parse too, and the
    parser of Python before 3.11.9 then ends with a SystemError.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(path.read_text(encoding="utf-8"), str(path))
    finally:
        if was_enabled:
            gc.enable()
