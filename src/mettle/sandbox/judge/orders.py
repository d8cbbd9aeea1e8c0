"""From what a caller asks to what a cell is told. What comes back is read in `reports.py`.

The order holds input and limits; the expected output stays in the `Test`. A caller's mistake is a `UserError` that
names the value, before anything runs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, get_args

from mettle.errors import UserError
from mettle.sandbox.config import LanguageSpec, SandboxConfig
from mettle.sandbox.judge.calls import driver_source, encode_call
from mettle.sandbox.judge.cells import Program, ProgramFile, TestOrder
from mettle.sandbox.judge.comparators import UNORDERED_RULES
from mettle.sandbox.judge.limits import RunLimits, check_parallel, make_limits
from mettle.sandbox.judge.request import JudgeRequest
from mettle.sandbox.judge.verdicts import (
    CallTest,
    Checker,
    InteractiveTest,
    OutputRule,
    ProgramChecker,
    PythonChecker,
    StdioTest,
    Test,
    ValueRule,
)
from mettle.sandbox.languages import PYTHON, PYTHON_PROGRAM
from mettle.sandbox.toolchains import SEARCHED, bins, require_language, shown_paths
from mettle.sandbox.zygote import values
from mettle.sandbox.zygote.settings import CellLimits

ARTIFACT: Final = "program"
MAX_ARTIFACT_BYTES: Final = 64 << 20
CHECKED_FILES: Final = ("input.txt", "output.txt", "expected.txt")


@dataclass(frozen=True, slots=True)
class ProgramSource:
    """Code of one language with what is needed to build and run it. `cell` is what its tests' cells are like."""

    language: LanguageSpec
    code: bytes
    files: tuple[ProgramFile, ...] = ()
    cell: CellLimits | None = None
    compilation: TestOrder | None = None
    compile_cell: CellLimits | None = None

    def key(self) -> bytes:
        """The same for the same code, files and commands."""
        digest = hashlib.sha256(repr((self.language, [file.name for file in self.files])).encode())
        for data in (self.code, *(file.data for file in self.files)):
            digest.update(len(data).to_bytes(8, "big"))
            digest.update(data)
        return digest.digest()


@dataclass(frozen=True, slots=True)
class CheckerJob:
    """A checker that can be asked: its code, and the limits of each time."""

    checker: Checker
    source: ProgramSource
    limits: RunLimits


@dataclass(frozen=True, slots=True)
class JudgeJob:
    """One solution with its tests, checked and encoded."""

    source: ProgramSource
    tests: tuple[Test, ...]
    orders: tuple[TestOrder, ...]
    should_stop_early: bool = False
    num_parallel: int = 1
    checker: CheckerJob | None = None
    interactors: tuple[CheckerJob | None, ...] = ()  # of the tests, where they have one


def make_job(config: SandboxConfig, request: JudgeRequest) -> JudgeJob:
    """Check everything that a caller can get wrong, and encode the rest. Limits left out are the language's."""
    tests, checker = request.tests, request.checker
    spec = require_language(config, request.language)
    source = make_source(config, spec, request.code)
    limits = make_limits(config, spec, request.timeout_s, request.memory_mb)
    if not tests:
        raise UserError("there are no tests: a solution that is tested by nothing has neither passed nor failed")
    check_parallel(request.num_parallel)
    orders = tuple(_make_order(config, test, number, limits, spec) for number, test in enumerate(tests))
    if spec.call and any(isinstance(test, CallTest) for test in tests):
        source = replace(source, files=(ProgramFile(_driver_name(spec), driver_source(spec)),))
    return JudgeJob(
        source,
        tuple(tests),
        orders,
        request.stop_at_first_failure,
        request.num_parallel,
        None if checker is None else make_checker(config, checker, tests),
        tuple(make_interactor(config, test, limits) for test in tests),
    )


def make_source(
    config: SandboxConfig, spec: LanguageSpec, code: object, files: Mapping[str, str | bytes] | None = None
) -> ProgramSource:
    """Code with its build and cells; UserError if it is not text, or too long."""
    source = ProgramSource(spec, _encode_source(code, config.max_source_kb), _make_files(config, spec, files or {}))
    if spec.is_warm:
        return source
    source = replace(source, cell=_cell_limits(config, spec, config.disk_mb))
    if not spec.compile:
        return source
    limits = RunLimits(spec.compile_timeout_s, spec.compile_memory_mb, config.output_kb)
    program = replace(
        _program(spec, spec.compile, limits.memory_mb, is_space_reserved=True),
        artifact=ARTIFACT,
        max_artifact_bytes=MAX_ARTIFACT_BYTES,
    )
    return replace(
        source,
        compilation=limits.order("program", b"", program=program),
        compile_cell=_cell_limits(config, spec, spec.compile_disk_mb),
    )


def make_checker(config: SandboxConfig, checker: Checker, tests: Sequence[Test]) -> CheckerJob:
    """A checker with its limits; UserError for one that cannot be asked about these tests."""
    if isinstance(checker, PythonChecker):
        spec, files = PYTHON, {}
    elif isinstance(checker, ProgramChecker):
        spec, files = require_language(config, checker.language), dict(checker.files)
        if spec.is_warm:
            raise UserError("a program checker is a program; write a checker in Python as a PythonChecker")
        if any(isinstance(test, CallTest) for test in tests):
            raise UserError("a program checker reads files; a function's value is checked by a PythonChecker")
    else:
        raise UserError(f"the checker is a {type(checker).__name__}; it must be a PythonChecker or a ProgramChecker")
    if any(isinstance(test, InteractiveTest) for test in tests):
        raise UserError("an interactive test is decided by its interactor; it takes no checker")
    if any(isinstance(test, CallTest) and test.kwargs for test in tests):
        raise UserError("a checker is given positional arguments, and a test passes its function others")
    limits = make_limits(config, spec, checker.timeout_s, checker.memory_mb)
    return CheckerJob(checker, make_source(config, spec, checker.code, files), limits)


def make_interactor(config: SandboxConfig, test: Test, solutions: RunLimits) -> CheckerJob | None:
    """The program that talks to the code in this test; its wall limit outlasts that of the code."""
    if not isinstance(test, InteractiveTest):
        return None
    asked = test.interactor
    if not isinstance(asked, ProgramChecker):
        raise UserError(f"an interactor is a ProgramChecker, not a {type(asked).__name__}")
    spec = require_language(config, asked.language)
    spec = PYTHON_PROGRAM if spec.is_warm else spec
    limits = make_limits(config, spec, asked.timeout_s, asked.memory_mb)
    return CheckerJob(asked, make_source(config, spec, asked.code, asked.files), limits)


def interactor_order(job: CheckerJob, solution: TestOrder) -> TestOrder:
    """The interactor's part of a conversation."""
    program = _run_program(job.source.language, job.limits.memory_mb)
    given, _, expected = CHECKED_FILES
    argv = (*program.argv, f"{{files}}/{given}", "{work}/output.txt", f"{{files}}/{expected}")
    order = job.limits.order("program", b"", program=replace(program, argv=argv))
    return replace(order, is_live=True, wall_s=solution.wall_s + order.wall_s)


def check_order(job: CheckerJob, test: Test, expected: object, output: object) -> TestOrder:
    """The question to a checker in Python, about one output or returned value.

    Raises: UnencodableValue for an output that cannot be sent, UserError for what the test itself says.
    """
    given = tuple(test.args) if isinstance(test, CallTest) else _shown(test.stdin)
    question: Any = ((given, _shown(expected), _shown(output)), {})
    try:
        payload = values.encode(question)
    except ValueError as error:
        values.encode(((None, None, _shown(output)), {}))  # raises, where the output is at fault
        raise UserError(f"what a test expects cannot be sent to its checker: {error}") from error
    assert isinstance(job.checker, PythonChecker), "the other kind is given files"
    return job.limits.order("call", payload, job.checker.function)


def checker_program_order(job: CheckerJob) -> TestOrder:
    """The call of a checker that is a program; what it is about lies in files."""
    program = _run_program(job.source.language, job.limits.memory_mb)
    argv = (*program.argv, *(f"{{files}}/{name}" for name in CHECKED_FILES))
    return job.limits.order("program", b"", program=replace(program, argv=argv))


def version_order(config: SandboxConfig, spec: LanguageSpec) -> tuple[CellLimits, TestOrder]:
    """The question which version of a language there is."""
    limits = RunLimits(spec.compile_timeout_s, spec.compile_memory_mb, config.output_kb)
    program = _program(spec, spec.version, limits.memory_mb, is_space_reserved=True)
    return _cell_limits(config, spec, config.disk_mb), limits.order("program", b"", program=program)


def as_bytes(text: object, what: str) -> bytes:
    """Text or bytes as bytes; UserError for anything else."""
    if isinstance(text, bytes):
        return text
    if not isinstance(text, str):
        raise UserError(f"{what} must be text or bytes, not {type(text).__name__}")
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError as error:
        raise UserError(f"{what} must be text: character {error.start} is half of a surrogate pair") from error


def _shown(data: object) -> object:
    return data.decode(errors="replace") if isinstance(data, bytes) else data


def _run_program(spec: LanguageSpec, memory_mb: int) -> Program:
    return _program(spec, spec.run, memory_mb, is_space_reserved=spec.is_space_reserved)


def _driver_name(spec: LanguageSpec) -> str:
    return f"driver{spec.extension}"


def _program(spec: LanguageSpec, command: Sequence[str], memory_mb: int, *, is_space_reserved: bool) -> Program:
    marks = {
        "{source}": f"{{files}}/{spec.source_name}",
        "{program}": f"{{files}}/{ARTIFACT}",
        "{output}": f"{{work}}/{ARTIFACT}",
        "{driver}": f"{{files}}/{_driver_name(spec)}",
        "{memory_mb}": str(memory_mb),
    }
    argv = list(command)
    for mark, place in marks.items():
        argv = [word.replace(mark, place) for word in argv]
    environment = {"PATH": ":".join((*SEARCHED, *bins(shown_paths([spec])))), "HOME": "/work", "LANG": "C.UTF-8"}
    environment |= dict(spec.environment)
    return Program(tuple(argv), tuple(environment.items()), is_space_reserved, spec.stack_mb << 20)


def _cell_limits(config: SandboxConfig, spec: LanguageSpec, disk_mb: int) -> CellLimits:
    return CellLimits(
        max_processes=spec.max_processes or config.max_processes,
        disk_bytes=(disk_mb << 20) // 3,
        max_file_bytes=disk_mb << 20,
        has_program=True,
    )


def _encode_source(code: object, max_source_kb: int) -> bytes:
    if not isinstance(code, str):
        raise UserError(f"code must be text, not {type(code).__name__}")
    if len(code) > max_source_kb << 10:
        raise UserError(f"the code has {len(code):,} characters; sandbox.max_source_kb allows {max_source_kb} kB")
    try:
        source = code.removeprefix("\ufeff").encode()  # a byte order mark, which most languages do not expect
    except UnicodeEncodeError as error:
        raise UserError(f"code must be text: character {error.start} is half of a surrogate pair") from error
    if len(source) > max_source_kb << 10:
        raise UserError(f"the code has {len(source):,} bytes; sandbox.max_source_kb allows {max_source_kb} kB")
    return source


def _make_files(config: SandboxConfig, spec: LanguageSpec, files: Mapping[str, str | bytes]) -> tuple[ProgramFile, ...]:
    taken = {spec.source_name, ARTIFACT, *CHECKED_FILES}
    made = []
    for name, data in files.items():
        if not isinstance(name, str) or not name or name in taken or "/" in name or "\0" in name or name[0] == ".":
            raise UserError(f"a checker's file cannot be called {name!r}")
        made.append(ProgramFile(name, as_bytes(data, f"file {name!r}")))
    if sum(len(file.data) for file in made) > config.max_input_mb << 20:
        raise UserError(f"a checker's files have more than the {config.max_input_mb} MB of sandbox.max_input_mb")
    return tuple(made)


def _make_order(config: SandboxConfig, test: object, number: int, limits: RunLimits, spec: LanguageSpec) -> TestOrder:
    if isinstance(test, StdioTest):
        _check_output_rule(test, number)
        payload = as_bytes(test.stdin, f"test {number}: stdin")
        as_bytes(test.expected, f"test {number}: expected")
        program = None if spec.is_warm else _run_program(spec, limits.memory_mb)
        order = limits.order("stdio" if program is None else "program", payload, program=program)
    elif isinstance(test, CallTest):
        order = _make_call_order(test, number, limits, spec)
    elif isinstance(test, InteractiveTest):
        for name in ("stdin", "expected"):
            as_bytes(getattr(test, name), f"test {number}: {name}")
        program = None if spec.is_warm else _run_program(spec, limits.memory_mb)
        order = limits.order("stdio" if program is None else "program", b"", program=program)
        order = replace(order, is_live=True)
    else:
        raise UserError(
            f"test {number} is a {type(test).__name__}; it must be a StdioTest, a CallTest or an InteractiveTest"
        )
    if len(order.payload) > config.max_input_mb << 20:
        raise UserError(
            f"the input of test {number} has {len(order.payload):,} bytes; "
            f"sandbox.max_input_mb allows {config.max_input_mb} MB"
        )
    return order


def _make_call_order(test: CallTest, number: int, limits: RunLimits, spec: LanguageSpec) -> TestOrder:
    _check_rule(test.compare, get_args(ValueRule), number)
    if not isinstance(test.function, str) or not test.function:
        raise UserError(f"test {number} names no function: {test.function!r}")
    if spec.is_warm:
        return limits.order("call", _encode_arguments(test, number), test.function)
    if not spec.call:
        raise UserError(f"test {number} calls a function, which {spec.name} has no driver for; it is tested by stdin")
    payload, words = encode_call(spec, test, number)
    program = _program(spec, spec.call, limits.memory_mb, is_space_reserved=spec.is_space_reserved)
    return limits.order("program", payload, program=replace(program, argv=(*program.argv, *words), has_value=True))


def _check_output_rule(test: StdioTest, number: int) -> None:
    _check_rule(test.compare, get_args(OutputRule), number)
    if test.any_order and test.compare not in UNORDERED_RULES:
        raise UserError(f"test {number} compares by {test.compare!r} in any order; that goes with {UNORDERED_RULES}")
    for name in ("tolerance", "abs_tolerance", "rel_tolerance"):
        value = getattr(test, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (value is None and name != "tolerance") and not (is_number and math.isfinite(value) and value >= 0):
            raise UserError(f"test {number} has {name} {value!r}; it must be a number of at least 0")


def _check_rule(rule: str, known: tuple[str, ...], number: int) -> None:
    if rule not in known:
        raise UserError(f"test {number} compares by {rule!r}; it must be one of {', '.join(known)}")


def _encode_arguments(test: CallTest, number: int) -> bytes:
    try:
        return values.encode((tuple(test.args), dict(test.kwargs)))
    except ValueError as error:
        raise UserError(f"the arguments of test {number} cannot be sent: {error}") from error
