"""The process that becomes the judged code: it shuts the last doors behind itself, waits for its job, and runs it,
or executes the program that the job names.

It is forked ahead of time by a process 1 that has already confined itself, so that it has no capability from its first
instruction. It holds its three standard streams (and, in a function-call test, descriptor 3, which accepts the one
value that it returns) and never an expected output.
Invariant: if a door does not shut, the child says so and ends; it never runs code behind an open one.
"""

from __future__ import annotations

import atexit
import builtins
import gc
import linecache
import math
import os
import resource
import signal
import socket
import struct
import sys
import traceback
import types
from typing import Any, Final, NamedTuple, NoReturn

from mettle.sandbox.zygote import frames, jail, kernel, landlock_only, values

RESULT_FD: Final = 3
JOB: Final = struct.Struct(">III")  # lengths of what follows: how to run (JSON), the source, a call's arguments
READY: Final = b"ready"
_JOB_FD: Final = 4
_HARNESS_FAILED: Final = 70
_template_space_bytes: list[int] = []
_leave: Final = os._exit  # kept, because judged code may replace the one in `os`
_SOURCE_NAME: Final = "solution.py"
REHEARSAL: Final = "def f(a): return a + 1\nn = int('7')\nx = [f(i) for i in range(n)]\ns = str(sum(x))\n"
_ROOM_TO_REPORT_BYTES: Final = 32 << 20
_GROWN_SPACE_BYTES: Final = 32 << 20  # since the template, at most
_THREAD_STACKS_BYTES: Final = 64 << 20
_RESERVED_FACTOR: Final = 4
_RESERVED_BYTES: Final = 1 << 30
_RESERVED_STACKS: Final = 16
_CANNOT_EXECUTE: Final = 126


class ForkOrder(NamedTuple):
    """What a waiting process is told to become."""

    header: dict[str, Any]
    source: bytes
    arguments: bytes


def live(job: socket.socket, streams: tuple[int, int, int, int], program: bytes | None, scratch: str) -> NoReturn:
    """The child's whole life. `streams` become descriptors 0 to 3; `scratch` is where it works when there is no jail
    with a /work of its own. `program` is the filter of a child that is held by Landlock; others inherit process 1's.

    Nothing that goes wrong returns to process 1's code, and none of it looks like a good end.
    """
    try:
        _live(job, streams, program, scratch)
    finally:
        _leave(_HARNESS_FAILED)


def _live(job: socket.socket, streams: tuple[int, int, int, int], program: bytes | None, scratch: str) -> None:
    try:
        job = _arrange_descriptors(job, streams)
        _shut_doors(job, program, scratch)
        # Whatever can be done before the job is there costs no one any time.
        space_bytes = _address_space_bytes()
        _begin_anew()
        _rehearse()
        job.sendall(READY)
    except OSError as error:
        job.sendall(str(error).encode())
        return
    order = _receive_job(job)
    if order is None:
        return
    job.close()
    _limit(order.header, space_bytes)
    if program is not None:
        landlock_only.finish(program)
    if order.header["mode"] == "program":
        _become_program(order.header)
    _become(order)


def _receive_job(job: socket.socket) -> ForkOrder | None:
    """What to do, or None when process 1 has gone."""
    prefix = frames.receive_exactly(job, JOB.size)
    if prefix is None:
        return None
    pieces = [frames.receive_exactly(job, num_bytes) for num_bytes in JOB.unpack(prefix)]
    text, source, arguments = pieces
    if text is None or source is None or arguments is None:
        return None
    return ForkOrder(frames.decode_header(text), source, arguments)


def _arrange_descriptors(job: socket.socket, streams: tuple[int, int, int, int]) -> socket.socket:
    for descriptor, wanted in zip(_above(streams, _JOB_FD), range(4), strict=True):
        os.dup2(descriptor, wanted, inheritable=wanted != RESULT_FD)
    moved = os.dup2(job.fileno(), _JOB_FD, inheritable=False)
    job.detach()
    os.closerange(_JOB_FD + 1, 1 << 16)
    return socket.socket(fileno=moved)


def _above(descriptors: tuple[int, ...], highest: int) -> list[int]:
    """Copies that no later dup2 can overwrite."""
    assert min(descriptors) > highest, "process 1 keeps the low descriptors occupied"
    return list(descriptors)


def _shut_doors(job: socket.socket, program: bytes | None, scratch: str) -> None:
    os.setsid()
    kernel.set_dumpable(True)  # its own /proc/self must be its own; process 1 stays closed
    if scratch:
        kernel.die_with_parent()
        os.chdir(scratch)
    if program is not None:
        landlock_only.restrict(job, scratch)


def _limit(header: dict[str, Any], space_bytes: int) -> None:
    """The limits that belong to this test. Process 1 decides; these hold even if it is slow."""
    cpu_s = math.ceil(header["cpu_s"]) + 1
    jail.lower(resource.RLIMIT_CPU, cpu_s)
    if header.get("is_space_reserved"):
        _limit_data(header["memory_bytes"], header["stack_bytes"])
        return
    space = space_bytes + header["memory_bytes"] + _THREAD_STACKS_BYTES
    jail.lower(resource.RLIMIT_AS, space + _ROOM_TO_REPORT_BYTES)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (min(space, hard), hard))


def _address_space_bytes() -> int:
    """What this process has now, which a test's own memory comes on top of."""
    try:
        file = os.open("/proc/self/statm", os.O_RDONLY)  # without a file object, whose making touches many pages
    except OSError:  # no /proc inside
        return (_template_space_bytes or [0])[0] + _GROWN_SPACE_BYTES
    pages = int(os.read(file, 64).split()[0])
    os.close(file)
    return pages * os.sysconf("SC_PAGE_SIZE")


def _limit_data(memory_bytes: int, stack_bytes: int) -> None:
    """For programs that reserve more than they use: far above what process 1 allows, and far below the host's all."""
    data = _RESERVED_FACTOR * memory_bytes + _RESERVED_BYTES + _RESERVED_STACKS * stack_bytes
    jail.lower(resource.RLIMIT_DATA, data)


def forget_harness() -> None:
    """Take the modules that judged code is not to see from the interpreter's list: in the template, because doing it in
    every child would give each a copy of the pages that they are on. They go on by what they know of each other; what
    they load from now on is none of them. And note with how much address space children begin."""
    _template_space_bytes[:] = [_address_space_bytes()]
    for name in [name for name in sys.modules if name == "mettle" or name.startswith("mettle.")]:
        del sys.modules[name]


def _begin_anew() -> None:
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # which no fork does for it
    sys.argv = [_SOURCE_NAME]
    sys.path.insert(0, os.getcwd())
    gc.enable()


def _rehearse() -> None:
    """Compile and run a little, so that the pages it writes to are this process's own before its time counts."""
    exec(compile(REHEARSAL, _SOURCE_NAME, "exec", dont_inherit=True), types.ModuleType("rehearsal").__dict__)


def _become(job: ForkOrder) -> NoReturn:
    header, source = job.header, job.source.decode()
    linecache.cache[_SOURCE_NAME] = (len(source), None, source.splitlines(keepends=True), _SOURCE_NAME)
    status = 1
    try:
        if header["mode"] == "call":
            os.set_inheritable(RESULT_FD, False)
            _call(source, header["function"], job.arguments)
        else:
            os.close(RESULT_FD)
            _execute(source, "__main__")
        status = 0
    except SystemExit as end:
        status = _exit_status(end)
    except BaseException as error:
        _report(error)
    _finish(status)


def _become_program(header: dict[str, Any]) -> NoReturn:
    """Execute a command in this process's place, with its descriptors and an environment written by the owner."""
    if header["has_value"]:
        os.set_inheritable(RESULT_FD, True)
    else:
        os.close(RESULT_FD)
    stack_bytes, hard = header["stack_bytes"], resource.getrlimit(resource.RLIMIT_STACK)[1]
    stack_bytes = stack_bytes if hard == resource.RLIM_INFINITY else min(stack_bytes, hard)
    resource.setrlimit(resource.RLIMIT_STACK, (stack_bytes, hard))
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores, and a program would go on ignoring
        signal.signal(number, signal.SIG_DFL)
    argv = header["argv"]
    try:
        os.execvpe(argv[0], argv, header["environment"])
    except OSError as error:
        os.write(2, f"{argv[0]} cannot be executed: {error.strerror}\n".encode())
    _leave(_CANNOT_EXECUTE)


def _execute(source: str, name: str) -> dict[str, Any]:
    """Run the source as a module of this name, the way the interpreter runs a file."""
    module = types.ModuleType(name)
    module.__dict__.update(__builtins__=builtins, __file__=_SOURCE_NAME)
    sys.modules[name] = module
    exec(compile(source, _SOURCE_NAME, "exec", dont_inherit=True), module.__dict__)
    return module.__dict__


def _call(source: str, function: str, arguments: bytes) -> None:
    """Run the source, call one function of it (or a method of its `Solution`), and send the value out."""
    args, kwargs = values.decode(arguments)
    write, encode = os.write, values.encode
    namespace = _execute(source, "solution")
    target = namespace.get(function)
    if target is None and isinstance(namespace.get("Solution"), type):
        target = getattr(namespace["Solution"](), function, None)
    if target is None:
        raise NameError(f"the code defines no function {function!r}")
    data = encode(target(*args, **kwargs))
    while data:
        data = data[write(RESULT_FD, data) :]


def _exit_status(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    sys.stderr.write(f"{end.code}\n")
    return 1


def _report(error: BaseException) -> None:
    """Print the traceback without this file's frames, with the room kept back for it if memory has run out."""
    try:
        resource.setrlimit(resource.RLIMIT_AS, (resource.getrlimit(resource.RLIMIT_AS)[1],) * 2)
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        if sys.excepthook is sys.__excepthook__:
            traceback.print_exception(type(error), error, trace)  # knows the source through linecache
        else:
            sys.excepthook(type(error), error, trace)
    except BaseException:
        os.write(2, f"{type(error).__name__}\n".encode(errors="replace"))


def _finish(status: int) -> NoReturn:
    """End as an interpreter does: join threads, run exit handlers, flush; then leave without unwinding the harness."""
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        atexit._run_exitfuncs()
    except BaseException:
        status = status or 1
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except BaseException:
            status = status or 120
    _leave(status)
