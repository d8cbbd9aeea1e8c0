"""Event loops: running asynchronous code from code that is not, and the threads that a loop lends to blocking calls.

Parts: `run_sync`, `size_executor`. Invariant: no loop, signal handler or policy of the process is touched; a running
loop (a notebook's) goes on undisturbed while `run_sync` uses one of its own, in a thread of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")
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


def run_sync(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine from code that is not asynchronous, inside a running loop (a notebook) too."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(asyncio.run, coroutine).result()
