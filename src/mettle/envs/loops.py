"""Event loops: running asynchronous code from code that is not, and the threads that a loop lends to blocking calls.

Parts: `run_sync`, `size_executor`, `quiet_collector`. Invariant: no loop, signal handler or policy of the process is
touched; a running loop (a notebook's) goes on undisturbed while `run_sync` uses one of its own, in a thread of its own;
the garbage collector is as it was once the last who asked it to be quiet is done.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")
FULL_COLLECTION_EVERY = 100
"""Collections of the middle generation between two full ones, while the collector is quiet (10 otherwise)."""
_thread_pools: WeakKeyDictionary[asyncio.AbstractEventLoop, int] = WeakKeyDictionary()


def size_executor(num_threads: int) -> None:
    """Give the running loop's default executor at least `num_threads` threads; without a running loop, nothing."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return
    if num_threads > _thread_pools.get(loop, 0):
        _thread_pools[loop] = num_threads
        loop.set_default_executor(ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix="mettle-env"))


_quiet_lock = threading.Lock()
_quiet_depth = 0
_usual_thresholds = (0, 0, 0)
_is_frozen_by_us = False


@contextmanager
def quiet_collector() -> Iterator[None]:
    """Keep full garbage collections from walking all that is loaded already, and make them rare, inside the block.

    A full collection walks every object and stops the event loop meanwhile: 150 ms beside a loaded `datasets` and some
    thousand results. What is there at the start lives on anyway, so it is set aside until the end.
    """
    global _quiet_depth, _usual_thresholds, _is_frozen_by_us
    with _quiet_lock:
        _quiet_depth += 1
        if _quiet_depth == 1:
            _usual_thresholds = gc.get_threshold()
            gc.set_threshold(*_usual_thresholds[:2], max(_usual_thresholds[2], FULL_COLLECTION_EVERY))
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


def run_sync(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine from code that is not asynchronous, inside a running loop (a notebook) too."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(asyncio.run, coroutine).result()
