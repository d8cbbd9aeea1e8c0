"""Calls that process 1 counts before they happen: threads started and files made, where no namespace limits them.

The judged process installs a filter that holds these calls up (seccomp's user notification) and hands the listener to
process 1 while it is still trusted. Process 1 only counts and lets a call go on or fail; it never acts for the code, so
that nothing the code changes meanwhile in its memory matters.
Invariant: a call that is held up is answered; one over the limit fails with EAGAIN (threads) or EDQUOT (files).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct
from typing import Final

from mettle.sandbox.zygote import kernel, seccomp, syscalls

_NR_SECCOMP: Final = 317
_SET_MODE_FILTER: Final = 1
_NEW_LISTENER: Final = 1 << 3
_RECEIVE: Final = 0xC0502100
_SEND: Final = 0xC0182101
_CONTINUE: Final = 1
_NOTICE_BYTES: Final = 80
_NOTICE: Final = struct.Struct("=QIIi")  # id, thread, flags, call
_ARGUMENTS: Final = struct.Struct("=6Q")
_MODE_ARGUMENTS: Final = {syscalls.MAKING["mkdir"]: 1, syscalls.MAKING["mkdirat"]: 2}
_OWNERS: Final = 0o700
_ANSWER: Final = struct.Struct("=QqiI")

_libc = ctypes.PyDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def hold_up() -> int:
    """Hold this process's counted calls up from now on; the descriptor on which they are announced."""
    program = seccomp.build_counted()
    described = kernel.SockFprog(len(program) // 8, program)
    numbers = [ctypes.c_long(number) for number in (_NR_SECCOMP, _SET_MODE_FILTER, _NEW_LISTENER)]
    descriptor = int(_libc.syscall(*numbers, ctypes.byref(described)))
    if descriptor < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp with a listener: {os.strerror(number)}")
    return descriptor


def hand_over(channel: socket.socket) -> None:
    """Called by the process that is to be judged: from now on the other end of the channel decides."""
    listener = hold_up()
    socket.send_fds(channel, [b"L"], [listener])
    os.close(listener)


def take_over(channel: socket.socket) -> int:
    """The listener of the process at the other end."""
    message, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
    if not message or not descriptors:
        raise OSError(errno.EPIPE, "a test's process ended before its calls could be counted")
    os.set_inheritable(descriptors[0], False)
    return descriptors[0]


class Counter:
    """The calls of one test."""

    def __init__(self, listener: int, pid: int, max_threads: int, max_files: int) -> None:
        self.listener = listener
        self._pid = pid
        self._max_threads = max_threads
        self._files_left = max_files

    def attend(self) -> bool:
        """Answer one call that is held up; False when nobody is left to hold up."""
        notice = bytearray(_NOTICE_BYTES)
        try:
            fcntl.ioctl(self.listener, _RECEIVE, notice)
        except OSError as error:
            return error.errno in (errno.EINTR, errno.EAGAIN)
        identity, _, _, number = _NOTICE.unpack_from(notice)
        refusal = self._refusal(number, _ARGUMENTS.unpack_from(notice, _NOTICE_BYTES - _ARGUMENTS.size))
        answer = _ANSWER.pack(identity, 0, -refusal, 0 if refusal else _CONTINUE)
        try:
            fcntl.ioctl(self.listener, _SEND, answer)
        except OSError as error:
            return error.errno == errno.ENOENT  # it was killed while it waited
        return True

    def _refusal(self, number: int, arguments: tuple[int, ...]) -> int:
        if number == syscalls.CHECKED["clone"]:
            return errno.EAGAIN if self._num_threads() >= self._max_threads else 0
        mode = _MODE_ARGUMENTS.get(number)
        if mode is not None and arguments[mode] & _OWNERS != _OWNERS:
            return errno.EPERM  # process 1 must be able to look into every directory
        self._files_left -= 1
        return errno.EDQUOT if self._files_left < 0 else 0

    def _num_threads(self) -> int:
        try:
            return os.stat(f"/proc/{self._pid}/task").st_nlink - 2
        except OSError:
            return self._max_threads  # what cannot be counted is not allowed
