"""From what a cell reports to a verdict. What it was told is made in `orders.py`.

Only here do the output and the expected output meet. Nothing that judged code does ever raises here.
"""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any, Final, NamedTuple

from mettle.sandbox.config import LanguageSpec
from mettle.sandbox.judge.calls import decode_value, returned_matches
from mettle.sandbox.judge.cells import TestOrder, TestReport
from mettle.sandbox.judge.checkers import Opinion
from mettle.sandbox.judge.comparators import outputs_match, values_match
from mettle.sandbox.judge.orders import as_bytes
from mettle.sandbox.judge.verdicts import CallTest, InteractiveTest, Stage, StdioTest, Test, TestResult, Verdict
from mettle.sandbox.zygote import values

_KEPT_STDERR_BYTES: Final = 4096
_TAIL_BYTES: Final = 2048


class RunEnding(NamedTuple):
    """How a run itself ended: `passed` means that it ended well, and that its output may be looked at."""

    verdict: Verdict
    detail: str


def judge_report(
    test: Test, order: TestOrder, report: TestReport, language: LanguageSpec, *, is_checked: bool
) -> TestResult:
    """The verdict on one test; of one that is to be checked as well, only how its run ended."""
    ending = judge_end(order, report, language)
    output: Any = report.stdout.decode(errors="replace")
    if isinstance(test, CallTest):
        output = None
        if ending.verdict is Verdict.PASSED:
            output, ending = _judge_value(test, report.value, language, is_checked=is_checked)
    elif isinstance(test, StdioTest) and ending.verdict is Verdict.PASSED and not is_checked:
        ending = _judge_output(test, report.stdout)
    return _result(test, report, ending, output, "run")


def compile_failure(test: Test, report: TestReport, ending: RunEnding) -> TestResult:
    """The result of a test whose code did not become a program; the compiler's words are its `stderr`."""
    return _result(test, report, ending, None, "compile")


def killed_result(test: Test, detail: str, stage: Stage = "run") -> TestResult:
    """The verdict on a test that took its cell down with it."""
    return TestResult(Verdict.KILLED, None, test.expected, 0.0, 0.0, 0, None, "", "", detail, stage)


def unread_result(test: Test, report: TestReport, why: str) -> TestResult:
    """The result of a run that ended well and left what cannot be read."""
    what = f"{test.function} returned no value" if isinstance(test, CallTest) else "the output cannot be compared"
    return _result(test, report, RunEnding(Verdict.ERROR, f"{what}: {why}"), None, "run")


def with_opinion(result: TestResult, opinion: Opinion) -> TestResult:
    """The result of a run that ended well, once its checker has spoken."""
    verdict = Verdict.PASSED if opinion.score == 1.0 else Verdict.WRONG
    detail = opinion.message or ("" if verdict is Verdict.PASSED else "the checker does not accept the output")
    return replace(result, verdict=verdict, detail=detail, score=opinion.score, stage="check")


def judge_end(order: TestOrder, report: TestReport, language: LanguageSpec) -> RunEnding:
    """How the run ended, before anyone looks at what it printed."""
    if report.ended == "output":
        return RunEnding(Verdict.OUTPUT_LIMIT, f"more than {order.output_bytes >> 10} kB of output")
    if report.ended == "disk":
        return RunEnding(Verdict.OUTPUT_LIMIT, "more in files than sandbox.disk_mb allows")
    if report.ended == "memory" or report.memory_bytes > order.memory_bytes:
        return RunEnding(Verdict.MEMORY, f"more than {order.memory_bytes >> 20} MB of memory")
    if report.ended == "wall":
        detail = f"not done after {order.wall_s:g} s of wall time ({report.cpu_s:.2f} s of processor)"
        return RunEnding(Verdict.TIMEOUT, detail)
    signal_number = report.status & 0x7F
    if report.ended == "cpu" or report.cpu_s > order.cpu_s or signal_number == signal.SIGXCPU:
        return RunEnding(Verdict.TIMEOUT, f"more than {order.cpu_s:g} s of processor time")
    if report.status and _says_out_of_memory(report.stderr, language):
        return RunEnding(Verdict.MEMORY, f"an allocation failed at {order.memory_bytes >> 20} MB")
    if signal_number:
        return RunEnding(Verdict.KILLED, f"ended by {_signal_name(signal_number)}")
    if report.status:
        last = _last_line(report.stderr).decode(errors="replace")[:200]
        return RunEnding(Verdict.ERROR, f"exit status {report.status >> 8}{': ' if last else ''}{last}")
    return RunEnding(Verdict.PASSED, "")


def judge_dialogue(
    test: InteractiveTest, order: TestOrder, report: TestReport, language: LanguageSpec, opinion: Opinion | None
) -> TestResult:
    """The verdict on a conversation. Without an opinion the code has ended it, badly."""
    ending = judge_end(order, report, language)
    output = report.stdout.decode(errors="replace")
    if opinion is None or (opinion.score > 0 and ending.verdict is not Verdict.PASSED):
        assert ending.verdict is not Verdict.PASSED, "code that ends well is judged by its interactor"
        return _result(test, report, ending, output, "run")
    return with_opinion(_result(test, report, RunEnding(Verdict.PASSED, ""), output, "run"), opinion)


def judge_compilation(order: TestOrder, report: TestReport, language: LanguageSpec) -> RunEnding:
    """`passed` when there is a program."""
    ending = judge_end(order, report, language)
    if ending.verdict is Verdict.ERROR:
        return RunEnding(Verdict.ERROR, f"does not compile: {_first_error(report)}")
    if ending.verdict is Verdict.PASSED and not report.value:
        return RunEnding(Verdict.ERROR, "does not compile: the compiler left no program, or one that is too large")
    return RunEnding(ending.verdict, ending.detail and f"does not compile: {ending.detail}")


def _result(test: Test, report: TestReport, ending: RunEnding, output: Any, stage: Stage) -> TestResult:
    is_call = isinstance(test, CallTest)
    expected = None if is_call else as_bytes(test.expected, "expected").decode(errors="replace")
    is_compiler = stage == "compile"
    kept = report.stderr[:_KEPT_STDERR_BYTES] if is_compiler else report.stderr[-_KEPT_STDERR_BYTES:]
    return TestResult(
        verdict=ending.verdict,
        output=output,
        expected=test.expected if is_call else expected,
        wall_s=report.wall_s,
        cpu_s=report.cpu_s,
        memory_bytes=report.memory_bytes,
        exit_code=report.status >> 8 if report.ended == "exit" and not report.status & 0x7F else None,
        stdout=report.stdout.decode(errors="replace"),
        stderr=kept.decode(errors="replace"),
        detail=ending.detail,
        stage=stage,
        score=float(ending.verdict is Verdict.PASSED),
    )


def _judge_output(test: StdioTest, output: bytes) -> RunEnding:
    if outputs_match(output, as_bytes(test.expected, "expected"), test):
        return RunEnding(Verdict.PASSED, "")
    return RunEnding(Verdict.WRONG, f"the output is not the expected one (compared by {test.compare})")


def _judge_value(test: CallTest, data: bytes, language: LanguageSpec, *, is_checked: bool) -> tuple[Any, RunEnding]:
    if not data:
        return None, RunEnding(Verdict.ERROR, f"the code ended before {test.function} returned")
    try:
        value = values.decode(data) if language.is_warm else decode_value(language, data)
    except values.UnencodableValue as error:
        return None, RunEnding(Verdict.ERROR, f"{test.function} returned no value: {error}")
    if is_checked or _is_expected(value, test, language):
        return value, RunEnding(Verdict.PASSED, "")
    return value, RunEnding(Verdict.WRONG, f"{test.function} returned another value (compared by {test.compare})")


def _is_expected(value: Any, test: CallTest, language: LanguageSpec) -> bool:
    if language.is_warm:
        return values_match(value, test.expected, test.compare, test.tolerance)
    return returned_matches(language, value, test)


def _says_out_of_memory(stderr: bytes, language: LanguageSpec) -> bool:
    if language.is_warm:  # the last line of a traceback
        return any(_last_line(stderr).startswith(words.encode()) for words in language.out_of_memory)
    return any(words.encode() in stderr[-_TAIL_BYTES:] for words in language.out_of_memory)


def _first_error(report: TestReport) -> str:
    """The first line that says "error", or else the first, of what the compiler said."""
    text = (report.stderr or report.stdout).decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [f"exit status {report.status >> 8}"]
    return next((line for line in lines if "error" in line.lower()), lines[0])[:300]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_line(text: bytes) -> bytes:
    return text.rstrip().rpartition(b"\n")[2]
