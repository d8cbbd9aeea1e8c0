"""Files of a machine: in, out, listed, and kept in snapshots."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mettle.errors import UserError
from mettle.sandbox.machines.config import MachineConfig
from mettle.sandbox.protocols import Machine, Machines
from mettle.sandbox.testing.fixtures import MachineFixture


class FileContract(MachineFixture):
    """Transfers and snapshots."""

    async def test_files_go_in_and_out_byte_by_byte(self, machine: Machine, tmp_path: Path) -> None:
        data = os.urandom(3_000_000)
        await machine.upload("some/where/file", data)
        assert await machine.download("/work/some/where/file") == data
        (tmp_path / "run.sh").write_bytes(b"#!/bin/sh\necho ran\n")
        (tmp_path / "run.sh").chmod(0o755)
        (tmp_path / "inner").mkdir()
        (tmp_path / "inner" / "empty").write_bytes(b"")
        await machine.upload("tree", tmp_path)
        assert (await machine.exec("./run.sh && ls inner", cwd="/work/tree")).stdout == "ran\nempty\n"
        await machine.upload("some/where/file", "short")
        assert await machine.download("some/where/file") == b"short"

    async def test_what_cannot_be_moved_says_why(self, machine: Machine) -> None:
        with pytest.raises(FileNotFoundError):
            await machine.download("nothing")
        with pytest.raises(IsADirectoryError):
            await machine.download("/work")
        await machine.exec("mkfifo pipe; ln -s /dev/zero endless; ln -s loop loop; head -c 2000 /dev/zero > big")
        for name in ("pipe", "endless", "loop"):
            with pytest.raises(OSError, match=r"."):
                await machine.download(name)
        with pytest.raises(OSError, match="over 1000 bytes"):
            await machine.download("big", max_bytes=1000)
        with pytest.raises(OSError, match=r"."):
            await machine.upload("pipe", b"x")
        with pytest.raises(FileExistsError):
            await machine.upload("big/file", b"x")
        with pytest.raises(NotADirectoryError):
            await machine.list("big")
        with pytest.raises(UserError, match="cannot be read"):
            await machine.upload("x", Path("/no/such/file"))

    async def test_a_directory_is_listed(self, machine: Machine) -> None:
        await machine.exec(
            "echo 12345 > file; mkdir 'a directory'; ln -s file link; chmod 600 file; touch \"$(printf 'a\\nb')\""
        )
        entries = {entry.name: entry for entry in await machine.list()}
        assert {name: entry.kind for name, entry in entries.items()} == {
            "a directory": "directory",
            "a\nb": "file",
            "file": "file",
            "link": "link",
        }
        assert (entries["file"].num_bytes, entries["file"].mode) == (6, 0o600)

    async def test_a_snapshot_starts_another_machine(self, machine: Machine, machines: Machines) -> None:
        await machine.exec(
            "mkdir -p a/b empty; echo 1 > a/b/file; chmod 750 a/b/file; ln -s file a/b/link; ln a/b/file twin;"
            "mkfifo pipe; mkdir locked; echo 2 > locked/in; chmod 500 locked; touch -d @1000000000 a/b/file"
        )
        snapshot = await machine.snapshot()
        other = await machines.create(snapshot=snapshot)
        try:
            shown = await other.exec(
                "find . | sort; stat -c '%a %Y' a/b/file; readlink a/b/link; cat twin locked/in; stat -c %a locked"
            )
            names = [".", "./a", "./a/b", "./a/b/file", "./a/b/link", "./empty", "./locked", "./locked/in", "./twin"]
            assert shown.stdout.splitlines() == [*names, "750 1000000000", "file", "1", "2", "500"]
            await other.exec("echo changed > a/b/file")
            assert (await machine.exec("cat a/b/file")).stdout == "1\n"
        finally:
            await other.delete()

    async def test_first_files_are_there_at_the_start(self, machines: Machines) -> None:
        made = await machines.create(MachineConfig(files={"main.py": "print(40 + 2)", "data/raw": b"\0\xff"}))
        assert (await made.exec("python3 main.py")).stdout == "42\n"
        assert await made.download("data/raw") == b"\0\xff"
        await made.delete()
