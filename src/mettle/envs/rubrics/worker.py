"""A scoring worker: reads calls, runs each with a limit on its CPU time, answers.

Started by `mettle.envs.rubrics.processes` as `python -m mettle.envs.rubrics.worker MAX_MEMORY_BYTES`. Invariants:
whatever a call prints goes to the standard error, never among the answers; when the parent is gone, this process is
killed by the kernel, also in the middle of a call that listens to nothing.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import pickle
import resource
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from mettle.processes.frames import HEADER, lengths_of, pack
from mettle.processes.orphans import end_with_parent

_armed: list[bool] = [False]
"""Whether a call is under way, for the timer's handler."""


class _TimeIsOver(BaseException):
    """Raised by the timer, and not an Exception, so that a function's `except Exception` does not swallow it."""


def main() -> None:
    """Serve until the parent closes the pipe."""
    end_with_parent()
    max_memory_bytes = int(sys.argv[1])
    if max_memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (max_memory_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    signal.signal(signal.SIGPROF, _ring)
    functions: dict[str, Callable[..., Any]] = {}
    while header := requests.read(HEADER.size):
        answer = _answer(pickle.loads(requests.read(sum(lengths_of(header)))), functions)
        answers.write(_framed(answer))
        answers.flush()


def _answer(request: tuple[Any, ...], functions: dict[str, Callable[..., Any]]) -> tuple[str, Any]:
    word, target, *rest = request
    try:
        if word == "load":
            functions[target] = _load(target, rest[0])
            return "loaded", None
        return "returned", _within(rest[1], functions[target], rest[0])
    except _TimeIsOver:
        return "overran", None
    except BaseException as error:
        return "raised", error


def _load(target: str, path: list[str]) -> Callable[..., Any]:
    """The function `module:qualname`, warmed up by its module's `warm_up` where there is one."""
    sys.path.extend(entry for entry in path if entry not in sys.path)
    module_name, _, qualname = target.partition(":")
    if not module_name.startswith("mettle."):
        from mettle.envs.legacy.aliases import install_verifiers_alias

        install_verifiers_alias()
    module = importlib.import_module(module_name)
    found: Any = module
    for name in qualname.split("."):
        found = getattr(found, name)
    getattr(module, "warm_up", lambda: None)()
    called: Callable[..., Any] = found
    return called


def _within(timeout_s: float, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Call `function`; the timer rings again until the call ends, in case it swallows the exception."""
    _armed[0] = True
    signal.setitimer(signal.ITIMER_PROF, timeout_s, 0.1)
    try:
        value = function(**arguments)
        return asyncio.run(value) if isinstance(value, Coroutine) else value
    finally:
        _armed[0] = False
        signal.setitimer(signal.ITIMER_PROF, 0)


def _ring(signum: int, frame: Any) -> None:
    if _armed[0]:
        raise _TimeIsOver


def _framed(answer: tuple[str, Any]) -> bytes:
    """An answer as a frame; what cannot be pickled, cannot be read back or is too large is told as text."""
    try:
        payload = pickle.dumps(answer)
        pickle.loads(payload)
        return pack(payload)
    except Exception:
        word, value = answer
        kind = type(value).__name__
        told = RuntimeError(f"{kind}: {value}" if word == "raised" else f"it returned {kind}, which cannot be pickled")
        return pack(pickle.dumps(("raised", told)))


if __name__ == "__main__":
    main()
