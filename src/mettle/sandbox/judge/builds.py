"""From source to the files that a test's cell is given, compiled in a cell of its own and remembered.

What a compiler makes travels to the owner as bytes and from here to each cell, so that no test can change what the
next one runs. The same source is compiled once: a group of rollouts repeats itself, and a checker is asked for ever.
Invariant: what is remembered was made by a compiler that nothing else ran beside.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import AbstractAsyncContextManager
from typing import Final, NamedTuple, Protocol

from mettle.errors import SandboxError
from mettle.sandbox.judge.cells import CellLost, JudgeCell, ProgramFile, TestReport
from mettle.sandbox.judge.orders import ARTIFACT, ProgramSource
from mettle.sandbox.judge.reports import RunEnding, judge_compilation
from mettle.sandbox.judge.verdicts import Verdict
from mettle.sandbox.zygote.settings import CellLimits

MAX_CELLS_PER_TEST: Final = 2
_MAX_TEMPLATES_PER_TEST: Final = 5
_MAX_REMEMBERED_BYTES: Final = 128 << 20


class CellSource(Protocol):
    """Where cells come from: the pool."""

    def cell(self, limits: CellLimits | None) -> AbstractAsyncContextManager[JudgeCell]: ...

    def slot(self) -> AbstractAsyncContextManager[None]: ...

    def note_lost(self, cell: JudgeCell) -> bool:
        """Count a lost cell; whether the template was lost with it."""
        ...


class Losses:
    """Cells lost in a row under one test, and whether the code is to blame."""

    def __init__(self, cells: CellSource) -> None:
        self._cells = cells
        self._num_lost = 0
        self._num_templates_lost = 0

    def forget(self) -> None:
        """The test is over; the next one starts anew."""
        self._num_lost = 0

    def is_codes_own(self, cell: JudgeCell, error: CellLost) -> bool:
        """Whether the code has ended its cell often enough; SandboxError when it is the template that dies."""
        if not self._cells.note_lost(cell):
            self._num_lost += 1
            return self._num_lost >= MAX_CELLS_PER_TEST
        self._num_templates_lost += 1
        if self._num_templates_lost >= _MAX_TEMPLATES_PER_TEST:
            raise SandboxError("the sandbox's template process keeps dying under this test") from error
        return False


class CompileFailure(NamedTuple):
    """How a compilation ended that made no program; no report when it took its cells down."""

    ending: RunEnding
    report: TestReport | None


class Build(NamedTuple):
    """What the cells of a source are given, or why there is nothing."""

    files: tuple[ProgramFile, ...]
    failure: CompileFailure | None = None
    wall_s: float = 0.0


class Builder:
    """Builds for one pool."""

    def __init__(self, cells: CellSource) -> None:
        self._cells = cells
        self._remembered: OrderedDict[bytes, bytes] = OrderedDict()
        self._num_bytes = 0

    async def build(self, source: ProgramSource) -> Build:
        """The files of a source that is no Python; a failure is a verdict on it."""
        if source.compilation is None:
            return Build((ProgramFile(source.language.source_name, source.code), *source.files))
        key = source.key()
        if key in self._remembered:
            self._remembered.move_to_end(key)
            return Build((ProgramFile(ARTIFACT, self._remembered[key]),))
        return await self._compile(source, key)

    async def _compile(self, source: ProgramSource, key: bytes) -> Build:
        assert source.compilation is not None, "only what is compiled comes here"
        losses = Losses(self._cells)
        files = (ProgramFile(source.language.source_name, source.code), *source.files)
        while True:
            async with self._cells.cell(source.compile_cell) as cell:
                try:
                    cell.load_files(files)
                    report = await cell.run(0, source.compilation, is_last=True)
                    break
                except CellLost as error:
                    lost = error
            if losses.is_codes_own(cell, lost):
                ending = RunEnding(Verdict.KILLED, f"does not compile: the compiler's cell was lost: {lost}")
                return Build((), CompileFailure(ending, None))
        ending = judge_compilation(source.compilation, report, source.language)
        if ending.verdict is not Verdict.PASSED:
            return Build((), CompileFailure(ending, report), report.wall_s)
        self._remember(key, report.value)
        return Build((ProgramFile(ARTIFACT, report.value),), None, report.wall_s)

    def _remember(self, key: bytes, program: bytes) -> None:
        if key in self._remembered:  # made twice at the same time
            return
        self._remembered[key] = program
        self._num_bytes += len(program)
        while self._num_bytes > _MAX_REMEMBERED_BYTES:
            self._num_bytes -= len(self._remembered.popitem(last=False)[1])
