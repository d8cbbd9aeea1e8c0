"""Asking a job's checker, in a cell that the solution has never been in. One asker belongs to one worker.

Invariant: expected outputs go to the checker's cell and to no other; a broken checker is never a verdict.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Final

from mettle.sandbox.judge.builds import Builder, CellSource, Losses
from mettle.sandbox.judge.cells import CellLost, JudgeCell, ProgramFile, TestOrder, TestReport
from mettle.sandbox.judge.checkers import CheckerError, Opinion, read_exit, read_value
from mettle.sandbox.judge.orders import CHECKED_FILES, CheckerJob, as_bytes, check_order, checker_program_order
from mettle.sandbox.judge.reports import judge_end
from mettle.sandbox.judge.verdicts import ProgramChecker, StdioTest, Test, Verdict
from mettle.sandbox.zygote import values

_NO_EXIT: Final = -1
_MAX_ANSWER_BYTES: Final = 64 << 10


class Asker:
    """Holds the checker's cell from the first question to `close`."""

    def __init__(self, cells: CellSource, builder: Builder, job: CheckerJob) -> None:
        self._cells = cells
        self._builder = builder
        self._job = job
        self._files: tuple[ProgramFile, ...] = ()
        self._held = contextlib.AsyncExitStack()
        self._cell: JudgeCell | None = None
        self._is_loaded = False

    async def close(self) -> None:
        """End the checker's cell."""
        self._cell = None
        await self._held.aclose()

    async def opinion(self, test: Test, output: Any) -> Opinion:
        """What the checker says. One that breaks on this output, but not on the expected one, says that it is wrong."""
        try:
            return await self._ask(test, output)
        except values.UnencodableValue as error:
            return Opinion(0.0, f"the value cannot be given to the checker: {error}")
        except CheckerError as error:
            if not await self._accepts_expected(test):
                raise
            return Opinion(0.0, f"the checker cannot read the output: {error}")

    async def _accepts_expected(self, test: Test) -> bool:
        try:
            return (await self._ask(test, test.expected)).score == 1.0
        except CheckerError:
            return False

    async def _ask(self, test: Test, output: Any) -> Opinion:
        if isinstance(self._job.checker, ProgramChecker):
            return await self._ask_program(self._job.checker, test, output)
        order = await asyncio.to_thread(check_order, self._job, test, test.expected, output)
        report = await self._run(order, ())
        self._check_end(order, report)
        if len(report.value) > _MAX_ANSWER_BYTES:
            raise CheckerError(f"the checker's answer has {len(report.value):,} bytes; it is a score and words")
        try:
            return read_value(values.decode(report.value))
        except values.UnencodableValue as error:
            raise CheckerError(f"the checker returned no answer: {error}") from error

    async def _ask_program(self, checker: ProgramChecker, test: Test, output: Any) -> Opinion:
        assert isinstance(test, StdioTest), "function tests are refused before"
        given = (test.stdin, output, test.expected)
        files = [ProgramFile(name, as_bytes(data, name)) for name, data in zip(CHECKED_FILES, given, strict=True)]
        order = checker_program_order(self._job)
        report = await self._run(order, files)
        exit_code = report.status >> 8 if report.ended == "exit" and not report.status & 0x7F else _NO_EXIT
        if exit_code == _NO_EXIT or report.cpu_s > order.cpu_s or report.memory_bytes > order.memory_bytes:
            self._check_end(order, report)
        printed = (report.stderr.strip() or report.stdout).decode(errors="replace")
        return read_exit(exit_code, printed, checker.max_points)

    def _check_end(self, order: TestOrder, report: TestReport) -> None:
        verdict, detail = judge_end(order, report, self._job.source.language)
        if verdict is not Verdict.PASSED:
            raise CheckerError(f"the checker did not finish ({verdict}): {detail}")

    async def _run(self, order: TestOrder, files: list[ProgramFile] | tuple[()]) -> TestReport:
        losses = Losses(self._cells)
        while True:
            cell = self._cell or await self._take_cell()
            try:
                self._load(cell)
                if self._job.source.cell is not None:
                    cell.load_files([*self._files, *files])
                report = await cell.run(0, order, is_last=False)
            except CellLost as error:
                await self.close()
                if losses.is_codes_own(cell, error):
                    raise CheckerError(f"the checker's cell was lost: {error}") from error
                continue
            if report.is_worn:
                await self.close()
            return report

    async def _take_cell(self) -> JudgeCell:
        if self._job.source.cell is not None:
            self._files = await self._build()
        self._cell = await self._held.enter_async_context(self._cells.cell(self._job.source.cell))
        self._is_loaded = False
        return self._cell

    def _load(self, cell: JudgeCell) -> None:
        """Send the checker itself, once; a program goes with the files of each question."""
        if self._job.source.cell is None and not self._is_loaded:
            cell.load(self._job.source.code)
            self._is_loaded = True

    async def _build(self) -> tuple[ProgramFile, ...]:
        build = await self._builder.build(self._job.source)
        if build.failure is not None:
            words = build.failure.report.stderr.decode(errors="replace")[:500] if build.failure.report else ""
            raise CheckerError(f"the checker {build.failure.ending.detail}\n{words}")
        return build.files
