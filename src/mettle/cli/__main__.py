"""Where `mettle` and `python -m mettle.cli` begin.

Invariant: importing this imports nothing, so that Ctrl-C ends with one line while the command line is imported too.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and leave with its exit code."""
    try:
        from mettle.cli.main import main as run_and_leave
    except KeyboardInterrupt:
        exec("")  # see `main.run`
        sys.stderr.write("stopped\n")
        sys.exit(130)
    run_and_leave()


if __name__ == "__main__":
    main()
