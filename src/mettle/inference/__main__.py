"""`python -m mettle.inference --config FILE [--ready-file PATH]`."""

from __future__ import annotations

import sys

from mettle.inference.process import main

sys.exit(main())
