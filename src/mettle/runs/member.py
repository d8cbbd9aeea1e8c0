"""`python -m mettle.runs.member RUN_DIR`: the supervisor of a run that a share has started.

Exit codes: 0 finished, 130 stopped; 2 and 3 as everywhere, with one line on standard error.
"""

from __future__ import annotations

import sys
from pathlib import Path

from mettle.errors import MettleError
from mettle.processes.fork_server import split
from mettle.runs.launch import drive, is_finished
from mettle.runs.launcher import ORCHESTRATOR
from mettle.storage.run_dir import RunDir

STOPPED = 130


def main(arguments: list[str]) -> int:
    """Drive the run to its end; returns the exit code."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m mettle.runs.member RUN_DIR\n")
        return 2
    path = Path(arguments[0])
    # Where this process is a fork that has imported what an orchestrator needs, its orchestrator is a fork of it.
    twin = split() if f"{ORCHESTRATOR}.__main__" in sys.modules else None
    try:
        if is_finished(path):
            return 0
        outcome = drive(RunDir.existing(path), is_quiet=True, twin=twin)
    except MettleError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    finally:
        if twin is not None:
            twin.close()
    return STOPPED if outcome.is_stopped else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
