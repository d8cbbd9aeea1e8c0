"""`python -m mettle.trainer RUN_DIR`: train a run from where it stands.

Exit codes: 0 done or told to stop, 2 a person's mistake, 3 cannot go on; each with one line on standard error.
"""

from __future__ import annotations

import sys

from mettle.trainer.process import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
