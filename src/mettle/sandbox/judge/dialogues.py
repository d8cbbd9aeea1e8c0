"""Conversations: the code and a task's interactor, each in a cell of its own, joined by the owner.

What one prints the owner feeds to the other as it comes. The interactor holds the input and the expected output; the
code's cell is given neither, and shares nothing with the interactor's.
    the code ends badly first      its own verdict
    the interactor ends first      its exit code decides, and code that it has judged wrong is ended
    both end well                  its exit code decides
Code that still ran when the interactor had closed its output, and with it the code's input, has not ended first: that
may be what it broke on. The code's cell says so, because it alone sees both; which report comes first says nothing.
Invariant: an interactor that breaks, or outlives the code's wall limit, is a `CheckerError` and no verdict; each side's
output is limited as in any test, and the owner holds no more than that.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Final

from mettle.sandbox.config import LanguageSpec
from mettle.sandbox.judge.builds import Builder, CellSource, Losses
from mettle.sandbox.judge.cells import CellLost, JudgeCell, ProgramFile, TestOrder, TestReport
from mettle.sandbox.judge.checkers import CheckerError, Opinion, read_exit
from mettle.sandbox.judge.orders import CHECKED_FILES, CheckerJob, as_bytes, interactor_order
from mettle.sandbox.judge.reports import judge_dialogue, judge_end
from mettle.sandbox.judge.verdicts import InteractiveTest, ProgramChecker, TestResult, Verdict

_NUMBER: Final = 0
_MAX_TRANSCRIPT_BYTES: Final = 1 << 14
_JUDGED: Final = "judged"  # how code ended that was ended because of what its interactor said
_LAST_WORDS_S: Final = 0.2  # that code which was judged wrong may take to end by itself


class DialogueTranscript:
    """Who said what, in order: the beginning and the end, when it is long."""

    def __init__(self) -> None:
        self._head, self._tail = bytearray(), bytearray()
        self._num_left_out = 0
        self._speaker = ""

    def add(self, speaker: str, data: bytes) -> None:
        """What one side has printed; `speaker` marks its lines."""
        is_new = speaker != self._speaker
        self._speaker = speaker
        mark = b"\n" + speaker.encode() + b" "
        text = (mark if is_new else b"") + data.rstrip(b"\n").replace(b"\n", mark)
        self._speaker = "" if data.endswith(b"\n") else speaker
        room = _MAX_TRANSCRIPT_BYTES // 2
        if len(self._head) < room and not self._tail:
            taken = room - len(self._head)
            self._head += text[:taken]
            text = text[taken:]
        self._tail += text
        if len(self._tail) > room:
            self._num_left_out += len(self._tail) - room
            del self._tail[:-room]

    def text(self) -> str:
        gap = f"\n... {self._num_left_out} bytes ...\n".encode() if self._num_left_out else b""
        return bytes(self._head + gap + self._tail).decode(errors="replace").strip("\n")


class Side:
    """One of the two: listens to its cell, and passes on what it hears."""

    def __init__(self, cell: JudgeCell, order: TestOrder, mark: str, transcript: DialogueTranscript) -> None:
        self.cell, self.order = cell, order
        self._mark, self._transcript = mark, transcript
        self.said = bytearray()
        self.has_closed = False

    async def listen(self, other: Side) -> TestReport:
        """Pass on all that it prints, until it ends."""
        while isinstance(heard := await self.cell.hear(_NUMBER, self.order), bytes):
            self._pass_on(other, heard, is_end=not heard)
        self._pass_on(other, heard.stdout[len(self.said) :], is_end=True)
        return heard

    def _pass_on(self, other: Side, data: bytes, *, is_end: bool) -> None:
        if self.has_closed:
            return
        self.said += data
        self.has_closed = is_end
        if data:
            self._transcript.add(self._mark, data)
        if other.cell.is_alive and not other.cell.is_finished:
            other.cell.feed(_NUMBER, data, is_end=is_end)


class Dialogue:
    """Conversations with one interactor."""

    def __init__(self, cells: CellSource, builder: Builder, job: CheckerJob) -> None:
        self._cells, self._builder, self._job = cells, builder, job

    async def hold(
        self, cell: JudgeCell, test: InteractiveTest, order: TestOrder, language: LanguageSpec
    ) -> TestResult:
        """The result of one test; CellLost when the code's cell was lost, CheckerError when the interactor broke."""
        files = await self._build()
        losses = Losses(self._cells)
        async with self._cells.cell(self._job.source.cell) as other:
            try:
                self._load(other, files, test)
                mine = interactor_order(self._job, order)
                await other.start(_NUMBER, mine, is_last=True)
            except CellLost as error:
                losses.is_codes_own(other, error)
                raise CheckerError(f"the interactor's cell was lost: {error}") from error
            await cell.start(_NUMBER, order, is_last=True)
            transcript = DialogueTranscript()
            code, interactor = Side(cell, order, "<", transcript), Side(other, mine, ">", transcript)
            report, opinion = await self._converse(code, interactor, language)
        result = judge_dialogue(test, order, report, language, opinion)
        if result.verdict is Verdict.TIMEOUT and report.ended == "wall" and report.cpu_s < order.cpu_s / 2:
            result = replace(result, detail=f"idle: neither side had anything to say. {result.detail}")
        return replace(result, transcript=transcript.text())

    async def _converse(
        self, code: Side, interactor: Side, language: LanguageSpec
    ) -> tuple[TestReport, Opinion | None]:
        """How the code ended, and what the interactor says of it, unless the code ended badly before."""
        talking = asyncio.create_task(code.listen(interactor), name="interactive code")
        judging = asyncio.create_task(interactor.listen(code), name="interactor")
        try:
            await asyncio.wait((talking, judging), return_when=asyncio.FIRST_COMPLETED)
            if talking.done():
                report = talking.result()
                if self._has_broken_first(code, report, language):
                    return report, None
                return report, self._opinion(interactor, await self._verdict(judging))
            opinion = self._opinion(interactor, await self._verdict(judging))
            report = await talking if opinion.score > 0 else await _end(talking, code)
            return report, None if self._has_broken_first(code, report, language) else opinion
        finally:
            for task in (talking, judging):
                task.cancel()
            await asyncio.gather(talking, judging, return_exceptions=True)

    def _has_broken_first(self, code: Side, report: TestReport, language: LanguageSpec) -> bool:
        """Whether the code ended badly, by itself, and not because the interactor had nothing more to say."""
        if report.ended == _JUDGED or report.has_outlived_input:
            return False
        return judge_end(code.order, report, language).verdict is not Verdict.PASSED

    async def _verdict(self, judging: asyncio.Task[TestReport]) -> TestReport:
        try:
            return await judging
        except CellLost as error:
            raise CheckerError(f"the interactor's cell was lost: {error}") from error

    def _opinion(self, interactor: Side, report: TestReport) -> Opinion:
        assert isinstance(self._job.checker, ProgramChecker), "interactors are programs"
        order = interactor.order
        has_exited = report.ended == "exit" and not report.status & 0x7F
        if not has_exited or report.cpu_s > order.cpu_s or report.memory_bytes > order.memory_bytes:
            verdict, detail = judge_end(order, report, self._job.source.language)
            raise CheckerError(f"the interactor did not finish ({verdict}): {detail}")
        return read_exit(report.status >> 8, report.stderr.decode(errors="replace"), self._job.checker.max_points)

    def _load(self, cell: JudgeCell, files: tuple[ProgramFile, ...], test: InteractiveTest) -> None:
        given, _, expected = CHECKED_FILES
        held = [
            ProgramFile(given, as_bytes(test.stdin, given)),
            ProgramFile(expected, as_bytes(test.expected, expected)),
        ]
        cell.load_files([*files, *held])

    async def _build(self) -> tuple[ProgramFile, ...]:
        build = await self._builder.build(self._job.source)
        if build.failure is not None:
            words = build.failure.report.stderr.decode(errors="replace")[:500] if build.failure.report else ""
            raise CheckerError(f"the interactor {build.failure.ending.detail}\n{words}")
        return build.files


async def _end(talking: asyncio.Task[TestReport], code: Side) -> TestReport:
    """The report of code that was judged wrong: its own if it ends by itself at once, or else what it had printed."""
    try:
        async with asyncio.timeout(_LAST_WORDS_S):
            return await asyncio.shield(talking)
    except (TimeoutError, CellLost):
        return TestReport(_JUDGED, 0, 0.0, 0.0, 0, bytes(code.said), b"", b"", False)
