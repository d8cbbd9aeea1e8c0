"""One solution judged: built once, then its tests run across as many cells as it takes.

    files     the builder's, unless it is Python
    workers   one, or `num_parallel` of them; each takes the next test, in a cell that it keeps while the cell is clean
    checker   asked by the worker, in a cell of the checker's own

Invariant: a test's result stands at the test's place, whoever ran it; after a failure that ends the judgement, no test
behind it is reported. When a cell is lost the test is tried again in a new one; a test that loses every cell it is
given is the code's own doing (`killed`), and a template that keeps dying is ours (`SandboxError`).
"""

from __future__ import annotations

import asyncio

from mettle.sandbox.judge.builds import Builder, CellSource, CompileFailure, Losses
from mettle.sandbox.judge.cells import CellLost, JudgeCell, ProgramFile
from mettle.sandbox.judge.checking import Asker
from mettle.sandbox.judge.dialogues import Dialogue
from mettle.sandbox.judge.orders import JudgeJob
from mettle.sandbox.judge.referee import Referee
from mettle.sandbox.judge.reports import compile_failure, killed_result, with_opinion
from mettle.sandbox.judge.verdicts import CallTest, InteractiveTest, TestResult


class Judgement:
    """The tests of one job that are waiting, and the results of those that are not."""

    def __init__(self, cells: CellSource, builder: Builder, referee: Referee, job: JudgeJob) -> None:
        self.job = job
        self.referee = referee
        self.cells = cells
        self.builder = builder
        self.files: tuple[ProgramFile, ...] = ()
        self.compile_s = 0.0
        self.results: list[TestResult | None] = [None] * len(job.tests)
        self._num_taken = 0
        self._num_wanted = len(job.tests)  # less once a failure has ended the judgement

    async def run(self) -> list[TestResult]:
        """Every result, or those up to the first failure. The caller holds a slot for the first worker."""
        if self.job.source.cell is not None:
            build = await self.builder.build(self.job.source)
            self.files, self.compile_s = build.files, build.wall_s
            if build.failure is not None:
                return self._failures(build.failure)
        num_workers = min(self.job.num_parallel, len(self.job.tests))
        if num_workers == 1:
            await CellWorker(self).work()
        else:
            await self._run_workers(num_workers)
        return [result for result in self.results[: self._num_wanted] if result is not None]

    @property
    def has_more(self) -> bool:
        return self._num_taken < self._num_wanted

    def take(self) -> int | None:
        """The number of the next test, for the worker that asks."""
        if not self.has_more:
            return None
        self._num_taken += 1
        return self._num_taken - 1

    def settle(self, number: int, result: TestResult) -> None:
        """Keep a result; the first failure may end the judgement."""
        self.results[number] = result
        if self.job.should_stop_early and not result.has_passed:
            self._num_wanted = min(self._num_wanted, number + 1)

    async def _run_workers(self, num_workers: int) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(CellWorker(self).work())
                for _ in range(num_workers - 1):
                    group.create_task(self._work_in_a_slot())
        except BaseExceptionGroup as group_error:
            raise group_error.exceptions[0] from group_error

    async def _work_in_a_slot(self) -> None:
        async with self.cells.slot():
            await CellWorker(self).work()

    def _failures(self, failure: CompileFailure) -> list[TestResult]:
        tests = self.job.tests[:1] if self.job.should_stop_early else self.job.tests
        if failure.report is None:
            return [killed_result(test, failure.ending.detail, "compile") for test in tests]
        return [compile_failure(test, failure.report, failure.ending) for test in tests]


class CellWorker:
    """Runs one test after another."""

    def __init__(self, judgement: Judgement) -> None:
        self._judgement = judgement
        self._job = judgement.job
        self._losses = Losses(judgement.cells)
        self._number: int | None = None  # of the test that has been taken and has no result yet
        asked = judgement.job.checker
        self._asker = Asker(judgement.cells, judgement.builder, asked) if asked is not None else None

    async def work(self) -> None:
        """Until no test is left."""
        try:
            while self._number is not None or self._judgement.has_more:
                await self._use_a_cell()
        finally:
            if self._asker is not None:
                await self._asker.close()

    async def _use_a_cell(self) -> None:
        """The tests that one cell can take."""
        if self._number is None:
            self._number = self._judgement.take()
        if self._number is not None and self._job.interactors[self._number] is not None:
            await self._converse(self._number)
            return
        async with self._judgement.cells.cell(self._job.source.cell) as cell:
            try:
                await self._run_in(cell)
                return
            except CellLost as error:
                lost = error
        is_codes_own = self._losses.is_codes_own(cell, lost)
        if is_codes_own and self._number is not None:
            detail = f"its cell was lost again and again: {lost}"
            self._settle(killed_result(self._job.tests[self._number], detail))

    async def _converse(self, number: int) -> None:
        """One interactive test, in two cells that serve nothing else."""
        test, order, asked = self._job.tests[number], self._job.orders[number], self._job.interactors[number]
        assert isinstance(test, InteractiveTest), "only these have interactors"
        assert asked is not None, "only these come here"
        talk = Dialogue(self._judgement.cells, self._judgement.builder, asked)
        async with self._judgement.cells.cell(self._job.source.cell) as cell:
            try:
                self._load(cell)
                self._settle(await talk.hold(cell, test, order, self._job.source.language))
                return
            except CellLost as error:
                lost = error
        if self._losses.is_codes_own(cell, lost):
            self._settle(killed_result(test, f"its cell was lost again and again: {lost}"))

    async def _run_in(self, cell: JudgeCell) -> None:
        self._load(cell)
        is_usable = True
        while is_usable:
            if self._number is None:
                self._number = self._judgement.take()
            if self._number is None or self._job.interactors[self._number] is not None:
                return
            is_usable = await self._run_test(cell, self._number)

    def _load(self, cell: JudgeCell) -> None:
        if self._job.source.cell is None:
            cell.load(self._job.source.code)
        else:
            cell.load_files(self._judgement.files)

    async def _run_test(self, cell: JudgeCell, number: int) -> bool:
        """One test; whether the cell can take another."""
        test, order = self._job.tests[number], self._job.orders[number]
        report = await cell.run(number, order, is_last=not self._judgement.has_more)
        language, is_checked = self._job.source.language, self._asker is not None
        result = await self._judgement.referee.judge(test, order, report, language, is_checked=is_checked)
        if self._asker is not None and result.has_passed:
            assert not isinstance(test, InteractiveTest), "these go with no checker"
            output = result.output if isinstance(test, CallTest) else report.stdout
            result = with_opinion(result, await self._asker.opinion(test, output))
        self._settle(result)
        return not cell.is_finished

    def _settle(self, result: TestResult) -> None:
        assert self._number is not None, "a result belongs to a test"
        self._judgement.settle(self._number, result)
        self._number = None
        self._losses.forget()
