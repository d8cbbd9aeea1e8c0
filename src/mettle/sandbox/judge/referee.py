"""Reading what judged code has sent and comparing it: here where it is short, in a process beside this one where not.

What a cell reports was written by the code. A short report costs this loop a millisecond at most, whatever it holds
(`tests/sandbox/judge/test_referee.py` has the growth of every kind); a long one is read and compared aside, within
processor time that grows with its length. Invariant: no value, however it was made, holds up its owner or raises here;
one that cannot be read in its time is an `error` of the code.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Final

from mettle.processes.aside import Aside, AsideEnded
from mettle.sandbox.config import LanguageSpec
from mettle.sandbox.judge.cells import TestOrder, TestReport
from mettle.sandbox.judge.reports import judge_report, unread_result
from mettle.sandbox.judge.verdicts import CallTest, Test, TestResult

_MOST_HERE_BYTES: Final = 16 << 10
_CPU_S: Final = 2.0
_CPU_S_PER_MB: Final = 1.0


class Referee:
    """Makes results of reports, for one pool."""

    def __init__(self) -> None:
        self._aside = Aside()

    async def judge(
        self, test: Test, order: TestOrder, report: TestReport, language: LanguageSpec, *, is_checked: bool
    ) -> TestResult:
        """The verdict on one test; of one that is to be checked as well, only how its run ended."""
        num_bytes = len(report.value if isinstance(test, CallTest) else report.stdout)
        if num_bytes <= _MOST_HERE_BYTES:
            return judge_report(test, order, report, language, is_checked=is_checked)
        given = _pickled(test, order, report, language, is_checked=is_checked)
        if given is None:  # what is expected is of a class of the caller's own
            return judge_report(test, order, report, language, is_checked=is_checked)
        result: TestResult
        try:
            [result] = await self._aside.run(judge_pickled, given, cpu_s=_CPU_S + _CPU_S_PER_MB * num_bytes / (1 << 20))
        except AsideEnded as error:
            return unread_result(test, report, str(error))
        return result

    def close(self) -> None:
        """End what works beside."""
        self._aside.close()


def judge_pickled(data: bytes) -> Iterator[TestResult]:
    """In the other process. The pickle is the owner's; what the code wrote is bytes in it."""
    test, order, report, language, is_checked = pickle.loads(data)
    yield judge_report(test, order, report, language, is_checked=is_checked)


def _pickled(
    test: Test, order: TestOrder, report: TestReport, language: LanguageSpec, *, is_checked: bool
) -> bytes | None:
    try:
        return pickle.dumps((test, order, report, language, is_checked), protocol=5)
    except Exception:
        return None
