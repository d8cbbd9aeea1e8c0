"""What a judge is asked, as one value; and the one place where the arguments of `judge` stand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mettle.sandbox.judge.verdicts import Checker, JudgeResult, Test


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
