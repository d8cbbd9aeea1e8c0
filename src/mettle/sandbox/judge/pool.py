"""The pool: cells kept warm, solutions judged in them, and no way to reach the host from inside.

    pool.judge(code, tests)
        make_job          what the caller got wrong is said before anything runs
        a slot            at most `max_running` at a time; waiting is not counted against the code
        a judgement       builds the code if need be, runs the tests in cells, asks the checker
        refill            behind the running work, with cells of the kinds that were last used

Invariant: a cell runs one solution and is destroyed; a sandbox that fails is a `SandboxError` and never a wrong answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

from mettle.errors import SandboxError, UserError
from mettle.sandbox import isolation
from mettle.sandbox.cgroups import Absence, CellCgroup, CgroupHome, find_home
from mettle.sandbox.config import SandboxConfig
from mettle.sandbox.isolation import IsolationReport
from mettle.sandbox.judge.builds import Builder
from mettle.sandbox.judge.cells import CellLost, JudgeCell
from mettle.sandbox.judge.judgement import Judgement
from mettle.sandbox.judge.memory import JudgementCache
from mettle.sandbox.judge.orders import JudgeJob, make_job
from mettle.sandbox.judge.referee import Referee
from mettle.sandbox.judge.request import CodeJudge, JudgeRequest, has_many_values
from mettle.sandbox.judge.verdicts import JudgeResult, StdioTest
from mettle.sandbox.judge.versions import report_language
from mettle.sandbox.keeper import TemplateKeeper, why_not_ready
from mettle.sandbox.languages import LanguageReport
from mettle.sandbox.own_limits import limits_hint
from mettle.sandbox.pools import MeasuredPool
from mettle.sandbox.templates import TemplateProcess
from mettle.sandbox.toolchains import known_languages
from mettle.sandbox.zygote.settings import CellLimits

logger = logging.getLogger(__name__)

_CELL_READY_S: Final = 30.0
_MAX_KINDS_KEPT: Final = 3
_NEEDS_PROCESSES: Final = (
    "it starts processes, and isolation 'landlock-only' allows a test none; `mettle sandbox doctor` says what the host "
    "must allow for 'ns'"
)
_EXPLORER: Final = Path(__file__).parent.with_name("explorer.py")


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Counters since the pool started, and what it holds now."""

    num_judged: int = 0
    num_remembered: int = 0
    num_warm_hits: int = 0
    num_cells: int = 0
    num_cells_lost: int = 0
    num_templates: int = 0
    num_warm: int = 0
    num_running: int = 0


class SandboxPool(MeasuredPool, CodeJudge):
    """Judges untrusted code. Use as `async with SandboxPool(config) as pool`."""

    def __init__(self, config: SandboxConfig | None = None, keeper: TemplateKeeper | None = None) -> None:
        super().__init__(config)
        self._slots = asyncio.Semaphore(self.config.max_running)
        # Cells that wait, by what they are like; the kind used last comes last, and Python's is never let go.
        self._warm: dict[CellLimits | None, deque[JudgeCell]] = {None: deque()}
        self._builder = Builder(self)
        self._referee = Referee()
        self._memory = JudgementCache(self.config.max_remembered)
        self._keeper = keeper or TemplateKeeper(self.config, self._forget_warm, can_do_alone=True)
        self._cgroups: CgroupHome | None = None
        self._cpu_meter = ""  # what the last cell that was made says to have
        self._needs_refill = asyncio.Event()
        self._refiller: asyncio.Task[None] | None = None
        self._stats = PoolStats()

    @property
    def template_pid(self) -> int | None:
        """The process whose end ends every cell."""
        return self._keeper.template.pid if self._keeper.template else None

    @property
    def stats(self) -> PoolStats:
        return replace(
            self._stats, num_warm=sum(map(len, self._warm.values())), num_templates=self._keeper.num_templates
        )

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._refiller = asyncio.create_task(self._keep_warm(), name="sandbox refill")
        self._needs_refill.set()
        return self

    async def measure(self) -> IsolationReport:
        template = await self._keeper.living()
        if self.config.backend == "unsafe":
            return isolation.unisolated(self.config)
        if not template.is_ready:
            return isolation.refused(self.config, {**self._keeper.refusals, **template.layers})
        why_no_cgroup = await self._find_cgroups(template)
        plain = self.config.model_copy(update={"languages": ()})
        source = await asyncio.to_thread(_EXPLORER.read_text, "utf-8")
        job = make_job(plain, JudgeRequest(source, [StdioTest("alone" if template.is_landlocked else "")]))
        [result] = await Judgement(self, self._builder, self._referee, job).run()
        if result.exit_code != 0:
            raise SandboxError(f"the look at the sandbox's isolation failed: {result.detail}{limits_hint()}")
        found = json.loads(result.output)
        if template.is_landlocked:
            report = isolation.examine_alone(self.config, found, self._keeper.refusals)
        else:
            report = isolation.examine(self.config, found, template.layers, template.host_ids)
        return isolation.with_meter(report, self.config, self._cpu_meter, template.why_no_event, why_no_cgroup)

    async def _find_cgroups(self, template: TemplateProcess) -> str:
        """Where cells are to have cgroups for their processor time, a directory for them; or why there is none."""
        if self.config.cpu_meter == "cgroup" or (self.config.cpu_meter == "auto" and template.why_no_event):
            found = await asyncio.to_thread(find_home)
            if isinstance(found, Absence):
                return found.why
            self._cgroups = found
        return ""

    def _make_cgroup(self) -> CellCgroup | None:
        try:
            return self._cgroups.make_for_cell() if self._cgroups is not None else None
        except OSError as error:
            raise SandboxError(f"the sandbox cannot make a cgroup for a cell: {error}") from error

    async def judge_request(self, request: JudgeRequest) -> JudgeResult:
        report = self.isolation
        is_long = has_many_values(request.tests)
        job = await asyncio.to_thread(make_job, self.config, request) if is_long else make_job(self.config, request)
        self._require_processes(job)
        judged = await self._memory.judged(job, lambda: self._judge(job, report))
        stats = self._stats
        self._stats = replace(
            stats, num_judged=stats.num_judged + 1, num_remembered=stats.num_remembered + judged.is_remembered
        )
        return judged

    async def _judge(self, job: JudgeJob, report: IsolationReport) -> JudgeResult:
        judgement = Judgement(self, self._builder, self._referee, job)
        queued = time.monotonic()
        async with self.slot():
            started = time.monotonic()
            results = await judgement.run()
        return JudgeResult(
            tests=tuple(results),
            num_tests=len(job.tests),
            isolation=report,
            queue_s=started - queued,
            wall_s=time.monotonic() - started,
            language=job.source.language.name,
            compile_s=judgement.compile_s,
        )

    async def languages(self) -> tuple[LanguageReport, ...]:
        """What can be judged here: each language's version, as a program in a cell prints it, or what is missing."""
        known = known_languages(self.config).values()
        is_alone = self.isolation.grade == "landlock-only"
        return tuple(
            [
                LanguageReport(spec.name, spec.aliases, False, missing=_NEEDS_PROCESSES)
                if is_alone and not spec.is_warm
                else await report_language(self, self.config, spec)
                for spec in known
            ]
        )

    def _require_processes(self, job: JudgeJob) -> None:
        others = {asked.source for asked in (job.checker, *job.interactors) if asked is not None}
        sources = [job.source, *others]
        for source in sources if self.isolation.grade == "landlock-only" else ():
            if not source.language.is_warm:
                raise UserError(f"{source.language.name} cannot be judged here: {_NEEDS_PROCESSES}")

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
        self._referee.close()
        if self._cgroups is not None:
            await self._cgroups.remove()
            self._cgroups = None
        self._isolation = None

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """The right to run one solution, or one of its tests beside others of it."""
        async with self._slots:
            self._stats = replace(self._stats, num_running=self._stats.num_running + 1)
            try:
                yield
            finally:
                self._stats = replace(self._stats, num_running=self._stats.num_running - 1)
                self._needs_refill.set()

    @contextlib.asynccontextmanager
    async def cell(self, limits: CellLimits | None) -> AsyncIterator[JudgeCell]:
        """A cell for one solution; destroyed at the end, however the end comes."""
        cell = await self._take_cell(limits)
        try:
            yield cell
        finally:
            cell.close()
            if not cell.is_finished:
                # Process 1 ends when the connection does; this is for one that no longer can.
                await asyncio.shield(self._keeper.kill(cell.number, cell.generation))

    def note_lost(self, cell: JudgeCell) -> bool:
        """Count a lost cell; whether the template was lost with it."""
        self._stats = replace(self._stats, num_cells_lost=self._stats.num_cells_lost + 1)
        return self._keeper.has_lost(cell.generation)

    async def _take_cell(self, limits: CellLimits | None) -> JudgeCell:
        waiting = self._warm_of(limits)
        while waiting:
            cell = waiting.popleft()
            if cell.is_alive and not self._keeper.has_lost(cell.generation):
                self._stats = replace(self._stats, num_warm_hits=self._stats.num_warm_hits + 1)
                return cell
            cell.close()
        return await self._make_cell(limits)

    def _warm_of(self, limits: CellLimits | None) -> deque[JudgeCell]:
        """The cells of this kind that wait; from now on the pool keeps some, and of the kind unused longest none."""
        waiting = self._warm.pop(limits, None)
        self._warm[limits] = deque() if waiting is None else waiting
        if len(self._warm) > _MAX_KINDS_KEPT:
            oldest = next(kind for kind in self._warm if kind is not None)
            for cell in self._warm.pop(oldest):
                cell.close()
        return self._warm[limits]

    async def _make_cell(self, limits: CellLimits | None) -> JudgeCell:
        """A ready cell, from a template that is started if need be."""
        while True:
            template = await self._keeper.living()
            if not template.is_ready:
                raise SandboxError(
                    f"the sandbox's template process cannot make cells any more: {why_not_ready(template)}"
                )
            cgroup = self._make_cgroup()
            try:
                clone = await template.spawn_cell(limits, cgroup.entrances if cgroup else ())
            except BaseException:
                self._let_go(cgroup)
                raise
            leave = functools.partial(self._let_go, cgroup)
            cell = await JudgeCell.connect(clone.number, template.generation, limits, clone.channel, leave)
            try:
                await cell.wait_ready(_CELL_READY_S)
            except CellLost:
                cell.close()
                if not await template.ends_soon():
                    raise
                continue
            except BaseException:
                cell.close()
                raise
            self._stats = replace(self._stats, num_cells=self._stats.num_cells + 1)
            self._cpu_meter = cell.cpu_meter
            if cgroup is not None:
                cgroup.close_entrances()
            return cell

    def _let_go(self, cgroup: CellCgroup | None) -> None:
        if cgroup is not None and self._cgroups is not None:
            self._cgroups.let_go_of_cell(cgroup)

    def _forget_warm(self) -> None:
        for cell in self._take_warm():
            cell.close()

    def _take_warm(self) -> list[JudgeCell]:
        cells = [cell for waiting in self._warm.values() for cell in waiting]
        for waiting in self._warm.values():
            waiting.clear()
        return cells

    async def _keep_warm(self) -> None:
        """Fill the pool up to its target of each kind, one cell at a time, whenever work has used some."""
        while True:
            await self._needs_refill.wait()
            self._needs_refill.clear()
            try:
                while lacking := [kind for kind, cells in self._warm.items() if len(cells) < self.config.warm]:
                    await self._add_warm(lacking[-1])
            except SandboxError as error:
                logger.warning("the sandbox pool could not be refilled: %s", error)

    async def _add_warm(self, limits: CellLimits | None) -> None:
        cell = await self._make_cell(limits)
        if limits in self._warm:
            self._warm[limits].append(cell)
        else:  # the kind went out of use while the cell was made
            cell.close()


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
