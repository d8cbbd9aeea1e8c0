"""`mettle sandbox shell`: a terminal inside, keys and window size that reach it, and this terminal as it was."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator

import pytest
from own_service import typed

from mettle.processes.readiness import is_readable

pytestmark = pytest.mark.usefixtures("forked_commands")


class Person:
    """Somebody at a terminal who has typed `mettle sandbox ...`."""

    def __init__(self, *words: str) -> None:
        self.screen, self._terminal = pty.openpty()
        self.resize(30, 100)
        self.before = termios.tcgetattr(self._terminal)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mettle.cli", "sandbox", *words],
            stdin=self._terminal,
            stdout=self._terminal,
            stderr=self._terminal,
            env={**os.environ, "TERM": "dumb", "LINES": "24", "COLUMNS": "80"},  # as some shells export
            start_new_session=True,
        )

    def resize(self, lines: int, columns: int) -> None:
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def types(self, text: str) -> None:
        os.write(self.screen, text.encode())

    def sees(self, wanted: str) -> str:
        """All that came until this did."""
        seen, deadline = b"", time.monotonic() + 100
        while wanted.encode() not in seen:
            assert time.monotonic() < deadline, seen
            if is_readable(self.screen, 0.5):
                seen += os.read(self.screen, 65536)
        return seen.decode(errors="replace")

    def is_let_in(self) -> bool:
        """Whether keys go inside by now."""
        deadline = time.monotonic() + 100
        while self.is_terminal_as_it_was and time.monotonic() < deadline:
            time.sleep(0.02)
        return not self.is_terminal_as_it_was

    @property
    def is_terminal_as_it_was(self) -> bool:
        return termios.tcgetattr(self._terminal) == self.before

    def leaves(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(100)
        os.close(self.screen)
        os.close(self._terminal)


@pytest.fixture
def at_terminal(own: object) -> Iterator[Callable[..., Person]]:
    people: list[Person] = []

    def sit(*words: str) -> Person:
        people.append(Person(*words))
        return people[-1]

    yield sit
    for person in people:
        person.leaves()


def test_a_shell_has_a_terminal_and_leaves_this_one_as_it_was(at_terminal: Callable[..., Person]) -> None:
    machine = typed("create").stdout.decode().strip()
    person = at_terminal("shell", machine)
    assert person.is_let_in()
    person.types("tty; stty size; echo $((6 * 7))x\r")
    seen = person.sees("42x")
    assert "/dev/pts/" in seen
    assert "30 100" in seen
    person.types("sleep 1000\r")
    person.sees("sleep 1000")
    time.sleep(0.3)  # until it runs; a ^C before that ends the line and not the command, which is as well
    person.types("\x03")
    person.types("echo code$?\r")
    person.sees("code130")
    person.resize(40, 120)
    person.process.send_signal(signal.SIGWINCH)  # the kernel tells the foreground group, which this is not
    person.types("while [ \"$(stty size)\" != '40 120' ]; do sleep 0.05; done; echo res''ized\r")
    person.sees("resized")
    person.types("exit 5\r")
    assert person.process.wait(100) == 5
    assert person.is_terminal_as_it_was


def test_the_end_of_the_machine_ends_its_shell(at_terminal: Callable[..., Person]) -> None:
    machine = typed("create").stdout.decode().strip()
    person = at_terminal("shell", machine, "cat")
    assert person.is_let_in()
    person.types("hello\r")
    person.sees("hello\r\nhello")
    assert typed("delete", machine).returncode == 0
    assert "error: " in person.sees("it was deleted")
    assert person.process.wait(100) != 0
    assert person.is_terminal_as_it_was


@pytest.mark.usefixtures("own")
def test_without_a_terminal_the_way_without_one_is_named() -> None:
    machine = typed("create").stdout.decode().strip()
    ended = typed("shell", machine)
    assert ended.returncode == 2
    assert b"mettle sandbox exec -i ID -- sh" in ended.stderr
