"""A program of the trainer's: its one argument is a run, and what it raises on purpose becomes an exit code.

Imports no torch: not every program of the trainer's needs it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from mettle.errors import MettleError
from mettle.storage.run_dir import RunDir

logger = logging.getLogger(__name__)


def guarded(program: str, arguments: Sequence[str], work: Callable[[RunDir], None]) -> int:
    """Call `work` on the run that the only argument names, and turn an error raised on purpose into an exit code."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        sys.stderr.write(f"usage: python -m {program} RUN_DIR\n")
        return 0 if list(arguments) in (["-h"], ["--help"]) else 2
    logging.getLogger("mettle").addHandler(logging.NullHandler())  # until there is a run to log into
    try:
        work(RunDir.existing(Path(arguments[0])))
    except MettleError as error:
        logger.error(str(error))
        sys.stderr.write(f"{program}: {error}\n")
        return error.exit_code
    return 0
