"""What a machine is for, over both backends: commands, jobs, files, ports, lifetimes."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from mettle.errors import SandboxError, UserError
from mettle.sandbox import Machine, MachineConfig, MachineLost, MachinePool, SandboxConfig
from mettle.sandbox.packages import package_paths

pytestmark = pytest.mark.asyncio(loop_scope="module")


class MachineContract:
    """What every backend keeps. A subclass gives the fixture `pool`."""

    @pytest_asyncio.fixture(loop_scope="module")
    async def machine(self, pool: MachinePool) -> AsyncIterator[Machine]:
        made = await pool.create(MachineConfig(env={"GREETING": "hello"}, labels={"for": "a test"}))
        yield made
        await made.delete()

    async def test_a_command_has_an_exit_code_and_two_streams(self, machine: Machine) -> None:
        result = await machine.exec("echo out; echo err >&2; exit 3")
        assert (result.exit_code, result.stdout, result.stderr) == (3, "out\n", "err\n")
        assert not result.is_timed_out
        assert not result.is_truncated

    async def test_a_list_is_run_without_a_shell(self, machine: Machine) -> None:
        assert (await machine.exec(["printf", "%s", "$HOME"])).stdout == "$HOME"

    async def test_a_command_that_is_not_there_is_a_result(self, machine: Machine) -> None:
        result = await machine.exec(["no-such-command"])
        assert result.exit_code == 127
        assert "no-such-command" in result.stderr
        assert (await machine.exec(["/etc/passwd"])).exit_code == 126
        assert (await machine.exec("true", cwd="/nowhere")).exit_code == 126
        assert (await machine.exec("#" * 200_000)).exit_code == 126  # longer than the kernel takes
        assert (await machine.exec(["printf", "a\0b"])).exit_code == 126

    async def test_a_signal_is_an_exit_code_as_in_a_shell(self, machine: Machine) -> None:
        assert (await machine.exec("kill -SEGV $$")).exit_code == 128 + 11

    async def test_standard_input_is_fed_and_ends(self, machine: Machine) -> None:
        data = os.urandom(300_000).hex()
        assert (await machine.exec(["wc", "-c"], stdin=data)).stdout.strip() == str(len(data))
        assert (await machine.exec(["cat"])).stdout == ""

    async def test_input_that_nobody_reads_holds_nothing_up(self, machine: Machine) -> None:
        assert (await machine.exec("exec <&-; echo done", stdin=b"x" * 1_000_000)).stdout == "done\n"
        assert (await machine.exec("echo done", stdin=b"x" * 1_000_000)).stdout == "done\n"

    async def test_the_environment_is_the_machines_then_the_commands(self, machine: Machine) -> None:
        show = "echo $GREETING $NAME $METTLE_TEST_SECRET"
        assert (await machine.exec(show, env={"NAME": "you"})).stdout == "hello you\n"
        assert (await machine.exec(show, env={"GREETING": "bye"})).stdout == "bye\n"

    async def test_files_live_between_commands(self, machine: Machine) -> None:
        await machine.exec("mkdir -p deep && echo 1 > deep/file")
        assert (await machine.exec("cat file", cwd="/work/deep")).stdout == "1\n"
        assert (await machine.exec("cat file", cwd="deep")).stdout == "1\n"

    async def test_a_background_process_outlives_its_command_and_may_go_on_printing(self, machine: Machine) -> None:
        started = time.monotonic()
        code = "(for i in 1 2 3 4; do echo tick; sleep 0.5; done; echo all > ticked) & echo started"
        assert (await machine.exec(code)).stdout.startswith("started")
        assert time.monotonic() - started < 1.5
        assert (
            await machine.exec("while [ ! -e ticked ]; do sleep 0.02; done; cat ticked", timeout_s=5)
        ).stdout == "all\n"

    async def test_a_deadline_ends_everything_that_the_command_started(self, machine: Machine) -> None:
        code = (
            "import os, signal, sys, time\n"
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "for number in range(3):\n"
            "    if os.fork() == 0:\n"
            "        os.setsid()\n"
            "        if os.fork() == 0:\n"
            "            time.sleep(2.0)\n"
            "            open(f'survivor{number}', 'w').close()\n"
            "        os._exit(0)\n"
            "print('waiting', flush=True)\n"
            "time.sleep(60)\n"
        )
        started = time.monotonic()
        result = await machine.exec(["python3", "-c", code], timeout_s=0.5)
        assert result.is_timed_out
        assert result.exit_code is None
        assert result.stdout == "waiting\n"
        assert time.monotonic() - started < 2.0
        await asyncio.sleep(2.0)
        assert (await machine.exec("ls")).stdout == ""

    async def test_a_deadline_spares_what_other_commands_run(self, machine: Machine) -> None:
        job = await machine.start("sleep 0.6; echo spared")
        assert (await machine.exec("sleep 9", timeout_s=0.2)).is_timed_out
        ended = await job.wait(5)
        assert ended is not None
        assert ended.stdout == "spared\n"

    async def test_commands_run_side_by_side(self, machine: Machine) -> None:
        started = time.monotonic()
        results = await asyncio.gather(*(machine.exec(f"sleep 0.5; echo {n}") for n in range(8)))
        assert [result.stdout for result in results] == [f"{n}\n" for n in range(8)]
        assert time.monotonic() - started < 3.5

    async def test_a_cancelled_caller_takes_the_command_along(self, machine: Machine) -> None:
        task = asyncio.create_task(machine.exec("sleep 0.7; touch survivor", timeout_s=60))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.8)
        assert (await machine.exec("ls")).stdout == ""

    async def test_long_output_keeps_its_beginning_and_its_end(self, machine: Machine) -> None:
        result = await machine.exec("seq 100000", max_output_bytes=1000)
        assert result.is_truncated
        assert result.exit_code == 0
        assert result.stdout.startswith("1\n2\n")
        assert result.stdout.endswith("99999\n100000\n")
        assert "bytes left out" in result.stdout
        assert len(result.stdout) < 1100
        exact = await machine.exec("printf '%1000d' 1", max_output_bytes=1000)
        assert not exact.is_truncated
        assert len(exact.stdout) == 1000

    async def test_a_flood_of_output_is_ended(self, machine: Machine) -> None:
        result = await machine.exec("yes", timeout_s=20)
        assert result.is_truncated
        assert result.exit_code is None
        assert not result.is_timed_out
        assert len(result.stdout) < (1 << 20) + 100

    async def test_output_that_is_no_text_does_not_raise(self, machine: Machine) -> None:
        assert "\ufffd" in (await machine.exec(r"printf '\377\000'")).stdout

    async def test_output_comes_as_a_stream(self, machine: Machine) -> None:
        stream = machine.stream("echo one; sleep 0.2; echo two >&2; exit 4")
        assert stream.result is None
        chunks = [chunk async for chunk in stream]
        assert [(chunk.stream, chunk.data) for chunk in chunks] == [("stdout", b"one\n"), ("stderr", b"two\n")]
        assert stream.result is not None
        assert stream.result.exit_code == 4

    async def test_a_stream_waits_for_its_reader_and_loses_nothing(self, machine: Machine) -> None:
        num_bytes = 0
        async for chunk in machine.stream("head -c 5000000 /dev/zero"):
            num_bytes += len(chunk.data)
            if num_bytes < 200_000:
                await asyncio.sleep(0.05)
        assert num_bytes == 5_000_000

    async def test_a_stream_that_is_left_ends_its_command(self, machine: Machine) -> None:
        async with machine.stream("echo 1; sleep 0.5; touch survivor", timeout_s=60) as stream:
            async for _ in stream:
                break
        await asyncio.sleep(0.6)
        assert (await machine.exec("ls")).stdout == ""

    async def test_a_job_runs_in_the_background(self, machine: Machine) -> None:
        job = await machine.start("echo begun; read line; echo $line; exit 5", stdin="go\n")
        assert job.id.startswith(machine.id)
        result = await job.wait(5)
        assert result is not None
        assert (result.exit_code, result.stdout) == (5, "begun\ngo\n")
        assert job.poll() == result

    async def test_a_job_is_watched_and_killed(self, machine: Machine) -> None:
        job = await machine.start("echo begun; sleep 60")
        assert await job.wait(0.3) is None
        assert job.poll() is None
        assert (await job.output()).stdout == "begun\n"
        result = await job.kill()
        assert result.exit_code is None
        assert not result.is_timed_out
        assert await job.kill() == result

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

    async def test_a_snapshot_starts_another_machine(self, machine: Machine, pool: MachinePool) -> None:
        await machine.exec(
            "mkdir -p a/b empty; echo 1 > a/b/file; chmod 750 a/b/file; ln -s file a/b/link; ln a/b/file twin; mkfifo pipe;"
            "mkdir locked; echo 2 > locked/in; chmod 500 locked; touch -d @1000000000 a/b/file"
        )
        snapshot = await machine.snapshot()
        other = await pool.create(snapshot=snapshot)
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

    async def test_first_files_are_there_at_the_start(self, pool: MachinePool) -> None:
        made = await pool.create(MachineConfig(files={"main.py": "print(40 + 2)", "data/raw": b"\0\xff"}))
        assert (await made.exec("python3 main.py")).stdout == "42\n"
        assert await made.download("data/raw") == b"\0\xff"
        await made.delete()

    async def test_a_server_inside_is_reached_through_connect(self, machine: Machine) -> None:
        await machine.exec("echo found > index")
        serve = (
            "import http.server as h, sys\n"
            "server = h.ThreadingHTTPServer(('127.0.0.1', 0), h.SimpleHTTPRequestHandler)\n"
            "print(server.server_port, flush=True); server.serve_forever()"
        )
        job = await machine.start(["python3", "-c", serve])
        while not (port := (await job.output()).stdout):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        reader, writer = await asyncio.open_connection(sock=await machine.connect(int(port)))
        writer.write(b"GET /index HTTP/1.0\r\n\r\n")
        assert (await reader.read()).endswith(b"found\n")
        writer.close()
        await job.kill()
        with pytest.raises(ConnectionRefusedError):
            await machine.connect(int(port))

    async def test_a_program_inside_reaches_a_listener_of_the_host(self, machine: Machine) -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"you said " + await reader.readline())
            await writer.drain()
            writer.close()

        listener = await machine.listen()
        port = listener.getsockname()[1]
        server = await asyncio.start_server(answer, sock=listener)
        async with server:
            code = (
                f"import socket; s = socket.create_connection(('127.0.0.1', {port}));"
                "s.sendall(b'hello\\n'); print(s.makefile().read(), end='')"
            )
            assert (await machine.exec(["python3", "-c", code])).stdout == "you said hello\n"
            with pytest.raises(OSError, match="in use"):
                await machine.listen(port)
        with pytest.raises(UserError, match="no port 99999"):
            await machine.listen(99999)

    async def test_memory_over_the_limit_ends_the_largest_process(self, pool: MachinePool) -> None:
        made = await pool.create(MachineConfig(memory_mb=64))
        small = await made.start("sleep 0.5; echo small")
        code = "import sys\nkept = []\nwhile True: kept.append(bytearray(1 << 20))"
        result = await made.exec(["python3", "-c", code], timeout_s=20)
        assert result.is_out_of_memory
        assert result.exit_code == 137
        ended = await small.wait(5)
        assert ended is not None
        assert ended.stdout == "small\n"
        await made.delete()

    async def test_an_ended_machine_says_so(self, pool: MachinePool) -> None:
        made = await pool.create()
        running = asyncio.create_task(made.exec("sleep 60", timeout_s=60))
        await asyncio.sleep(0.1)
        await made.delete()
        await made.delete()
        assert not made.is_alive
        for attempt in (running, made.exec("true"), made.download("x"), made.listen(), made.snapshot()):
            with pytest.raises(SandboxError, match="it was deleted"):
                await attempt
        with pytest.raises(SandboxError, match="there is no machine"):
            pool.get(made.id)

    async def test_a_lifetime_ends(self, pool: MachinePool) -> None:
        made = await pool.create(MachineConfig(lifetime_s=0.4))
        with pytest.raises(MachineLost, match=r"its lifetime of 0.4 s is over"):
            await made.exec("sleep 60", timeout_s=60)

    async def test_an_idle_machine_ends_and_a_busy_one_does_not(self, pool: MachinePool) -> None:
        made = await pool.create(MachineConfig(idle_s=0.4))
        assert (await made.exec("sleep 0.9; echo worked")).stdout == "worked\n"
        assert made.is_alive
        await asyncio.sleep(0.7)
        with pytest.raises(MachineLost, match=r"nothing was asked of it for 0.4 s"):
            await made.exec("true")

    async def test_what_the_caller_gets_wrong_is_said(self, pool: MachinePool, machine: Machine) -> None:
        with pytest.raises(UserError, match="memory_mb is 1"):
            MachineConfig(memory_mb=1)
        with pytest.raises(UserError, match="lifetime_s is -1"):
            MachineConfig(lifetime_s=-1)
        with pytest.raises(UserError, match="must be strings"):
            await machine.exec("true", env={"A": 1})  # type: ignore[dict-item]
        with pytest.raises(UserError, match="cannot be set"):
            await pool.create(MachineConfig(env={"A=B": "1"}))

    async def test_machines_are_known_by_id_and_label(self, pool: MachinePool, machine: Machine) -> None:
        assert pool.get(machine.id) is machine
        assert [known.id for known in pool.machines if known.config.labels.get("for") == "a test"] == [machine.id]


@pytest.mark.usefixtures("_needs_isolation")
class TestIsolatedMachines(MachineContract):
    @pytest.fixture
    def pool(self, machines: MachinePool) -> MachinePool:
        return machines

    async def test_the_report_is_stored_with_the_machine(self, machine: Machine) -> None:
        assert machine.isolation.grade == "ns"

    async def test_any_directory_can_be_made_and_ends_with_the_machine(self, machine: Machine) -> None:
        await machine.upload("/app/main.sh", "echo $PWD")
        assert (await machine.exec("sh main.sh", cwd="/app")).stdout == "/app\n"
        result = await machine.exec("mkdir /home/me && touch /etc/x /usr/x /opt/x")
        assert "/opt/x" not in result.stderr

    async def test_a_terminal_can_be_opened(self, machine: Machine) -> None:
        result = await machine.exec(["script", "-qec", "tty; echo $((6*7))", "/dev/null"])
        assert result.stdout == "/dev/pts/0\r\n42\r\n", result

    async def test_a_compiler_and_processes_work(self, machine: Machine) -> None:
        code = "from multiprocessing import Pool\nif __name__ == '__main__':\n    print(sum(Pool(3).map(abs, range(-9, 0))))"
        await machine.upload("pool.py", code)
        assert (await machine.exec("python3 pool.py")).stdout == "45\n"
        await machine.upload("main.c", '#include <stdio.h>\nint main() { puts("compiled"); }')
        if (await machine.exec("command -v gcc")).exit_code == 0:
            assert (await machine.exec("gcc main.c && ./a.out")).stdout == "compiled\n"

    async def test_idle_machines_are_cheap(self, machines: MachinePool) -> None:
        started = time.process_time(), time.monotonic()
        made = [await machines.create() for _ in range(50)]
        wall_s = time.monotonic() - started[1]
        # Process 1 does not let its own user look into it.
        resident = [_proportional_bytes(pid) for pid in _children(machines.template_pid) if os.geteuid() == 0] or [0]
        for one in made:
            await one.delete()
        assert wall_s / 50 < 0.1
        assert sum(resident) / len(resident) < 6 << 20


class TestUnsafeMachines(MachineContract):
    @pytest.fixture
    def pool(self, unsafe_machines: MachinePool) -> MachinePool:
        return unsafe_machines

    async def test_the_report_says_that_nothing_isolates(self, machine: Machine) -> None:
        assert machine.isolation.backend == "unsafe"
        assert machine.isolation.grade == "none"


@pytest.mark.usefixtures("_needs_isolation")
async def test_chosen_packages_are_shown_and_nothing_beside_them() -> None:
    async with MachinePool(SandboxConfig(python_packages=("pytest", "no-such-package"))) as pool:
        machine = await pool.create()
        shown = await machine.exec(["python3", "-c", "import pytest, pluggy; print(pytest.__file__)"])
        assert shown.stdout == "/packages/pytest/__init__.py\n", shown.stderr
        names = (await machine.exec("ls /packages")).stdout.split()
        assert "pluggy" in names
        assert "pydantic" not in names
        assert (await machine.exec("touch /packages/pytest/x /packages/x")).exit_code != 0
    assert package_paths(("pytest", "no-such-package")).missing == ("no-such-package",)


def _children(pid: int | None) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _proportional_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
