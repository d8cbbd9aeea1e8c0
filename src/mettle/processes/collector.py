"""Garbage collection where much lives long and much is made: a process with hundreds of rollouts, an engine, a trainer.

Parts: `quiet_collector`. Invariant: the collector is as it was once the last who asked it to be quiet is done.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

YOUNG_OBJECTS: Final = 10_000
"""New objects between two collections of the youngest, while the collector is quiet (700 otherwise): a rollout has some
hundred, and with 256 in flight all of them were looked at again and again, a tenth of the orchestrator's time."""
FULL_COLLECTION_EVERY: Final = 100
"""Collections of the middle generation between two full ones, while the collector is quiet (10 otherwise)."""
_quiet_lock = threading.Lock()
_quiet_depth = 0
_usual_thresholds = (0, 0, 0)
_is_frozen_by_us = False


@contextmanager
def quiet_collector() -> Iterator[None]:
    """Keep garbage collections from walking all that is loaded already, and make them rare, inside the block.

    A full collection walks every object and stops the event loop meanwhile: 150 ms beside a loaded `datasets` and some
    thousand results. What is there at the start lives on anyway, so it is set aside until the end.
    """
    global _quiet_depth, _usual_thresholds, _is_frozen_by_us
    with _quiet_lock:
        _quiet_depth += 1
        if _quiet_depth == 1:
            _usual_thresholds = gc.get_threshold()
            young, middle, full = _usual_thresholds
            gc.set_threshold(young and max(young, YOUNG_OBJECTS), middle, max(full, FULL_COLLECTION_EVERY))
            _is_frozen_by_us = gc.get_freeze_count() == 0
            if _is_frozen_by_us:
                gc.freeze()
    try:
        yield
    finally:
        with _quiet_lock:
            _quiet_depth -= 1
            if _quiet_depth == 0:
                if _is_frozen_by_us:
                    gc.unfreeze()
                gc.set_threshold(*_usual_thresholds)
