"""Batches to weights.

Parts: `process` (the command), `loop`, `learner`, `losses/`, `mismatch/`, `service/`. Invariant: a task trains once.
"""

from mettle.processes.amx import avoid_unusable_amx

avoid_unusable_amx()  # before torch, which is imported from here on
