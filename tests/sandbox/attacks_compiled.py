"""Attacks by machine code of the attacker's own: no interpreter and no C library stands between it and the kernel.

Each program is a whole x86_64 executable of about 150 bytes, made by hand: it makes one system call and ends with the
number of the error as its exit status, so that 0 is a breach. It is written, made executable and run, as an agent would
with a compiler; `CALLS_32` makes the call in the way of 32-bit programs, which have other numbers.
"""

from __future__ import annotations

import os
import struct
import subprocess
import tempfile
from typing import Final, Literal

from attack import Attack, group

_LOAD_ADDRESS = 0x400000
_EXIT = bytes.fromhex("f7d889c7b83c0000000f05")  # neg eax; mov edi, eax; mov eax, 60; syscall
_EXIT_32 = bytes.fromhex("f7d889c3b801000000cd80")  # neg eax; mov ebx, eax; mov eax, 1; int 0x80


def executable(code: bytes) -> bytes:
    """The smallest file that the kernel runs: one header, one segment, the code."""
    size = 64 + 56 + len(code)
    start = _LOAD_ADDRESS + 120
    ident = b"\x7fELF\x02\x01\x01" + bytes(9)
    header = ident + struct.pack("<HHIQQQIHHHHHH", 2, 62, 1, start, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    return header + struct.pack("<IIQQQQQQ", 1, 5, 0, _LOAD_ADDRESS, _LOAD_ADDRESS, size, size, 4096) + code


def _call(number: int, *arguments: int) -> bytes:
    """A program that makes one call, as 64-bit programs do."""
    registers = ("bf", "be", "ba", "41ba")  # mov edi, esi, edx, r10d
    loads = b"".join(
        bytes.fromhex(code) + struct.pack("<I", value & 0xFFFFFFFF)
        for code, value in zip(registers, arguments, strict=False)
    )
    return executable(loads + b"\xb8" + struct.pack("<I", number) + b"\x0f\x05" + _EXIT)


def _call_32(number: int, *arguments: int) -> bytes:
    """The same by interrupt 0x80, with the numbers of 32-bit programs."""
    registers = ("bb", "b9", "ba")  # mov ebx, ecx, edx
    loads = b"".join(
        bytes.fromhex(code) + struct.pack("<I", value & 0xFFFFFFFF)
        for code, value in zip(registers, arguments, strict=False)
    )
    return executable(loads + b"\xb8" + struct.pack("<I", number) + b"\xcd\x80" + _EXIT_32)


def _run(program: bytes) -> str:
    return (
        "import subprocess\n"
        f"open('own', 'wb').write({program!r}); os.chmod('own', 0o755)\n"
        "status = subprocess.run(['./own']).returncode\n"
        "os.unlink('own')\n"
        "print('status', status)\n"
        "if status == 0: breach()"
    )


def _takes_32_bit_calls() -> bool:
    """Whether this kernel answers interrupt 0x80 at all: by a program that asks for its own number."""
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "probe")
        with open(path, "wb") as file:
            file.write(executable(b"\xb8\x14\0\0\0\xcd\x80" + _EXIT_32))
        os.chmod(path, 0o755)
        try:
            return subprocess.run([path], check=False).returncode >= 0
        except OSError:
            return False


_OPENS_32: Final[Literal["any", ""]] = "any" if _takes_32_bit_calls() else ""
_OFF_32: Final = "" if _OPENS_32 else "this host's kernel takes no 32-bit calls"

COMPILED = group(
    "the kernel refused the call, whoever made it and by whatever entrance",
    [
        Attack("makes a user namespace by a program of its own", _run(_call(272, 0x10000000))),
        Attack("lets itself be traced by a program of its own", _run(_call(101, 0))),
        Attack("changes its execution domain by a program of its own", _run(_call(135, 0))),
        Attack("makes a user namespace by a 32-bit call", _run(_call_32(310, 0x10000000)), _OPENS_32, off=_OFF_32),
        Attack("lets itself be traced by a 32-bit call", _run(_call_32(26, 0)), _OPENS_32, off=_OFF_32),
        Attack("changes its execution domain by a 32-bit call", _run(_call_32(136, 0)), _OPENS_32, off=_OFF_32),
    ],
)
