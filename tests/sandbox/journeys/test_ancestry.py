"""A judged process descends from one that has seen the tests before it: nothing of theirs may be left in it."""

from __future__ import annotations

import secrets

import pytest

from mettle.sandbox import CallTest, SandboxConfig, SandboxPool, StdioTest

_LOOK = """
import ctypes, gc, os, re, sys
WORD = re.compile(b"".join([b"nee", b"dle-[0-9a-f]{32}"]))

def in_memory():
    found = set()
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps.read().splitlines():
            bounds, mode = line.split()[:2]
            start, end = (int(bound, 16) for bound in bounds.split("-"))
            if mode[0] == "r" and "[v" not in line:
                memory.seek(start)
                found.update(WORD.findall(memory.read(end - start)))
    return found

def in_objects():
    seen, waiting, found = set(), [sys._getframe(), *gc.get_objects()], set()
    frame = sys._getframe()
    while frame is not None:
        waiting += [frame.f_locals, frame.f_globals]
        frame = frame.f_back
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, str):
            thing = thing.encode(errors="replace")
        if isinstance(thing, (bytes, bytearray)):
            found.update(WORD.findall(bytes(thing)))
        elif not isinstance(thing, memoryview):
            waiting += gc.get_referents(thing)
    return found

def in_descriptors():
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.update(WORD.findall(os.pread(int(name), 1 << 20, 0)))
        except OSError:
            continue
    return found

def others(own):
    return sorted({*in_memory(), *in_objects(), *in_descriptors()} - {own})
"""
_PROGRAM = (
    _LOOK
    + """
own = input().encode()
answer = b"".join([b"nee", b"dle-", bytes(reversed(own[-32:]))])
sys.stdout.write(answer.decode() + "\\n"); sys.stdout.flush()
print(*sorted({*others(own)} - {answer}))
"""
)
_FUNCTION = (
    _LOOK
    + """
def look(own, *, beside):
    return [word.decode() for word in others(own.encode())]
"""
)
NUM_TESTS = 4


def _word() -> str:
    return "needle-" + secrets.token_hex(16)


@pytest.mark.asyncio(loop_scope="module")
async def test_no_input_or_output_of_an_earlier_test_is_in_a_process(pool: SandboxPool) -> None:
    words = [_word() for _ in range(NUM_TESTS)]
    answers = ["needle-" + word[-32:][::-1] for word in words]
    tests = [StdioTest(word, f"{answer}\n") for word, answer in zip(words, answers, strict=True)]
    result = await pool.judge(_PROGRAM, tests, timeout_s=8)
    assert [(test.stdout, test.stderr) for test in result.tests] == [(f"{answer}\n\n", "") for answer in answers]


@pytest.mark.asyncio(loop_scope="module")
async def test_no_argument_of_an_earlier_call_is_in_a_process(pool: SandboxPool) -> None:
    tests = [CallTest("look", (_word(),), kwargs={"beside": 7}, expected=[]) for _ in range(NUM_TESTS)]
    result = await pool.judge(_FUNCTION, tests, timeout_s=8)
    assert [(test.output, test.stderr) for test in result.tests] == [([], "")] * NUM_TESTS


@pytest.mark.asyncio(loop_scope="module")
async def test_large_inputs_and_outputs_leave_nothing_either() -> None:
    words = [_word() for _ in range(3)]
    tests = [StdioTest(f"{word}\n" + "x" * (3 << 20), "") for word in words]
    code = _PROGRAM + "sys.stdin.read(); print('y' * (5 << 20))\n"
    async with SandboxPool(SandboxConfig(warm=1, output_kb=8192, max_input_mb=8)) as pool:
        result = await pool.judge(code, tests, timeout_s=20)
    for word, test in zip(words, result.tests, strict=True):
        assert test.stdout.splitlines()[1] == "", word
        assert test.stdout.count("y") == 5 << 20
