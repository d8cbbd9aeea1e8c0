"""`python -m mettle.runs.member RUN_DIR`: the supervisor of a run that a share has started.

Exit codes: 0 finished, 130 stopped; 2 and 3 as everywhere, with one line on standard error.
"""

from __future__ import annotations

import sys
from pathlib import Path

from mettle.errors import MettleError
from mettle.runs.launch import drive, is_finished
from mettle.storage.run_dir import RunDir

STOPPED = 130


def main(arguments: list[str]) -> int:
    """Drive the run to its end; returns the exit code."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m mettle.runs.member RUN_DIR\n")
        return 2
    path = Path(arguments[0])
    try:
        if is_finished(path):
            return 0
        outcome = drive(RunDir.existing(path), is_quiet=True)
    except MettleError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return STOPPED if outcome.is_stopped else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
