"""Engines: `protocol` says what one is, `embedded` is the PyTorch one, `mock` answers from memory without torch.

`local` runs the embedded engine's scheduler in the caller's own thread, for sampling inside a training process.
"""
