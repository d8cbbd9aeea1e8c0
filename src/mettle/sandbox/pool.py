"""The pool: cells kept warm, solutions judged in them, and no way to reach the host from inside.

    pool.judge(code, tests)
        make_job          what the caller got wrong is said before anything runs
        a slot            at most `max_running` at a time; waiting is not counted against the code
        a cell            a warm one, or one made on the spot; used once
        one test a time   input out, report back, verdict here
        refill            behind the running work

Invariant: a cell runs one solution and is destroyed. When a cell is lost the test is tried again in a new one; a test
that loses every cell it is given is the code's own doing (`killed`), and a template that keeps dying is ours
(`SandboxError`), never a wrong answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from mettle.errors import SandboxError, UserError
from mettle.sandbox import isolation
from mettle.sandbox.cells import Cell, CellLost
from mettle.sandbox.config import SandboxConfig
from mettle.sandbox.isolation import IsolationReport
from mettle.sandbox.keeper import MAX_DEATHS, TemplateKeeper, why_not_ready
from mettle.sandbox.orders import Job, judge_report, killed_result, make_job
from mettle.sandbox.verdicts import JudgeResult, StdioTest, Test, TestResult

logger = logging.getLogger(__name__)

_CELL_READY_S: Final = 30.0
_MAX_CELLS_PER_TEST: Final = 2
_EXPLORER: Final = Path(__file__).with_name("explorer.py")


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Counters since the pool started, and what it holds now."""

    num_judged: int = 0
    num_warm_hits: int = 0
    num_cells: int = 0
    num_cells_lost: int = 0
    num_templates: int = 0
    num_warm: int = 0
    num_running: int = 0


class SandboxPool:
    """Judges untrusted code. Use as `async with SandboxPool(config) as pool`."""

    def __init__(self, config: SandboxConfig | None = None) -> None:
        self.config = config or SandboxConfig()
        self._slots = asyncio.Semaphore(self.config.max_running)
        self._warm: deque[Cell] = deque()
        self._keeper = TemplateKeeper(self.config, self._forget_warm)
        self._needs_refill = asyncio.Event()
        self._refiller: asyncio.Task[None] | None = None
        self._isolation: IsolationReport | None = None
        self._stats = PoolStats()

    @property
    def isolation(self) -> IsolationReport:
        """What was measured to be in force when the pool started."""
        if self._isolation is None:
            raise UserError("the sandbox pool has not been started; use `async with SandboxPool(...) as pool`")
        return self._isolation

    @property
    def template_pid(self) -> int | None:
        """The process whose end ends every cell."""
        return self._keeper.template.pid if self._keeper.template else None

    @property
    def stats(self) -> PoolStats:
        return replace(self._stats, num_warm=len(self._warm), num_templates=self._keeper.num_templates)

    async def __aenter__(self) -> Self:
        try:
            report = await self.measure()
            isolation.check(report, self.config)
        except BaseException:
            await self.close()
            raise
        self._isolation = report
        self._refiller = asyncio.create_task(self._keep_warm(), name="sandbox refill")
        self._needs_refill.set()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def measure(self) -> IsolationReport:
        """Find out what is in force here, by running code that tries the doors."""
        if self.config.backend == "unsafe":
            await self._keeper.living()
            return isolation.unisolated(self.config)
        template = await self._keeper.living()
        if not template.is_ready:
            return isolation.refused(self.config, template.layers)
        job = make_job(self.config, await asyncio.to_thread(_EXPLORER.read_text, "utf-8"), [StdioTest()])
        [result] = await self._run(job)
        if result.exit_code != 0:
            raise SandboxError(f"the look at the sandbox's isolation failed: {result.detail}")
        return isolation.examine(self.config, json.loads(result.output), template.layers)

    async def judge(
        self,
        code: str,
        tests: Sequence[Test],
        *,
        timeout_s: float | None = None,
        memory_mb: int | None = None,
        language: str = "python",
        stop_at_first_failure: bool = False,
    ) -> JudgeResult:
        """Run the code against each test, in order, each in a process and file system of its own.

        `timeout_s` is processor time per test; the wall limit is the larger of three times that and two seconds more.
        Raises: UserError for what the caller got wrong; SandboxError if the sandbox itself failed. Whatever the code
        does is a verdict.
        """
        report = self.isolation
        job = make_job(
            self.config,
            code,
            tests,
            timeout_s=timeout_s,
            memory_mb=memory_mb,
            language=language,
            stop_at_first_failure=stop_at_first_failure,
        )
        queued = time.monotonic()
        async with self._slots:
            started = time.monotonic()
            self._stats = replace(self._stats, num_running=self._stats.num_running + 1)
            try:
                results = await self._run(job)
            finally:
                stats = self._stats
                self._stats = replace(stats, num_running=stats.num_running - 1, num_judged=stats.num_judged + 1)
                self._needs_refill.set()
        return JudgeResult(tuple(results), len(tests), report, started - queued, time.monotonic() - started)

    async def close(self) -> None:
        """End every cell and the template. Safe to call twice."""
        if self._refiller is not None:
            self._refiller.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._refiller
            self._refiller = None
        for cell in self._take_warm():
            await cell.wait_closed()
        await self._keeper.close()
        self._isolation = None

    async def _run(self, job: Job) -> list[TestResult]:
        """All tests, across as many cells as it takes."""
        results: list[TestResult] = []
        num_lost, num_templates_lost = 0, 0
        while not job.is_over(results):
            num_before = len(results)
            async with self._cell() as cell:
                try:
                    await self._run_in(cell, job, results)
                    continue
                except CellLost as error:
                    lost = error
            self._stats = replace(self._stats, num_cells_lost=self._stats.num_cells_lost + 1)
            num_lost = num_lost + 1 if len(results) == num_before else 1
            if self._keeper.has_lost(cell.generation):
                num_templates_lost += 1
                num_lost -= 1
                if num_templates_lost >= MAX_DEATHS:
                    raise SandboxError("the sandbox's template process keeps dying under this test") from lost
            elif num_lost >= _MAX_CELLS_PER_TEST:
                results.append(killed_result(job.tests[len(results)], f"its cell was lost {num_lost} times: {lost}"))
                num_lost = 0
        return results

    async def _run_in(self, cell: Cell, job: Job, results: list[TestResult]) -> None:
        """The tests that have no result yet, in one cell, until one of them wears it out."""
        await cell.load(job.source)
        for number in range(len(results), len(job.tests)):
            order, is_last = job.orders[number], number == len(job.tests) - 1
            report = await cell.run(number, order, is_last=is_last)
            results.append(judge_report(job.tests[number], order, report))
            if report.is_worn or job.is_over(results):
                return

    @contextlib.asynccontextmanager
    async def _cell(self) -> AsyncIterator[Cell]:
        """A cell for one solution; destroyed at the end, however the end comes."""
        cell = await self._take_cell()
        try:
            yield cell
        finally:
            cell.close()
            if not cell.is_finished:
                # Process 1 ends when the connection does; this is for one that no longer can.
                await asyncio.shield(self._keeper.kill(cell.number, cell.generation))

    async def _take_cell(self) -> Cell:
        while self._warm:
            cell = self._warm.popleft()
            if cell.is_alive and not self._keeper.has_lost(cell.generation):
                self._stats = replace(self._stats, num_warm_hits=self._stats.num_warm_hits + 1)
                return cell
            cell.close()
        return await self._make_cell()

    async def _make_cell(self) -> Cell:
        """A ready cell, from a template that is started if need be."""
        while True:
            template = await self._keeper.living()
            if not template.is_ready:
                raise SandboxError(
                    f"the sandbox's template process cannot make cells any more: {why_not_ready(template)}"
                )
            cell = await template.spawn()
            try:
                await cell.wait_ready(_CELL_READY_S)
            except CellLost:
                cell.close()
                if template.is_alive:
                    raise
                continue
            except BaseException:
                cell.close()
                raise
            self._stats = replace(self._stats, num_cells=self._stats.num_cells + 1)
            return cell

    def _forget_warm(self) -> None:
        for cell in self._take_warm():
            cell.close()

    def _take_warm(self) -> list[Cell]:
        cells = list(self._warm)
        self._warm.clear()
        return cells

    async def _keep_warm(self) -> None:
        """Fill the pool up to its target, one cell at a time, whenever work has used some."""
        while True:
            await self._needs_refill.wait()
            self._needs_refill.clear()
            try:
                while len(self._warm) < self.config.warm:
                    self._warm.append(await self._make_cell())
            except SandboxError as error:
                logger.warning("the sandbox pool could not be refilled: %s", error)


def probe(config: SandboxConfig | None = None) -> IsolationReport:
    """What isolation this host gives, found out by starting a sandbox and trying its doors (about 0.1 s).

    The report is the same whether or not it is enough for the config.
    """

    async def measured() -> IsolationReport:
        pool = SandboxPool(config)
        try:
            return await pool.measure()
        finally:
            await pool.close()

    return asyncio.run(measured())
