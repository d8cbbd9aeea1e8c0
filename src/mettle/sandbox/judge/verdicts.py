"""Tests, checkers, and what became of what was tested.

A test's expected output is held here, by the owner, and never travels to the process that runs the code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from mettle.sandbox.isolation import IsolationReport

OutputRule = Literal["exact", "trim", "lines", "tokens", "floats", "decimals"]
Stage = Literal["compile", "run", "check"]
ValueRule = Literal["typed", "numeric"]


class Verdict(StrEnum):
    """How one test ended."""

    PASSED = "passed"
    WRONG = "wrong"
    ERROR = "error"  # an exception, a syntax error, an exit status other than 0, or no compilation
    TIMEOUT = "timeout"
    MEMORY = "memory"
    OUTPUT_LIMIT = "output_limit"
    KILLED = "killed"  # ended by a signal that no limit sent


@dataclass(frozen=True, slots=True)
class StdioTest:
    """Run the code as a program: feed it `stdin`, compare what it prints with `expected`.

    `compare` is one of
      exact     the bytes
      trim      the lines, but for white space at their ends and blank lines at the end
      lines     the lines, but for white space around each and blank lines at both ends
      tokens    the words
      floats    the words; where the expected one has a point or an exponent, numbers within the tolerance
      decimals  as `lines`, but a line may also hold the same numbers, written otherwise (1 is 1.0; no tolerance)
    `tolerance` is absolute and relative, whichever allows more; `abs_tolerance` and `rel_tolerance` replace its halves.
    `ignore_case`: letters of ASCII. `any_order`: of lines (`trim`, `lines`) or of words (`tokens`).
    """

    stdin: str | bytes = ""
    expected: str | bytes = ""
    compare: OutputRule = "tokens"
    tolerance: float = 1e-6
    abs_tolerance: float | None = None
    rel_tolerance: float | None = None
    ignore_case: bool = False
    any_order: bool = False


@dataclass(frozen=True, slots=True)
class CallTest:
    """Load the code as a module, call `function` (of the module or of its class `Solution`), compare what it returns.

    `typed`: True is not 1 and 1 is not 1.0, but a tuple is as good as a list. `numeric`: numbers compare by value.
    `tolerance`, when set, is the absolute or relative difference allowed between floats.
    """

    function: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    expected: Any = None
    compare: ValueRule = "typed"
    tolerance: float | None = None


@dataclass(frozen=True, slots=True)
class PythonChecker:
    """A task's own Python that decides, in a cell of its own: source that defines `function`.

    It is given stdin, expected and output as texts, or a call's arguments, expected and returned values. It returns a
    bool, or a score from 0 to 1, or a tuple of either and words. Limits left out are the pool's.
    """

    code: str
    function: str = "check"
    timeout_s: float | None = None
    memory_mb: int | None = None


@dataclass(frozen=True, slots=True)
class ProgramChecker:
    """A program that is called with the names of three files: input, output, expected.

    Exit codes: 0 is right; 1, 2, 4, 8 are wrong; 7 gives points (a number at the start of what it prints), of
    `max_points`; any other is its own failure. `files` (testlib.h, say) lie beside its source.
    """

    code: str
    language: str = "cpp"
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    max_points: float = 1.0
    timeout_s: float | None = None
    memory_mb: int | None = None


Checker = PythonChecker | ProgramChecker


@dataclass(frozen=True, slots=True)
class InteractiveTest:
    """Run the code against a program that talks to it: each reads what the other prints, in a cell of its own.

    `interactor` (in any language, `python` too) is called with the names of three files: `stdin`, one that it may
    write, `expected`. Its exit codes are those of a `ProgramChecker`, and what it prints as errors is the `detail`. The
    code sees no file.
    """

    interactor: ProgramChecker
    stdin: str | bytes = ""
    expected: str | bytes = ""


Test = StdioTest | CallTest | InteractiveTest


@dataclass(frozen=True, slots=True)
class TestResult:
    """One test's verdict. `output` is the printed text, or the returned value of a function-call test (None if none).

    `stdout` is the text printed, also by a function-call test. `cpu_s` and `memory_bytes` are those of all the test's
    processes (memory: of the largest). `detail` says in words why it is not `passed`; `stage` says what ended so: code
    that does not compile is an `error` (or another bad end) of that stage, with the compiler's words in `stderr`.
    `score` is 1 for `passed` and 0 for the rest, unless a checker has given part of it.
    """

    verdict: Verdict
    output: Any
    expected: Any
    wall_s: float
    cpu_s: float
    memory_bytes: int
    exit_code: int | None
    stdout: str
    stderr: str
    detail: str = ""
    stage: Stage = "run"
    score: float = 0.0
    transcript: str = ""  # of an interactive test: lines to the code begin with `>`, those from it with `<`

    __test__ = False  # not a test class, whatever its name says

    @property
    def has_passed(self) -> bool:
        return self.verdict is Verdict.PASSED


@dataclass(frozen=True, slots=True)
class JudgeResult:
    """The verdicts in the order of the tests (fewer than `num_tests` after a stop at the first failure)."""

    tests: tuple[TestResult, ...]
    num_tests: int
    isolation: IsolationReport
    queue_s: float
    wall_s: float
    language: str = "python"
    is_remembered: bool = False  # the pool has judged the same before
    compile_s: float = 0.0  # of wall time; 0 where nothing was compiled, also because it had been before

    @property
    def num_passed(self) -> int:
        return sum(test.has_passed for test in self.tests)

    @property
    def has_passed(self) -> bool:
        """Every test ran and passed."""
        return self.num_passed == self.num_tests

    @property
    def fraction_passed(self) -> float:
        return self.num_passed / self.num_tests

    @property
    def score(self) -> float:
        """The mean score of the tests; one that was not run counts as 0."""
        return sum(test.score for test in self.tests) / self.num_tests
