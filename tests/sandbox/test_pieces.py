"""Values, frames, comparisons, the filter and the report, each on its own."""

from __future__ import annotations

import math
import os
import re
import socket
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mettle.sandbox import IsolationReport, Layer, SandboxConfig, StdioTest
from mettle.sandbox.isolation import check, refused
from mettle.sandbox.judge.comparators import outputs_match, values_match
from mettle.sandbox.zygote import frames, seccomp, syscalls, values

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.booleans(), inner, max_size=4)
        | st.sets(st.integers() | st.text() | st.tuples(st.integers(), st.text()), max_size=4)
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    """Equal, with equal types at every depth, and nan the same as nan."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    return bool(a == b) or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


@given(plain)
@settings(deadline=None)
def test_a_value_comes_back_with_its_types(value: Any) -> None:
    assert same(values.decode(values.encode(value)), value)


@given(st.binary(max_size=200) | plain.map(lambda value: values.encode(value)[:-1]))
@settings(deadline=None)
def test_bytes_that_are_no_value_are_refused_and_nothing_else_happens(data: bytes) -> None:
    try:
        values.decode(data)
    except values.UnencodableValue:
        return
    assert same(values.decode(values.encode(values.decode(data))), values.decode(data))


@given(plain)
@settings(deadline=None)
def test_a_value_matches_itself_unless_it_is_nan(value: Any) -> None:
    assert values_match(value, value, "typed", None) or "nan" in repr(value)


@pytest.mark.parametrize(
    ("value", "expected", "rule", "tolerance", "matches"),
    [
        (1, 1, "typed", None, True),
        (True, 1, "typed", None, False),
        (True, 1, "numeric", None, False),
        (1.0, 1, "typed", None, False),
        (1.0, 1, "numeric", None, True),
        ((1, [2]), [1, (2,)], "typed", None, True),
        ([1, 2], [1], "typed", None, False),
        (0.1 + 0.2, 0.3, "typed", None, False),
        (0.1 + 0.2, 0.3, "typed", 1e-9, True),
        (10**18 + 1, 10**18, "numeric", 1e-6, False),
        (float("nan"), float("nan"), "typed", 1.0, False),
        (float("inf"), float("inf"), "typed", None, True),
        (float("inf"), 1e308, "typed", 1.0, False),
        ({1: "a"}, {True: "a"}, "typed", None, False),
        ({"a": 1.0}, {"a": 1}, "numeric", None, True),
        ({1, 2}, {2, 1}, "typed", None, True),
        (10**400, 1.5, "numeric", 0.1, False),
        ("a", b"a", "typed", None, False),
    ],
)
def test_values_are_compared_by_type(value: Any, expected: Any, rule: Any, tolerance: Any, matches: bool) -> None:
    assert values_match(value, expected, rule, tolerance) is matches


@pytest.mark.parametrize(
    ("output", "expected", "rule", "matches"),
    [
        (b"1 2\n", b"1 2", "exact", False),
        (b"1 2 \r\n\n", b"1 2", "trim", True),
        (b"1  2\n", b"1 2", "trim", False),
        (b"1\n2", b"1 2", "tokens", True),
        (b"1.0", b"1", "tokens", False),
        (b"1.0000001", b"1.0", "floats", True),
        (b"1.1", b"1.0", "floats", False),
        (b"50000000000000001", b"50000000000000000", "floats", False),
        (b"50000000000000000.0", b"50000000000000001", "floats", False),
        (b"nan", b"1.0", "floats", False),
        (b"nan", b"nan", "floats", True),
        (b"1e999", b"1.0", "floats", False),
        (b"inf", b"1e308", "floats", False),
        (b"0x1", b"1.0", "floats", False),
        (b"1_0.0", b"10.0", "floats", False),
        (b"1.0 2.0", b"1.0", "floats", False),
        (b"", b"", "tokens", True),
    ],
)
def test_outputs_are_compared_by_the_rule(output: bytes, expected: bytes, rule: Any, matches: bool) -> None:
    assert outputs_match(output, expected, StdioTest(compare=rule)) is matches


@pytest.mark.parametrize(
    ("output", "expected", "rule", "matches"),
    [
        (b"\n 1 2 \n3\n", b"1 2\n3", {"compare": "lines"}, True),
        (b"1  2", b"1 2", {"compare": "lines"}, False),
        (b"1\n2", b"1 2", {"compare": "lines"}, False),
        (b"b\na\n", b"a\nb", {"compare": "lines", "any_order": True}, True),
        (b"b\na\na", b"a\nb\nb", {"compare": "lines", "any_order": True}, False),
        (b"b\na \n\n", b"a\nb", {"compare": "trim", "any_order": True}, True),
        (b"3 1\n2", b"1 2 3", {"any_order": True}, True),
        (b"3 1 1", b"1 3 3", {"any_order": True}, False),
        (b"YES\n", b"yes", {"ignore_case": True}, True),
        (b"YES\n", b"yes", {}, False),
        (b"Yes", b"yes\n", {"compare": "exact", "ignore_case": True}, False),
        (b"1.0 2\n3.50", b"1 2.00\n3.5", {"compare": "decimals"}, True),
        (b"1.0000001", b"1", {"compare": "decimals"}, False),
        (b"1 2", b"1\n2", {"compare": "decimals"}, False),
        (b"nan", b"NaN", {"compare": "decimals"}, False),
        (b"1_0", b"10", {"compare": "decimals"}, False),
        (b"1e3", b"1000", {"compare": "decimals"}, True),
        (b"1e99999999", b"1", {"compare": "decimals"}, False),
        (b"x 1.0", b"x 1", {"compare": "decimals"}, False),
        (b"100.5", b"100.0", {"compare": "floats", "abs_tolerance": 0, "rel_tolerance": 0.01}, True),
        (b"0.5", b"0.0", {"compare": "floats", "abs_tolerance": 0, "rel_tolerance": 0.01}, False),
        (b"0.5", b"0.0", {"compare": "floats", "abs_tolerance": 1}, True),
        (b"1e9", b"1.0", {"compare": "floats", "rel_tolerance": 0.999999}, False),
        (b"1.0", b"1.0", {"compare": "floats", "tolerance": 0}, True),
        (b"1e308", b"1e999", {"compare": "floats"}, False),
        (b"\xff\xfe", b"\xff\xfe", {"compare": "lines"}, True),
    ],
)
def test_rules_of_the_fields_benchmarks(output: bytes, expected: bytes, rule: dict[str, Any], matches: bool) -> None:
    assert outputs_match(output, expected, StdioTest(**rule)) is matches


@given(st.binary(max_size=60), st.sampled_from(["exact", "trim", "lines", "tokens", "floats", "decimals"]))
@settings(deadline=None)
def test_an_output_matches_itself_by_every_rule(output: bytes, rule: Any) -> None:
    assert outputs_match(output, output, StdioTest(compare=rule))
    assert outputs_match(output.upper(), output, StdioTest(compare=rule, ignore_case=True))


@given(st.dictionaries(st.text(), st.integers()), st.binary(max_size=1000))
@settings(deadline=None)
def test_a_frame_arrives_as_it_was_sent(header: dict[str, int], payload: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(frames.encode(header, payload))
        assert frames.receive(theirs) == (header, payload)
        ours.sendall(frames.encode(header, payload)[:-1])
        ours.shutdown(socket.SHUT_WR)
        assert frames.receive(theirs) is None


def test_a_frame_over_the_limit_is_refused_unread() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(frames.PREFIX.pack(2, 1 << 31))
        with pytest.raises(ValueError, match="over the limit"):
            frames.receive(theirs, 1 << 20)


def run_filter(program: bytes, number: int, arguments: tuple[int, ...] = (), arch: int = 0xC000003E) -> int:
    """What the kernel would answer: an interpreter of the few instructions that the filter uses."""
    data = struct.pack("=II Q 6Q", number, arch, 0, *(*arguments, *(0,) * (6 - len(arguments))))
    lines = list(struct.iter_unpack("=HBBI", program))
    position, register = 0, 0
    while True:
        code, if_true, if_false, constant = lines[position]
        position += 1
        if code == 0x06:
            return int(constant)
        if code == 0x20:
            (register,) = struct.unpack_from("=I", data, constant)
        elif code == 0x05:
            position += constant
        else:
            holds = {0x15: register == constant, 0x35: register >= constant, 0x45: bool(register & constant)}[code]
            position += if_true if holds else if_false


FILTER = seccomp.build_filter()
EPERM, ENOSYS = seccomp.refusal(1), seccomp.refusal(38)


def test_the_filter_answers_every_number_as_the_table_says() -> None:
    allowed = {*syscalls.PLAIN.values(), *syscalls.FORKS.values()}
    for number in range(syscalls.LAST_KNOWN + 50):
        if number in syscalls.CHECKED.values():
            continue
        wanted = seccomp.ALLOW if number in allowed else ENOSYS if number == 435 else EPERM
        if number > syscalls.LAST_KNOWN:
            wanted = ENOSYS
        assert run_filter(FILTER, number) == wanted, number


def test_watches_of_files_are_refused_where_they_cannot_be_limited() -> None:
    for program, answer in (
        (seccomp.build_filter(is_machine=True), seccomp.ALLOW),
        (seccomp.build_filter(is_machine=True, has_watches=False), EPERM),
        (FILTER, EPERM),
    ):
        assert {run_filter(program, number) for number in syscalls.WATCHES.values()} == {answer}


def test_a_process_without_namespaces_reaches_nothing_but_itself() -> None:
    program = seccomp.build_filter(only_pid=77)
    refused = (syscalls.BEYOND_LANDLOCK, syscalls.SOCKET_PAIRS, syscalls.FORKS, syscalls.WATCHES)
    for numbers in refused:
        assert {run_filter(program, number) for number in numbers.values()} == {EPERM}
    for number in syscalls.SIGNALS.values():
        assert run_filter(program, number, (77, 9)) == seccomp.ALLOW
        assert {run_filter(program, number, (pid, 9)) for pid in (78, 1, 0, 0xFFFFFFFF)} == {EPERM}
    assert run_filter(program, 56, (0x003D0F00,)) == seccomp.ALLOW, "a thread"
    assert run_filter(program, 56, (0x01200011,)) == EPERM, "a process"
    assert {run_filter(program, 72, (0, command)) for command in (5, 6, 7, 36, 37, 38, 8, 10, 15)} == {EPERM}
    assert run_filter(program, 72, (0, 1030)) == seccomp.ALLOW
    assert run_filter(program, 437) == ENOSYS
    assert run_filter(program, 53, (1,)) == run_filter(program, 157, (4,)) == EPERM


def test_what_is_counted_waits_for_process_1_and_nothing_else_does() -> None:
    program, waits = seccomp.build_counted(), 0x7FC00000
    assert {run_filter(program, number) for number in (56, *syscalls.MAKING.values())} == {waits}
    assert run_filter(program, 2, (0, os.O_CREAT)) == run_filter(program, 257, (0, 0, os.O_TMPFILE)) == waits
    for number in (0, 1, 2, 257, 61, syscalls.LAST_KNOWN + 1):
        assert run_filter(program, number) == seccomp.ALLOW


@given(st.integers(syscalls.LAST_KNOWN + 1, (1 << 32) - 1))
@settings(deadline=None)
def test_numbers_that_nobody_knows_do_not_exist(number: int) -> None:
    assert run_filter(FILTER, number) == ENOSYS


@pytest.mark.parametrize(
    ("name", "arguments", "answer"),
    [
        ("clone", (0x01200011,), seccomp.ALLOW),  # fork, as the C library does it
        ("clone", (0x003D0F00,), seccomp.ALLOW),  # a thread
        *(("clone", (17 | 1 << bit,), EPERM) for bit in (17, 25, 26, 27, 28, 29, 30)),
        ("socketpair", (1,), seccomp.ALLOW),
        ("socketpair", (16,), EPERM),
        ("ioctl", (0, 0x5401), seccomp.ALLOW),
        ("ioctl", (0, 0x5412), seccomp.refusal(25)),
        ("ioctl", (0, 0x541C), seccomp.refusal(25)),
        ("prlimit64", (0,), seccomp.ALLOW),
        ("prlimit64", (1,), EPERM),
        ("setpriority", (0, 0), seccomp.ALLOW),
        ("setpriority", (0, 1), EPERM),
        ("setpriority", (2, 0), EPERM),
        ("sched_setaffinity", (1,), EPERM),
        ("mmap", (0, 4096, 3, 0x22), seccomp.ALLOW),  # private memory
        ("mmap", (0, 4096, 1, 0x1, 3), seccomp.ALLOW),  # a file, shared
        ("mmap", (0, 4096, 3, 0x21), seccomp.refusal(12)),  # shared memory without a file
        ("mmap", (0, 4096, 3, 0x23), seccomp.refusal(12)),  # the same, validated
        ("mmap", (0, 4096, 3, 0x40022), seccomp.refusal(12)),  # huge pages
        ("mmap", (0, 4096, 3, 0x40001, 3), seccomp.refusal(12)),
        ("fcntl", (0, 2), seccomp.ALLOW),
        ("fcntl", (0, 1030), seccomp.ALLOW),
        ("fcntl", (0, 1032), seccomp.ALLOW),
        *(("fcntl", (0, command), EPERM) for command in (1024, 1026, 1031, 99)),
        ("setsockopt", (0, 1, 2), seccomp.ALLOW),
        ("setsockopt", (0, 6, 1), seccomp.ALLOW),
        ("setsockopt", (0, 41, 26), seccomp.ALLOW),  # IPV6_V6ONLY, which has the number of ATTACH_FILTER
        *(("setsockopt", (0, 1, option), EPERM) for option in (26, 50, 51, 52)),
        *(("setsockopt", (0, 1, option), seccomp.refusal(0)) for option in (7, 8)),
        ("setsockopt", (0, 6, 31), EPERM),
        ("prctl", (15,), seccomp.ALLOW),
        ("prctl", (22,), EPERM),
    ],
)
def test_checked_calls_depend_on_their_argument(name: str, arguments: tuple[int, ...], answer: int) -> None:
    assert run_filter(FILTER, syscalls.CHECKED[name], arguments) == answer


def test_where_a_cgroup_counts_memory_it_may_be_shared_and_sockets_may_grow() -> None:
    program = seccomp.build_filter(is_machine=True, is_memory_counted=True)
    assert run_filter(program, 9, (0, 4096, 3, 0x21)) == seccomp.ALLOW
    assert run_filter(program, 9, (0, 4096, 3, 0x40022)) == seccomp.refusal(12)
    assert run_filter(program, 54, (0, 1, 7)) == seccomp.ALLOW
    assert run_filter(program, 54, (0, 1, 26)) == EPERM


def test_without_forks_there_are_threads_and_nothing_else() -> None:
    program = seccomp.build_filter(only_pid=77)
    assert run_filter(program, 56, (0x003D0F00,)) == seccomp.ALLOW
    assert run_filter(program, 56, (0x01200011,)) == EPERM
    assert run_filter(program, 57) == EPERM
    assert run_filter(program, 58) == EPERM


def test_calls_for_another_architecture_are_fatal() -> None:
    assert run_filter(FILTER, 0, arch=0x40000003) == seccomp.KILL_PROCESS


def test_the_numbers_are_the_kernels() -> None:
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if not header.exists():
        pytest.skip("the kernel's headers are not installed")
    numbers = {name: int(number) for name, number in re.findall(r"#define __NR_(\w+) (\d+)", header.read_text())}
    for table in (syscalls.PLAIN, syscalls.FORKS, syscalls.CHECKED, syscalls.PRETEND_MISSING):
        assert {name: numbers[name] for name in table} == table


def test_another_architecture_has_no_filter_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    here = os.uname()
    monkeypatch.setattr(os, "uname", lambda: os.uname_result((*here[:4], "aarch64")))
    why = seccomp.why_unsupported()
    assert why is not None
    assert "aarch64" in why


def test_a_report_names_each_layer_and_what_would_help() -> None:
    report = refused(SandboxConfig(), {"user": "unshare(0x10000000): No space left on device [ENOSPC]", "seccomp": ""})
    text = "\n".join(report.lines())
    assert "NO   user namespace" in text
    assert "user.max_user_namespaces" in text
    assert report.as_dict()["grade"] == "none"
    with pytest.raises(Exception, match=r"user\.max_user_namespaces"):
        check(report, SandboxConfig())


def test_a_weaker_grade_is_taken_only_when_it_is_required() -> None:
    report = IsolationReport(
        "zygote", "ns-noseccomp", (Layer("seccomp", False, "old kernel", "new kernel"),), "", "", ""
    )
    with pytest.raises(Exception, match="old kernel"):
        check(report, SandboxConfig())
    check(report, SandboxConfig(require="ns-noseccomp"))
