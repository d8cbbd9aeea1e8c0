"""`python -m mettle.trainer RUN_DIR`: train a run from where it stands.

Exit codes: 0 done or told to stop, 2 a person has to act (wrong config, full disk, a batch gone), 3 cannot go on; the
last two with one line on standard error.
"""

from __future__ import annotations

import sys

from mettle.trainer.process import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
