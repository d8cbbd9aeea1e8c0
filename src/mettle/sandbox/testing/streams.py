"""Output as it comes, and commands in the background."""

from __future__ import annotations

import asyncio

from mettle.sandbox.protocols import Machine
from mettle.sandbox.testing.fixtures import MachineFixture


class StreamContract(MachineFixture):
    """Streams and jobs."""

    async def test_output_comes_as_a_stream(self, machine: Machine) -> None:
        stream = machine.stream("echo one; sleep 0.2; echo two >&2; exit 4")
        was_running = stream.result is None
        chunks = [chunk async for chunk in stream]
        assert was_running
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
