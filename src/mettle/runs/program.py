"""How the person at the terminal calls this program, for the commands that it tells them to type next."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path


def program() -> str:
    """`mettle` where that is on the path, else what was typed, for instance `.venv/bin/mettle`."""
    called = Path(sys.argv[0])
    if called.name != "mettle" or shutil.which("mettle") is not None:
        return "mettle"
    relative = os.path.relpath(called)
    return str(called) if relative.startswith("..") else relative
