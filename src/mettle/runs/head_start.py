"""torch begins to be imported before it is known what a run is: reading its config takes a third as long.

Parts: `head_start`. Invariant: whatever the block comes to, nothing is left running.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mettle.processes.importer import Importer
from mettle.runs.launcher import IMPORTS, importer_of


@contextmanager
def head_start() -> Iterator[Importer | None]:
    """A process that imports what trainer and engine begin with; None where they could not be forks of it."""
    importer = importer_of(IMPORTS, Path(os.devnull))  # there is no run yet that could keep what it prints
    if importer is None:
        yield None
        return
    try:
        importer.begin()
        yield importer
    finally:
        importer.close()
