"""Landlock alone: what a process that has restricted itself can no longer do, and kernels that have less of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from owners import ENVIRONMENT

from mettle.sandbox.zygote import landlock

PROGRAM = """
import os, socket, sys
from mettle.sandbox.zygote import kernel, landlock
inside, outside, port, abstract, parent = sys.argv[1:]
def tried(name, attempt):
    try: attempt(); print(name, "works")
    except OSError as error: print(name, os.strerror(error.errno))
def abstract_socket():
    s = socket.socket(socket.AF_UNIX); s.connect("\\0" + abstract)
def try_all():
    tried("read", lambda: open(outside + "/kept").read())
    tried("write", lambda: open(outside + "/kept", "a").close())
    tried("make", lambda: os.mkdir(outside + "/new"))
    tried("rename", lambda: (open(inside + "/a", "w").close(), os.makedirs(inside + "/b"), os.rename(inside + "/a", inside + "/b/a")))
    tried("device", lambda: os.mknod(inside + "/w", 0o20600, 0))
    tried("tcp", lambda: socket.create_connection(("127.0.0.1", int(port)), 1).close())
    tried("bind", lambda: socket.create_server(("127.0.0.1", 0)).close())
    tried("abstract", abstract_socket)
    tried("signal", lambda: os.kill(int(parent), 0))
"".encode("idna")
kernel.renounce_new_privileges()
own = landlock.Grants((landlock.Grant("/", landlock.EXECUTE | landlock.READ_FILE | landlock.READ_DIR), landlock.Grant(inside, landlock.MACHINE.files[0].rights)), allows_tcp=False)
if os.environ.get("RESTRICT"): landlock.restrict(own)
try_all()
"""


def findings(tmp_path: Path, *, is_restricted: bool) -> dict[str, str]:
    import socket

    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for directory in (inside, outside):
        directory.mkdir()
    (outside / "kept").write_text("x")
    name = f"mettle-landlock-{os.getpid()}-{is_restricted}"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind("\0" + name)
        abstract.listen()
        arguments = [inside, outside, server.getsockname()[1], name, os.getpid()]
        environment = {**ENVIRONMENT, "RESTRICT": "1" if is_restricted else ""}
        run = subprocess.run(
            [sys.executable, "-c", PROGRAM, *map(str, arguments)],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
    return dict(line.split(" ", 1) for line in run.stdout.splitlines())


@pytest.mark.skipif(landlock.version() < 6, reason="the kernel's Landlock is older than version 6")
def test_what_is_not_listed_is_refused_for_good(tmp_path: Path) -> None:
    found = findings(tmp_path, is_restricted=True)
    assert found.pop("read") == found.pop("rename") == "works"
    assert set(found) == {"write", "make", "device", "tcp", "bind", "abstract", "signal"}
    assert set(found.values()) <= {"Permission denied", "Operation not permitted"}


def test_without_it_all_of_that_works(tmp_path: Path) -> None:
    found = findings(tmp_path, is_restricted=False)
    assert set(found.values()) == {"works"}


class FakeKernel:
    """A kernel with a version of Landlock's interface; keeps what it was asked to hold."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.handled: tuple[int, int, int, int] = (0, 0, 0, 0)
        self.rights: list[int] = []
        self.flags = -1

    def call(self, number: int, what: str, *arguments: object) -> int:
        if number == 444:
            ruleset = arguments[0]._obj  # type: ignore[attr-defined]
            self.handled = (ruleset.files, ruleset.tcp, ruleset.scopes, int(arguments[1]))  # type: ignore[call-overload]
            return os.open("/dev/null", os.O_RDONLY)
        if number == 445:
            self.rights.append(arguments[2]._obj.rights)  # type: ignore[attr-defined]
        if number == 446:
            self.flags = int(arguments[1])  # type: ignore[call-overload]
        return 0


@pytest.mark.parametrize(
    ("version", "num_rights", "tcp", "scopes", "num_bytes", "flags"),
    [
        (2, 14, 0, 0, 8, 0),
        (3, 15, 0, 0, 8, 0),
        (4, 15, 3, 0, 16, 0),
        (5, 16, 3, 0, 16, 0),
        (6, 16, 3, 3, 24, 0),
        (9, 16, 3, 3, 24, 1),
    ],
)
def test_each_version_is_asked_for_what_it_knows_and_no_more(
    monkeypatch: pytest.MonkeyPatch, version: int, num_rights: int, tcp: int, scopes: int, num_bytes: int, flags: int
) -> None:
    fake = FakeKernel(version)
    monkeypatch.setattr(landlock, "version", lambda: version)
    monkeypatch.setattr(landlock, "_call", fake.call)
    landlock.restrict(landlock.CELL)
    assert fake.handled == ((1 << num_rights) - 1, tcp, scopes, num_bytes)
    assert all(rights < 1 << num_rights for rights in fake.rights)
    assert fake.flags == flags
    landlock.restrict(landlock.MACHINE)
    assert fake.handled[1] == 0


@pytest.mark.parametrize(("version", "why"), [(0, "no Landlock"), (1, "every rename")])
def test_a_kernel_that_has_too_little_is_named_and_asked_for_nothing(
    monkeypatch: pytest.MonkeyPatch, version: int, why: str
) -> None:
    monkeypatch.setattr(landlock, "version", lambda: version)
    monkeypatch.setattr(landlock, "_call", FakeKernel(version).call)
    assert why in (landlock.why_unsupported() or "")
    landlock.restrict(landlock.CELL)


def test_a_kernel_that_has_it_and_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(landlock, "version", lambda: 7)
    monkeypatch.setattr(landlock, "_call", refuse)
    with pytest.raises(OSError, match="Invalid"):
        landlock.restrict(landlock.CELL)
