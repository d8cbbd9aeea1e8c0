"""From what a caller asks to what a cell is told, and from what a cell reports to a verdict.

The order holds input and limits; the expected output stays in the `Test`. A caller's mistake is a `UserError` that
names the value; nothing that judged code does ever raises here.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, get_args

from mettle.errors import UserError
from mettle.sandbox.cells import TestOrder, TestReport
from mettle.sandbox.comparators import outputs_match, values_match
from mettle.sandbox.config import SandboxConfig
from mettle.sandbox.verdicts import CallTest, OutputRule, StdioTest, Test, TestResult, ValueRule, Verdict
from mettle.sandbox.zygote import values

LANGUAGES: Final = ("python",)
_LEAST_MEMORY_MB: Final = 32
_KEPT_STDERR_BYTES: Final = 4096
# Processor time decides; the wall only guards against code that sleeps, so it leaves room for a busy machine.
_WALL_FACTOR: Final = 3.0
_WALL_EXTRA_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Job:
    """One solution with its tests, checked and encoded."""

    source: bytes
    tests: tuple[Test, ...]
    orders: tuple[TestOrder, ...]
    should_stop_early: bool

    def is_over(self, results: Sequence[TestResult]) -> bool:
        """Whether these results are all that there will be."""
        has_failed = bool(results) and not results[-1].has_passed
        return len(results) == len(self.tests) or (self.should_stop_early and has_failed)


def make_job(
    config: SandboxConfig,
    code: object,
    tests: Sequence[Test],
    *,
    timeout_s: float | None = None,
    memory_mb: int | None = None,
    language: str = "python",
    stop_at_first_failure: bool = False,
) -> Job:
    """Check everything that a caller can get wrong, and encode the rest. Limits left out are the config's."""
    if language not in LANGUAGES:
        raise UserError(f"the sandbox does not run {language!r}; it runs {', '.join(LANGUAGES)}")
    source = _encode_source(code, config.max_source_kb)
    timeout_s = _check_timeout(config.timeout_s if timeout_s is None else timeout_s)
    memory_mb = _check_memory(config.memory_mb if memory_mb is None else memory_mb)
    if not tests:
        raise UserError("there are no tests: a solution that is tested by nothing has neither passed nor failed")
    orders = tuple(_make_order(config, test, number, timeout_s, memory_mb) for number, test in enumerate(tests))
    return Job(source, tuple(tests), orders, stop_at_first_failure)


def _encode_source(code: object, max_source_kb: int) -> bytes:
    if not isinstance(code, str):
        raise UserError(f"code must be text, not {type(code).__name__}")
    if len(code) > max_source_kb << 10:
        raise UserError(f"the code has {len(code):,} characters; sandbox.max_source_kb allows {max_source_kb} kB")
    try:
        source = code.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"code must be text: character {error.start} is half of a surrogate pair") from error
    if len(source) > max_source_kb << 10:
        raise UserError(f"the code has {len(source):,} bytes; sandbox.max_source_kb allows {max_source_kb} kB")
    return source


def _check_timeout(timeout_s: object) -> float:
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if not is_number or not math.isfinite(timeout_s) or not 0 < timeout_s <= 3600:  # type: ignore[arg-type, operator]
        raise UserError(f"timeout_s is {timeout_s!r}; it must be a number above 0 and at most 3600")
    return float(timeout_s)  # type: ignore[arg-type]


def _check_memory(memory_mb: object) -> int:
    if not isinstance(memory_mb, int) or isinstance(memory_mb, bool) or not _LEAST_MEMORY_MB <= memory_mb <= 1 << 20:
        raise UserError(f"memory_mb is {memory_mb!r}; it must be a whole number of at least {_LEAST_MEMORY_MB}")
    return memory_mb


def _make_order(config: SandboxConfig, test: object, number: int, timeout_s: float, memory_mb: int) -> TestOrder:
    if isinstance(test, StdioTest):
        _check_rule(test.compare, get_args(OutputRule), number)
        payload, function = _as_bytes(test.stdin, f"test {number}: stdin"), None
        _as_bytes(test.expected, f"test {number}: expected")
    elif isinstance(test, CallTest):
        _check_rule(test.compare, get_args(ValueRule), number)
        payload, function = _encode_arguments(test, number), test.function
    else:
        raise UserError(f"test {number} is a {type(test).__name__}; it must be a StdioTest or a CallTest")
    if len(payload) > config.max_input_mb << 20:
        raise UserError(
            f"the input of test {number} has {len(payload):,} bytes; "
            f"sandbox.max_input_mb allows {config.max_input_mb} MB"
        )
    return TestOrder(
        mode="stdio" if function is None else "call",
        payload=payload,
        function=function,
        cpu_s=timeout_s,
        wall_s=max(_WALL_FACTOR * timeout_s, timeout_s + _WALL_EXTRA_S),
        memory_bytes=memory_mb << 20,
        output_bytes=config.output_kb << 10,
    )


def _check_rule(rule: str, known: tuple[str, ...], number: int) -> None:
    if rule not in known:
        raise UserError(f"test {number} compares by {rule!r}; it must be one of {', '.join(known)}")


def _as_bytes(text: object, what: str) -> bytes:
    if isinstance(text, bytes):
        return text
    if not isinstance(text, str):
        raise UserError(f"{what} must be text or bytes, not {type(text).__name__}")
    return text.encode(errors="surrogateescape")


def _encode_arguments(test: CallTest, number: int) -> bytes:
    if not isinstance(test.function, str) or not test.function:
        raise UserError(f"test {number} names no function: {test.function!r}")
    try:
        return values.encode((tuple(test.args), dict(test.kwargs)))
    except ValueError as error:
        raise UserError(f"the arguments of test {number} cannot be sent: {error}") from error


def judge_report(test: Test, order: TestOrder, report: TestReport) -> TestResult:
    """The verdict on one test. Only here do the output and the expected output meet."""
    verdict, detail = _judge_end(order, report)
    output: Any = report.stdout.decode(errors="replace")
    expected: Any = test.expected
    if isinstance(test, CallTest):
        output = None
        if verdict is Verdict.PASSED:
            output, verdict, detail = _judge_value(test, report.value)
    else:
        wanted = _as_bytes(test.expected, "expected")
        expected = wanted.decode(errors="replace")
        if verdict is Verdict.PASSED and not outputs_match(report.stdout, wanted, test.compare, test.tolerance):
            verdict, detail = Verdict.WRONG, f"the output is not the expected one (compared by {test.compare})"
    return TestResult(
        verdict=verdict,
        output=output,
        expected=expected,
        wall_s=report.wall_s,
        cpu_s=report.cpu_s,
        memory_bytes=report.memory_bytes,
        exit_code=report.status >> 8 if report.ended == "exit" and not report.status & 0x7F else None,
        stdout=report.stdout.decode(errors="replace"),
        stderr=report.stderr[-_KEPT_STDERR_BYTES:].decode(errors="replace"),
        detail=detail,
    )


def killed_result(test: Test, detail: str) -> TestResult:
    """The verdict on a test that took its cell down with it."""
    return TestResult(Verdict.KILLED, None, test.expected, 0.0, 0.0, 0, None, "", "", detail)


def _judge_end(order: TestOrder, report: TestReport) -> tuple[Verdict, str]:
    """How the run itself ended: PASSED here means that it ended well, and that its output may be looked at."""
    if report.ended == "output":
        return Verdict.OUTPUT_LIMIT, f"more than {order.output_bytes >> 10} kB of output"
    if report.ended == "memory" or report.memory_bytes > order.memory_bytes:
        return Verdict.MEMORY, f"more than {order.memory_bytes >> 20} MB of memory"
    if report.ended == "wall":
        return Verdict.TIMEOUT, f"not done after {order.wall_s:g} s of wall time ({report.cpu_s:.2f} s of processor)"
    signal_number = report.status & 0x7F
    if report.ended == "cpu" or report.cpu_s > order.cpu_s or signal_number == signal.SIGXCPU:
        return Verdict.TIMEOUT, f"more than {order.cpu_s:g} s of processor time"
    if signal_number:
        return Verdict.KILLED, f"ended by {_signal_name(signal_number)}"
    if report.status and _last_line(report.stderr).startswith(b"MemoryError"):
        return Verdict.MEMORY, f"an allocation failed at {order.memory_bytes >> 20} MB"
    if report.status:
        last = _last_line(report.stderr).decode(errors="replace")[:200]
        return (
            Verdict.ERROR,
            f"exit status {report.status >> 8}: {last}" if last else f"exit status {report.status >> 8}",
        )
    return Verdict.PASSED, ""


def _judge_value(test: CallTest, data: bytes) -> tuple[Any, Verdict, str]:
    if not data:
        return None, Verdict.ERROR, f"the code ended before {test.function} returned"
    try:
        value = values.decode(data)
    except values.UnencodableValue as error:
        return None, Verdict.ERROR, f"{test.function} returned no value: {error}"
    if values_match(value, test.expected, test.compare, test.tolerance):
        return value, Verdict.PASSED, ""
    return value, Verdict.WRONG, f"{test.function} returned another value (compared by {test.compare})"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_line(text: bytes) -> bytes:
    return text.rstrip().rpartition(b"\n")[2]
