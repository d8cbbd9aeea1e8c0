"""Judgements that a pool remembers, where its config asks for it: rollouts of one group repeat each other's code.

Only what would come out the same is kept: every test `passed`, `wrong` or `error`. A time-out, a limit, a signal or a
failure of the sandbox is never kept. The same judgement asked for twice at once is run once, and whoever waited judges
for himself when what came out is not kept.
Invariant: two judgements are the same only if code, language, tests, limits and checker are equal, type by type.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from typing import Final

from mettle.sandbox.judge.orders import JudgeJob
from mettle.sandbox.judge.verdicts import JudgeResult, Verdict
from mettle.sandbox.zygote import values

_MAX_BYTES: Final = 64 << 20
_BYTES_PER_TEST: Final = 512
_KEPT: Final = (Verdict.PASSED, Verdict.WRONG, Verdict.ERROR)


class JudgementCache:
    """The results of one pool, the ones unused longest forgotten first."""

    def __init__(self, max_results: int, max_bytes: int = _MAX_BYTES) -> None:
        self._max_results, self._max_bytes = max_results, max_bytes
        self._results: OrderedDict[bytes, tuple[JudgeResult, int]] = OrderedDict()
        self._running: dict[bytes, asyncio.Event] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._results)

    async def judged(self, job: JudgeJob, judge: Callable[[], Awaitable[JudgeResult]]) -> JudgeResult:
        """The result of this job: remembered, or what `judge` gives."""
        key = _key(job) if self._max_results else None
        if key is None:
            return await judge()
        if (running := self._running.get(key)) is not None:
            await running.wait()
        if key in self._results:
            self._results.move_to_end(key)
            return replace(self._results[key][0], queue_s=0.0, wall_s=0.0, compile_s=0.0, is_remembered=True)
        if key in self._running:  # another that waited has begun
            return await judge()
        self._running[key] = asyncio.Event()
        try:
            result = await judge()
            self._keep(key, result)
            return result
        finally:
            self._running.pop(key).set()

    def _keep(self, key: bytes, result: JudgeResult) -> None:
        num_bytes = _size(result)
        if not all(test.verdict in _KEPT for test in result.tests) or num_bytes > self._max_bytes:
            return
        self._results[key] = result, num_bytes
        self.num_bytes += num_bytes
        while len(self._results) > self._max_results or self.num_bytes > self._max_bytes:
            self.num_bytes -= self._results.popitem(last=False)[1][1]


def _key(job: JudgeJob) -> bytes | None:
    """None where a test holds more than plain values, of which nobody can say whether they are equal."""
    asked = [asdict(test) | {"kind": type(test).__name__} for test in job.tests]
    limits = [(order.cpu_s, order.wall_s, order.memory_bytes, order.output_bytes) for order in job.orders]
    checkers = [
        None
        if asks is None
        else (type(asks.checker).__name__, asdict(asks.checker), asks.source.key(), asks.limits.timeout_s)
        for asks in (job.checker, *job.interactors)
    ]
    try:
        encoded = values.encode([asked, limits, checkers, job.should_stop_early])
    except values.UnencodableValue:
        return None
    return hashlib.sha256(job.source.key() + encoded).digest()


def _size(result: JudgeResult) -> int:
    """About what it takes: texts count three bytes a character, and a value as much as it is long when shown."""
    return sum(
        _BYTES_PER_TEST
        + 3 * (len(test.stdout) + len(test.stderr) + len(test.transcript) + len(test.detail))
        + 3 * (len(str(test.output)) + len(str(test.expected)))
        for test in result.tests
    )
