"""A shell in a machine, for a person at a terminal: `mettle sandbox shell`.

A program inside (`_INSIDE`) gives the shell a terminal of the machine's own, and speaks with this side over a port of
the machine. Towards it go frames, keys or the window's size; back come the bytes of the screen, as they are.

Invariant: this terminal is as it was when the shell is over, however it ends. What the shell writes drives this
terminal, as in any remote shell: that is what a person asks for here and in no other command.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import sys
import termios
import tty
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Final

from mettle.errors import SandboxError, UserError
from mettle.sandbox.machines.commands import ExecResult
from mettle.sandbox.protocols import Machine

_FRAME: Final = struct.Struct(">cI")
_PIECE: Final = 1 << 16
_START_S: Final = 30.0
_DRAIN_S: Final = 2.0
_LONGEST_S: Final = 24 * 3600.0
_SHELLS: Final = ["sh", "-c", "command -v bash >/dev/null && exec bash -i || exec sh -i"]
_INSIDE: Final = r"""
import fcntl, os, pty, select, signal, socket, struct, sys, termios
link = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
child, screen = pty.fork()
if child == 0:
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        os.write(2, f"{sys.argv[2]}: {error.strerror}\n".encode())
        os._exit(127)
held = b""
while True:
    ready = select.select([screen, link], [], [])[0]
    if screen in ready:
        try:
            data = os.read(screen, 65536)
        except OSError:
            data = b""
        if not data:
            break
        link.sendall(data)
    if link in ready:
        data = link.recv(65536)
        if not data:
            os.kill(child, signal.SIGHUP)
            break
        held += data
        while len(held) >= 5 and len(held) >= 5 + struct.unpack(">I", held[1:5])[0]:
            end = 5 + struct.unpack(">I", held[1:5])[0]
            kind, body, held = held[:1], held[5:end], held[end:]
            if kind == b"w":
                fcntl.ioctl(screen, termios.TIOCSWINSZ, body)
            else:
                while body:
                    body = body[os.write(screen, body):]
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
sys.exit(code if code >= 0 else 128 - code)
"""


async def shell_here(machine: Machine, command: Sequence[str] = ()) -> int:
    """Run a shell, or the command, at this process's terminal; its exit code. Raises: UserError without a terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UserError("a shell needs a terminal; in a pipe, `mettle sandbox exec -i ID -- sh` reads from it")
    listener = await machine.listen()
    running: asyncio.Task[ExecResult] | None = None
    try:
        port = listener.getsockname()[1]
        words = ["python3", "-c", _INSIDE, str(port), *(command or _SHELLS)]
        env = {"TERM": os.environ.get("TERM", "xterm")}
        running = asyncio.create_task(machine.exec(words, env=env, timeout_s=_LONGEST_S), name="shell")
        link = await _accept(listener, running)
        with contextlib.closing(link), _raw_terminal():
            await _carry(link, running)
        return _exit_code(await running)
    finally:
        listener.close()
        if running is not None and not running.done():
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError, SandboxError):
                await running


async def _accept(listener: socket.socket, running: asyncio.Task[ExecResult]) -> socket.socket:
    """The connection from inside. Raises: SandboxError when the program there has ended first."""
    accepting = asyncio.ensure_future(asyncio.get_running_loop().sock_accept(listener))
    done, _ = await asyncio.wait({accepting, running}, timeout=_START_S, return_when=asyncio.FIRST_COMPLETED)
    if accepting not in done:
        accepting.cancel()
        why = (
            (running.result().stderr.strip().splitlines() or ["it said nothing"])[-1] if running in done else "too slow"
        )
        raise SandboxError(f"no shell could be started in the machine, which needs python3 for it: {why}")
    link, _ = accepting.result()
    link.setblocking(False)
    return link


async def _carry(link: socket.socket, running: asyncio.Task[ExecResult]) -> None:
    """Keys in, screen out, until the shell ends or the machine does."""
    loop = asyncio.get_running_loop()
    waiting: asyncio.Queue[tuple[bytes, bytes]] = asyncio.Queue()

    def resize() -> None:
        waiting.put_nowait((b"w", _window()))

    resize()
    loop.add_signal_handler(signal.SIGWINCH, resize)
    loop.add_reader(sys.stdin.fileno(), lambda: waiting.put_nowait((b"k", os.read(sys.stdin.fileno(), _PIECE))))
    typing = asyncio.create_task(_type(link, waiting), name="shell keys")
    showing = asyncio.create_task(_show(link), name="shell screen")
    try:
        await asyncio.wait({showing, running}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({showing}, timeout=_DRAIN_S)
    finally:
        loop.remove_reader(sys.stdin.fileno())
        loop.remove_signal_handler(signal.SIGWINCH)
        for task in (typing, showing):
            task.cancel()
        await asyncio.wait({typing, showing})


async def _type(link: socket.socket, waiting: asyncio.Queue[tuple[bytes, bytes]]) -> None:
    while True:
        kind, body = await waiting.get()
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().sock_sendall(link, _FRAME.pack(kind, len(body)) + body)


async def _show(link: socket.socket) -> None:
    async for data in _pieces(link):
        while data:
            data = data[os.write(sys.stdout.fileno(), data) :]


async def _pieces(link: socket.socket) -> AsyncIterator[bytes]:
    with contextlib.suppress(ConnectionError):
        while data := await asyncio.get_running_loop().sock_recv(link, _PIECE):
            yield data


@contextlib.contextmanager
def _raw_terminal() -> Iterator[None]:
    """Every key goes to the shell, ^C too."""
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    tty.setraw(terminal, termios.TCSADRAIN)  # what was typed ahead stays
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _window() -> bytes:
    size = os.get_terminal_size(sys.stdout.fileno())  # not what LINES and COLUMNS say, which no resize changes
    return struct.pack("HHHH", size.lines, size.columns, 0, 0)


def _exit_code(result: ExecResult) -> int:
    return 137 if result.exit_code is None else result.exit_code
