"""What a judge is asked, as one value; and the one place where the arguments of `judge` stand."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from mettle.sandbox.judge.verdicts import CallTest, Checker, JudgeResult, Test

_MOST_HERE: Final = 2000


@dataclass(frozen=True, slots=True)
class JudgeRequest:
    """Code, its tests, and how they are to be run. Limits that are None are the language's, or the pool's."""

    code: str
    tests: Sequence[Test]
    timeout_s: float | None = None
    memory_mb: int | None = None
    language: str = "python"
    checker: Checker | None = None
    stop_at_first_failure: bool = False
    num_parallel: int = 1


def has_many_values(tests: Sequence[Test]) -> bool:
    """Whether tests take so long to encode that it is done in a thread; looks at a few thousand values at most."""
    if len(tests) > _MOST_HERE:
        return True
    left: list[object] = [value for test in tests if isinstance(test, CallTest) for value in (test.args, test.kwargs)]
    for _ in range(_MOST_HERE):
        if not left:
            return False
        one = left.pop()
        if isinstance(one, dict):
            left.extend(itertools.islice(one.values(), _MOST_HERE))
        elif isinstance(one, list | tuple | set | frozenset):
            left.extend(itertools.islice(one, _MOST_HERE))
    return True


class CodeJudge(Protocol):
    """`judge` for people, made of `judge_request`, which is what an implementation has."""

    async def judge(
        self,
        code: str,
        tests: Sequence[Test],
        *,
        timeout_s: float | None = None,
        memory_mb: int | None = None,
        language: str = "python",
        checker: Checker | None = None,
        stop_at_first_failure: bool = False,
        num_parallel: int = 1,
    ) -> JudgeResult:
        """The verdict of the code on each test, each run in a process and file system of its own.

        `timeout_s` is processor time per test; the wall limit is the larger of three times that and two seconds more.
        `checker` decides instead of the tests' rules. Up to `num_parallel` tests run at once, where slots are free.
        Raises: UserError for what the caller got wrong; SandboxError if the sandbox itself failed, CheckerError if the
        checker did. Whatever the code does is a verdict.
        """
        return await self.judge_request(
            JudgeRequest(code, tests, timeout_s, memory_mb, language, checker, stop_at_first_failure, num_parallel)
        )

    async def judge_request(self, request: JudgeRequest) -> JudgeResult:
        """The same of a request that has been put together."""
        ...
