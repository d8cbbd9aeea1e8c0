"""Code is worth what it passes: programs and functions judged in the sandbox.

Parts: `CodeRubric`, `tests_of`, `checker_of`. A row's tests stand in `info["tests"]`, as data: `{"stdin": ...,
"expected": ...}` for programs, `{"function": ..., "args": [...], "expected": ...}` for functions, each with the fields
of its kind (`compare`, `any_order`, ...). `info["language"]` and `info["checker"]` are the row's own. Invariants:
expected outputs never enter the process that runs the code; a sandbox that fails is that rollout's `SandboxError` and
never a reward of 0; what isolation was in force is stored with the verdicts in `state["judged"]`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from mettle.envs.decorators import teardown
from mettle.envs.errors import EnvironmentFault
from mettle.envs.parsers.code_parser import CodeParser
from mettle.envs.parsers.parser import Parser
from mettle.envs.rubrics.rubric import RewardFunc, Rubric
from mettle.envs.sandboxes.shared import default_sandbox
from mettle.envs.state import State
from mettle.sandbox import (
    CallTest,
    Checker,
    InteractiveTest,
    JudgeResult,
    ProgramChecker,
    PythonChecker,
    SandboxConfig,
    SandboxPool,
    StdioTest,
    open_judge,
)
from mettle.sandbox.protocols import Judge
from mettle.sandbox.toolchains import find_language

Test = StdioTest | CallTest | InteractiveTest


class CodeRubric(Rubric):
    """`passes_all_tests` (weight 1) and the metrics `fraction_passed` and `format_has_code`.

    `timeout_s` (processor seconds) and `memory_mb` are per test. With `partial_credit` the reward is the fraction
    passed, and where a checker gives parts of a test, those parts. `language` is that of rows which name none. The pool
    of sandboxes starts with the first rollout that is scored and ends with the environment.
    """

    def __init__(
        self,
        funcs: Sequence[RewardFunc] | None = None,
        weights: Sequence[float] | None = None,
        parser: Parser | None = None,
        *,
        sandbox: SandboxConfig | None = None,
        timeout_s: float = 5.0,
        memory_mb: int = 256,
        partial_credit: bool = False,
        language: str = "python",
    ) -> None:
        self.sandbox = default_sandbox(sandbox)
        super().__init__(funcs, weights, parser or CodeParser(find_language(self.sandbox, language).names))
        self.timeout_s, self.memory_mb, self.language = timeout_s, memory_mb, language
        self._pool: Judge | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = asyncio.Lock()
        self.partial_credit = partial_credit
        # All of them wait for one judgement, which whichever comes first asks for.
        self.add_reward_func(self.passes_all_tests, 0.0 if partial_credit else 1.0)
        self.add_reward_func(self.fraction_passed, 1.0 if partial_credit else 0.0)
        self.add_metric(self.format_has_code)

    async def passes_all_tests(self, state: State) -> float:
        """1 when the code passes every test of its row."""
        return float((await self.judged(state))["has_passed"])

    async def fraction_passed(self, state: State) -> float:
        """Share of the row's tests that the code passes; what a checker gives in part counts in part."""
        return float((await self.judged(state))["score"])

    async def format_has_code(self, state: State) -> float:
        """1 when there was a complete block of code."""
        language = state["info"].get("language") or self.language
        return float(bool((self._parser_of(language).parse_answer(state["completion"]) or "").strip()))

    async def judged(self, state: State) -> dict[str, Any]:
        """The verdicts of a finished rollout as plain data, asked for once; kept in `state["judged"]`."""
        if "judged" not in state:
            state["judged"] = await self._judge(state)
        found: dict[str, Any] = state["judged"]
        return found

    async def _judge(self, state: State) -> dict[str, Any]:
        info = state["info"]
        tests, checker = tests_of(info), checker_of(info)
        language = info.get("language") or self.language
        code = self._parser_of(language).parse_answer(state["completion"]) or ""
        if not code.strip():
            return _no_code(len(tests))
        pool = await self._started()
        stop_early = not self.partial_credit
        result = await pool.judge(
            code,
            tests,
            timeout_s=self.timeout_s,
            memory_mb=self.memory_mb,
            language=language,
            checker=checker,
            stop_at_first_failure=stop_early,
        )
        return _as_data(result)

    def _parser_of(self, language: str) -> Parser:
        """The rubric's parser; for a row of another language one that knows the marks of that language's code."""
        if language == self.language or not isinstance(self.parser, CodeParser):
            return self.parser
        return CodeParser(find_language(self.sandbox, language).names)

    async def _started(self) -> Judge:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # a pool belongs to a loop; `evaluate_sync` brings a new one each time
            self._abandon()
            self._loop, self._starting = loop, asyncio.Lock()
        async with self._starting:
            if self._pool is None:
                self._pool = await self._open_judge().__aenter__()
        return self._pool

    def _open_judge(self) -> Judge:
        return open_judge(self.sandbox)

    def _abandon(self) -> None:
        """End the pool of a loop that has ended: with its template process, every cell goes."""
        pid = self._pool.template_pid if isinstance(self._pool, SandboxPool) else None
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._pool = None

    @teardown
    async def close_pool(self) -> None:
        """End the sandboxes. The next rollout that is scored starts others."""
        if self._pool is not None and self._loop is asyncio.get_running_loop():
            pool, self._pool = self._pool, None
            await pool.close()
        else:
            self._abandon()


def tests_of(info: Mapping[str, Any]) -> list[Test]:
    """The tests of a row, from its `info["tests"]`: a list, or the same as JSON text.

    Raises: EnvironmentFault when there are none, or one is neither of the two kinds.
    """
    given = info.get("tests")
    rows = json.loads(given) if isinstance(given, str) else given
    if not rows:
        raise EnvironmentFault("the row has no tests; info['tests'] is a list of stdin or function tests")
    return [_test(dict(row)) for row in rows]


def checker_of(info: Mapping[str, Any]) -> Checker | None:
    """The checker of a row, from its `info["checker"]`: Python source, or a mapping (or the same as JSON text).

    A mapping with a `language` or `files` is a program in the convention of testlib; any other is Python.
    Raises: EnvironmentFault when it is neither.
    """
    given = info.get("checker")
    if not given:
        return None
    row = json.loads(given) if isinstance(given, str) and given.lstrip().startswith("{") else given
    row = {"code": row} if isinstance(row, str) else dict(row)
    kind: type[Checker] = ProgramChecker if {"language", "files", "max_points"} & set(row) else PythonChecker
    if "code" not in row or set(row) - {field.name for field in fields(kind)}:
        raise EnvironmentFault(f"a checker with {sorted(row)} is neither Python source nor a program")
    return kind(**row)


def _test(row: dict[str, Any]) -> Test:
    kind: type[Test] = CallTest if "function" in row else InteractiveTest if "interactor" in row else StdioTest
    known = {field.name for field in fields(kind)}
    if set(row) - known or ("expected" not in row and kind is not InteractiveTest):
        raise EnvironmentFault(f"a test with {sorted(row)} is neither a stdin, nor a function, nor an interactive test")
    if kind is InteractiveTest:
        row["interactor"] = _interactor(row["interactor"])
    if kind is CallTest:
        row["args"] = tuple(row.get("args", ()))
    return kind(**row)


def _interactor(given: Any) -> ProgramChecker:
    row = dict(given) if isinstance(given, Mapping) else {}
    if "code" not in row or set(row) - {field.name for field in fields(ProgramChecker)}:
        raise EnvironmentFault("a test's interactor is a mapping with its code, and what else a ProgramChecker has")
    return ProgramChecker(**row)


def _no_code(num_tests: int) -> dict[str, Any]:
    return {
        "has_passed": False,
        "num_passed": 0,
        "num_tests": num_tests,
        "score": 0.0,
        "verdicts": [],
        "isolation": None,
    }


def _as_data(result: JudgeResult) -> dict[str, Any]:
    return {
        "has_passed": result.has_passed,
        "num_passed": result.num_passed,
        "num_tests": result.num_tests,
        "score": result.score,
        "verdicts": [str(test.verdict) for test in result.tests],
        "first_failure": next((test.detail for test in result.tests if not test.has_passed), None),
        "isolation": result.isolation.grade,
        "wall_s": result.wall_s,
    }
