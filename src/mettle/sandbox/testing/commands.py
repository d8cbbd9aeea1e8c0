"""Commands in a machine: exit codes, input, output, deadlines."""

from __future__ import annotations

import asyncio
import os
import time

import pytest

from mettle.sandbox.protocols import Machine
from mettle.sandbox.testing.fixtures import MachineFixture


class CommandContract(MachineFixture):
    """What commands do, whatever they do it in."""

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
        # It waits for a file that is written only after the command has come back.
        code = "(echo tick; while [ ! -e go ]; do echo tick; sleep 0.1; done; echo all > ticked) & echo started"
        assert "started" in (await machine.exec(code, timeout_s=60)).stdout
        wait = "touch go; while [ ! -e ticked ]; do sleep 0.02; done; cat ticked"
        assert (await machine.exec(wait, timeout_s=60)).stdout == "all\n"

    async def test_a_deadline_ends_everything_that_the_command_started(self, machine: Machine) -> None:
        code = (
            "import os, signal, sys, time\n"
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "for number in range(3):\n"
            "    if os.fork() == 0:\n"
            "        os.setsid()\n"
            "        if os.fork() == 0:\n"
            "            time.sleep(6.0)\n"
            "            open(f'survivor{number}', 'w').close()\n"
            "        os._exit(0)\n"
            "print('waiting', flush=True)\n"
            "time.sleep(60)\n"
        )
        started = time.monotonic()
        # Long enough to get to its first word on a busy host, and over before any survivor would leave its mark.
        result = await machine.exec(["python3", "-c", code], timeout_s=2.0)
        assert result.is_timed_out
        assert result.exit_code is None
        assert result.stdout == "waiting\n"
        assert time.monotonic() - started < 30.0, "the command itself would have slept for 60"
        await asyncio.sleep(max(0.0, started + 7.0 - time.monotonic()))
        assert (await machine.exec("ls")).stdout == ""

    async def test_a_deadline_spares_what_other_commands_run(self, machine: Machine) -> None:
        job = await machine.start("sleep 0.6; echo spared")
        assert (await machine.exec("sleep 9", timeout_s=0.2)).is_timed_out
        ended = await job.wait(5)
        assert ended is not None
        assert ended.stdout == "spared\n"

    async def test_commands_run_side_by_side(self, machine: Machine) -> None:
        # Each waits for all the others.
        code = "touch here{n}; while [ $(ls here* | wc -l) -lt 8 ]; do sleep 0.05; done; echo {n}"
        results = await asyncio.gather(*(machine.exec(code.format(n=n), timeout_s=60) for n in range(8)))
        assert [result.stdout for result in results] == [f"{n}\n" for n in range(8)]

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
