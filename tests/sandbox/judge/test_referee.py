"""What code sends as a value is made to hurt, in every language: it costs little, raises nothing, and holds up nobody."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mettle.sandbox import CallTest, PythonChecker, SandboxPool, StdioTest, Verdict
from mettle.sandbox.config import LanguageSpec
from mettle.sandbox.judge.calls import decode_value, returned_matches
from mettle.sandbox.judge.cells import TestOrder, TestReport
from mettle.sandbox.judge.checkers import CheckerError, read_value
from mettle.sandbox.judge.comparators import outputs_match, values_match
from mettle.sandbox.judge.referee import Referee
from mettle.sandbox.languages import BUILT_IN, PYTHON
from mettle.sandbox.zygote import values

BASH = next(spec for spec in BUILT_IN if spec.name == "bash")
JAVASCRIPT = next(spec for spec in BUILT_IN if spec.name == "javascript")
in_loop = pytest.mark.asyncio(loop_scope="module")
_HASH_MODULUS = (1 << 61) - 1  # of CPython's integers: all multiples of it have the hash 0
_SIZE = 1 << 19
_MOST_CPU_S = 4.0  # on any host; what is quadratic takes minutes


def collisions(form: str, num_bytes: int) -> str:
    """Members of one hash, as that language writes them."""
    numbers = [format(number * _HASH_MODULUS, "x") for number in range(num_bytes // 30)]
    if form == "python":
        return json.dumps(["e", [["i", number] for number in numbers]])
    return json.dumps({"$set": [{"$int": number} for number in numbers]})


def alike(form: str, num_bytes: int) -> str:
    """Few enough of one hash to be allowed, and each dear to compare."""
    per_hash, tail = 256, ["0"] * 8
    sets = []
    for start in range(0, num_bytes // 400, per_hash):
        of_one = [format((start + number) * _HASH_MODULUS, "x") for number in range(per_hash)]
        if form == "python":
            sets.append(["e", [["t", [*(["i", one] for one in tail), ["i", number]]] for number in of_one]])
        else:
            sets.append({"$set": [{"$int": number} for number in of_one]})
    return json.dumps(["l", sets] if form == "python" else sets)


HOSTILE: dict[str, Any] = {
    "python, one hash": (PYTHON, lambda size: collisions("python", size)),
    "python, hashes that are allowed": (PYTHON, lambda size: alike("python", size)),
    "python, empty lists": (PYTHON, lambda size: '["l",[' + ",".join(['["l",[]]'] * (size // 9)) + "]]"),
    "python, nesting": (PYTHON, lambda size: '["l",[' * (size // 6)),
    "python, nesting side by side": (
        PYTHON,
        lambda s: '["l",[' + ",".join(['["l",[' * 45 + "]]" * 45] * (s // 360)) + "]]",
    ),
    "python, a long number": (PYTHON, lambda size: f'["i","{"f" * size}"]'),
    "python, long numbers": (PYTHON, lambda size: json.dumps(["l", [["i", "f" * 4990]] * (size // 5000)])),
    "python, a long float": (PYTHON, lambda size: f'["f","0x1.{"f" * size}p0"]'),
    "python, many floats": (PYTHON, lambda size: json.dumps(["l", [["f", "nan"]] * (size // 12)])),
    "python, a long text": (PYTHON, lambda size: json.dumps(["s", "\ud800" * (size // 6)])),
    "python, odd bytes": (PYTHON, lambda size: f'["b","{"0" * size}g"]'),
    "javascript, one hash": (JAVASCRIPT, lambda size: collisions("json", size)),
    "javascript, one hash of keys": (
        JAVASCRIPT,
        lambda size: json.dumps({"$map": [[{"$int": format(n * _HASH_MODULUS, "x")}, 1] for n in range(size // 40)]}),
    ),
    "javascript, hashes that are allowed": (JAVASCRIPT, lambda size: alike("json", size)),
    "javascript, numbers of one hash": (
        JAVASCRIPT,
        lambda size: '{"$set":[' + ",".join(str(n * _HASH_MODULUS) for n in range(size // 24)) + "]}",
    ),
    "javascript, empty lists": (JAVASCRIPT, lambda size: "[" + ",".join(["[]"] * (size // 3)) + "]"),
    "javascript, nesting": (JAVASCRIPT, lambda size: "[" * size),
    "javascript, a long number": (JAVASCRIPT, lambda size: "9" * size),
    "javascript, long numbers": (JAVASCRIPT, lambda size: "[" + ",".join(["9" * 4299] * (size // 4300)) + "]"),
    "javascript, a long fraction": (JAVASCRIPT, lambda size: "0." + "9" * size + "e-300"),
    "javascript, odd tags": (JAVASCRIPT, lambda size: json.dumps([{"$float": "nan"}] * (size // 18))),
    "bash, almost a number": (BASH, lambda size: "1" * size + "x"),
    "bash, a number": (BASH, lambda size: "1" * size),
    "bash, points": (BASH, lambda size: "." * size),
    "bash, words": (BASH, lambda size: "1 " * (size // 2)),
    "bash, blanks": (BASH, lambda size: " " * size + "x" + "\n" * 100),
}
EXPECTED = [1, 1.5, "x", {1, 2}, {"a": 1}, [1] * 1000, None]


def read(language: LanguageSpec, data: bytes) -> None:
    """As the owner does it: decoded, and compared with something of every type."""
    try:
        value = values.decode(data) if language.is_warm else decode_value(language, data)
    except values.UnencodableValue:
        return
    for expected in EXPECTED:
        test = CallTest("f", expected=expected, tolerance=1e-6)
        if language.is_warm:
            values_match(value, expected, "typed", 1e-6)
        else:
            returned_matches(language, value, test)
    values_match(value, value, "typed", None)


@pytest.mark.parametrize("name", HOSTILE)
def test_much_that_was_made_to_hurt_is_read_in_time(name: str) -> None:
    language, made = HOSTILE[name]
    data = made(_SIZE).encode("utf-8", "surrogatepass")
    begun = time.process_time()
    read(language, data + (b"." if language is BASH else b""))
    assert time.process_time() - begun < _MOST_CPU_S


@pytest.mark.parametrize("rule", ["exact", "trim", "lines", "tokens", "floats", "decimals"])
@pytest.mark.parametrize(
    "text", [b"1" * _SIZE + b"x", b"1e9999 " * (_SIZE // 7), b"-" * _SIZE, b"\n" * _SIZE, b" " * _SIZE + b"x"]
)
def test_much_that_was_printed_to_hurt_is_compared_in_time(rule: Any, text: bytes) -> None:
    begun = time.process_time()
    for expected in (b"1.5", text[:-2] + b"2"):
        outputs_match(text, expected, StdioTest(compare=rule))
    assert time.process_time() - begun < _MOST_CPU_S


_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["$int", "i", "nan", "0x1p99999"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["$set", "$map", "$object", "$int", "$float", "$bytes", "a"]), inner, max_size=2
        )
        | st.tuples(st.sampled_from("citfsbldez"), inner)
    ),
    max_leaves=12,
)


@settings(max_examples=60)
@given(_json.map(lambda value: json.dumps(value).encode()) | st.binary())
def test_whatever_comes_is_a_value_or_is_refused_as_one(data: bytes) -> None:
    for language in (PYTHON, JAVASCRIPT, BASH):
        read(language, data)
        read(language, data + b".")


@pytest.mark.parametrize(
    "score",
    [10**5000, -(10**5000), float("nan"), float("inf"), "x" * 1000, [1], None, (True, 5)],
    ids=lambda score: type(score).__name__,
)
def test_an_odd_answer_of_a_checker_is_its_failure_and_nothing_else(score: Any) -> None:
    with pytest.raises(CheckerError):
        read_value(score)


def report_of(value: bytes) -> TestReport:
    return TestReport("exit", 0, 0.1, 0.1, 1 << 20, b"", b"", value, is_worn=False)


ORDER = TestOrder("call", b"", "f", 1.0, 3.0, 1 << 28, 64 << 20)


async def test_what_is_long_is_read_aside_and_comes_back_as_it_is() -> None:
    referee = Referee()
    try:
        long = list(range(100_000))
        for expected, verdict in ((long, Verdict.PASSED), ([*long, 1], Verdict.WRONG)):
            report = report_of(values.encode(long))
            result = await referee.judge(CallTest("f", expected=expected), ORDER, report, PYTHON, is_checked=False)
            assert (result.verdict, result.output) == (verdict, long)
        odd = report_of(b'["l",[' * 50_000)
        assert (await referee.judge(CallTest("f"), ORDER, odd, PYTHON, is_checked=False)).verdict is Verdict.ERROR
    finally:
        referee.close()


async def test_what_takes_too_long_to_read_is_an_error_of_the_code_and_the_loop_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mettle.sandbox.judge.referee._CPU_S", 0.05)
    monkeypatch.setattr("mettle.sandbox.judge.referee._CPU_S_PER_MB", 0.0)
    referee, num_turns = Referee(), 0

    async def others() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0.001)

    working = asyncio.create_task(others())
    report = report_of(json.dumps(["l", [["l", []]] * 400_000]).encode())
    try:
        result = await referee.judge(CallTest("f", expected=1), ORDER, report, PYTHON, is_checked=False)
    finally:
        working.cancel()
        referee.close()
    assert (result.verdict, result.output) == (Verdict.ERROR, None)
    assert "more than 0.05 s of processor time" in result.detail
    assert num_turns > 20


@in_loop
async def test_a_value_that_no_checker_can_be_given_is_wrong(pool: SandboxPool) -> None:
    code = "def f():\n v = 1\n for _ in range(50): v = [v]\n return v"
    checker = PythonChecker("def check(args, expected, value): return True")
    [test] = (await pool.judge(code, [CallTest("f", expected=1)], checker=checker)).tests
    assert (test.verdict, test.score) == (Verdict.WRONG, 0.0)
    assert "cannot be given to the checker" in test.detail


@in_loop
async def test_a_byte_order_mark_is_no_part_of_a_source(pool: SandboxPool) -> None:
    for language, code in (("python", "print(1)"), ("bash", "#!/bin/bash\necho 1")):
        result = await pool.judge("\ufeff" + code, [StdioTest("", "1")], language=language)
        assert result.has_passed, result.tests[0].detail
