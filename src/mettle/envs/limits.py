"""Limits of a rollout: how long a stage may take, and how much a turn may sample.

Parts: `within` (a stage with a time limit), `NO_LIMIT` (a stage without one, which costs nothing), `bounded_sampling`
(a turn's token budget), `call_in_thread` (a function that may never return). Invariants: running into a limit of ours
is a `RolloutTimeout` that names the stage and the limit; a `TimeoutError` of the stage's own code stays what it is.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import Any

from mettle.errors import RolloutTimeout

NO_LIMIT = nullcontext()


@asynccontextmanager
async def within(limit_s: float, stage: str) -> AsyncIterator[None]:
    """Run the block for at most `limit_s` seconds.

    Raises: RolloutTimeout when the time is up.
    """
    try:
        async with asyncio.timeout(limit_s) as deadline:
            yield
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise RolloutTimeout(f"{stage} took longer than {limit_s:g} s") from error


def bounded_sampling(sampling_args: Mapping[str, Any], max_tokens: int | None) -> Mapping[str, Any]:
    """Sampling arguments that ask for at most `max_tokens` tokens; a smaller limit of the caller stays."""
    if max_tokens is None:
        return sampling_args
    name = "max_completion_tokens" if sampling_args.get("max_completion_tokens") else "max_tokens"
    asked = sampling_args.get(name)
    return {**sampling_args, name: min(asked, max_tokens) if asked else max_tokens}


async def call_in_thread(function: Callable[..., Any], **arguments: Any) -> Any:
    """Call a function that is not asynchronous in a thread of its own, and wait for it.

    Cancelling the wait leaves the thread to itself: nothing can stop a Python function from outside. It is a daemon,
    so it holds up neither the loop nor the end of the process.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: Any, error: Exception | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def work() -> None:
        result, failure = None, None
        try:
            result = context.run(function, **arguments)
        except BaseException as error:
            failure = _carried(error)
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=work, daemon=True, name=f"tool {getattr(function, '__name__', '')}").start()
    return await done


def _carried(error: BaseException) -> Exception:
    """`error` as a future can carry it; SystemExit and StopIteration would end or confuse the loop."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")
