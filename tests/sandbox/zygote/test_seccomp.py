"""The filter of system calls: each number and argument gets the answer of the table."""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mettle.sandbox.zygote import seccomp, syscalls


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
