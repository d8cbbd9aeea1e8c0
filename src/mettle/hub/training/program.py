"""What the worker starts for a run from a version of another: writes that as a model directory, then becomes the run.

    python -m mettle.hub.training.program RUN VERSION FOLDER WORD...

`WORD...` are those of `mettle`. A model directory that is there is whole: it gets its name when it is.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

METTLE = (sys.executable, "-m", "mettle.cli")


def command_of(words: Sequence[str]) -> list[str]:
    """The command of the run, when its model directory is there. Raises: CalledProcessError when it cannot be made."""
    run, version, folder, *rest = words
    if not Path(folder).exists():
        subprocess.run([*METTLE, "rl", "export", run, folder, "--version", version], check=True)
    return [*METTLE, *rest]


if __name__ == "__main__":
    try:
        command = command_of(sys.argv[1:])
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)  # it has said why
    os.execv(command[0], command)
