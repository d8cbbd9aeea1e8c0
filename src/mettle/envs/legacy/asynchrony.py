"""The functions of `verifiers.utils.async_utils` and `thread_utils`: maybe awaiting, limits, retries."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from mettle.envs.errors import RETRIED_ERRORS
from mettle.envs.signatures import call_by_name, maybe_await, signature_of
from mettle.web.backoff import Backoff

T = TypeVar("T")

__all__ = [
    "NullAsyncContext",
    "NullContext",
    "get_or_create_thread_attr",
    "get_or_create_thread_loop",
    "maybe_await",
    "maybe_call_with_named_args",
    "maybe_retry",
    "maybe_semaphore",
    "with_sem",
]


class NullAsyncContext:
    """A context that does nothing."""

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, *_: object) -> bool:
        return False


NullContext = NullAsyncContext


async def maybe_semaphore(limit: int | None = None) -> AbstractAsyncContextManager[Any]:
    """A semaphore of `limit`, or a context that does nothing."""
    return asyncio.Semaphore(limit) if limit and limit > 0 else NullAsyncContext()


async def with_sem(sem: AbstractAsyncContextManager[Any], coro: Coroutine[Any, Any, T]) -> T:
    """Await `coro` inside `sem`."""
    try:
        async with sem:
            return await coro
    finally:
        coro.close()


async def maybe_call_with_named_args(func: Callable[..., Any], **objects: Any) -> Any:
    """Call `func` with those of `objects` that it asks for by name."""
    return await call_by_name(func, signature_of(func), objects)


def maybe_retry(
    func: Callable[..., Awaitable[Any]],
    max_retries: int = 0,
    initial: float = 1.0,
    max_wait: float = 60.0,
    error_types: tuple[type[Exception], ...] = RETRIED_ERRORS,
) -> Callable[..., Awaitable[Any]]:
    """`func`, called again while it raises, or returns states that hold, one of `error_types`."""
    if max_retries <= 0:
        return func

    backoff = Backoff(initial, max_wait)

    async def retried(*args: Any, **kwargs: Any) -> Any:
        for attempt in range(max_retries + 1):
            try:
                result = await func(*args, **kwargs)
                if attempt == max_retries or not _has_failed(result, error_types):
                    return result
            except error_types:
                if attempt == max_retries:
                    raise
            await asyncio.sleep(backoff.wait_s(attempt))

    return retried


def _has_failed(result: Any, error_types: tuple[type[Exception], ...]) -> bool:
    states = result if isinstance(result, list) else [result]
    return any(isinstance(state, dict) and isinstance(state.get("error"), error_types) for state in states)


_local = threading.local()


def get_or_create_thread_attr(key: str, factory: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """This thread's own object under `key`, made when it is first asked for."""
    if not hasattr(_local, key):
        setattr(_local, key, factory(*args, **kwargs))
    value: T = getattr(_local, key)
    return value


def get_or_create_thread_loop() -> asyncio.AbstractEventLoop:
    """This thread's own event loop."""
    return get_or_create_thread_attr("loop", asyncio.new_event_loop)
