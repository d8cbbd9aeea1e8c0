"""`python -m mettle.trainer.service --config FILE --ready-file PATH`."""

from __future__ import annotations

import sys

from mettle.trainer.service.process import main

sys.exit(main())
