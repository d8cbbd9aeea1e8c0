"""Engines: `protocol` says what one is, `embedded` is the PyTorch one, `mock` answers from memory without torch.

`local` runs the embedded engine's scheduler in the caller's own thread, for sampling inside a training process.
"""

from mettle.processes.amx import avoid_unusable_amx

avoid_unusable_amx()  # before torch, which is imported from here on
