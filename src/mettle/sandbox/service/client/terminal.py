"""Commands of machines for a person at a terminal: their output as it comes, their exit code, their files.

Invariant: bytes go to a pipe as they are; on a terminal, control characters of untrusted code are shown and not obeyed.
"""

from __future__ import annotations

import codecs
import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from mettle.errors import UserError
from mettle.sandbox.machines.commands import CommandSpec, ExecResult, StreamName
from mettle.sandbox.machines.config import MachineConfig
from mettle.sandbox.protocols import Machine
from mettle.sandbox.service.client.client import ServiceClient
from mettle.wording import printable

_TIMED_OUT: Final = 124
_ENDED: Final = 137
_KEPT_BYTES: Final = 16 << 20
_RESULT_BYTES: Final = 1 << 20  # the output has been written by then
_LOOK_S: Final = 0.5
_decoders: Final = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in ("stdout", "stderr")}


@dataclass(frozen=True, slots=True)
class Exit:
    """How a command ended, as a program's exit."""

    result: ExecResult
    stdout: bytes
    stderr: bytes

    @property
    def exit_code(self) -> int:
        code = self.result.exit_code
        return code if code is not None else _TIMED_OUT if self.result.is_timed_out else _ENDED

    def as_dict(self) -> dict[str, Any]:
        shown = {name: getattr(self, name).decode(errors="replace") for name in ("stdout", "stderr")}
        return {**asdict(self.result), **shown, "exit_code": self.exit_code}


def typed_command(
    env: Mapping[str, str], *, command: Sequence[str], cwd: str, timeout: float, is_fed: bool
) -> CommandSpec:
    """A command as it was typed: a single word is for the shell; standard input is read when it is to be fed."""
    if timeout <= 0:
        raise UserError(f"--timeout is {timeout:g}; it must be more than 0")
    words = command[0] if len(command) == 1 else command
    return CommandSpec.make(words, cwd, env, sys.stdin.buffer.read() if is_fed else None, timeout, _RESULT_BYTES)


async def execute_here(client: ServiceClient, machine_id: str, spec: CommandSpec, *, is_quiet: bool = False) -> Exit:
    """Run it in a machine and write what it writes, as it comes."""
    return await _follow(await client.machine(machine_id), spec, is_quiet=is_quiet)


async def run_once(client: ServiceClient, config: MachineConfig, spec: CommandSpec, *, is_quiet: bool = False) -> Exit:
    """Run it in a machine of its own, which ends with it."""
    machine = await client.create(config, "run")
    try:
        return await _follow(machine, spec, is_quiet=is_quiet)
    finally:
        await machine.delete()


async def start_here(client: ServiceClient, machine_id: str, spec: CommandSpec) -> str:
    """Start it in the background; its job's number."""
    machine = await client.machine(machine_id)
    job = await machine.start_command(replace(spec, max_output_bytes=_KEPT_BYTES))
    job.following.cancel()
    return job.id.rpartition("/")[2]


async def job_logs(client: ServiceClient, machine_id: str, name: str | None) -> dict[str, Any]:
    """What a job has written, and how it stands with it; the last job when none is named."""
    name = name or await _last_job(client, machine_id)
    shown = await client.job_output(machine_id, name)
    result: ExecResult | None = shown["result"]
    code = None if result is None else result.exit_code
    written = {stream: shown[stream] for stream in ("stdout", "stderr")}
    return {"job": name, "state": _state(name, result), "exit_code": code, **written}


async def follow_job(client: ServiceClient, machine_id: str, name: str | None, *, is_patient: bool) -> str:
    """Write what a job has written, and if patient, what it writes until it ends; how it stands with it then."""
    name = name or await _last_job(client, machine_id)
    written: dict[StreamName, str] = {"stdout": "", "stderr": ""}
    while True:
        shown = await client.job_output(machine_id, name, wait_s=_LOOK_S if is_patient else 0.0)
        result: ExecResult | None = shown["result"]
        for stream, before in written.items():
            # A character that has come by half is shown when all of it has.
            after = shown[stream] if result else shown[stream].rstrip("\N{REPLACEMENT CHARACTER}")
            written[stream] = after
            write_output(stream, after[_num_shared(before, after) :].encode())
        if result is not None or not is_patient:
            return _state(name, result)


def _num_shared(before: str, after: str) -> int:
    """How much of the text was shown already; of output over the limit its middle goes missing meanwhile."""
    if after.startswith(before):
        return len(before)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False)))


async def _last_job(client: ServiceClient, machine_id: str) -> str:
    jobs = await client.jobs(machine_id)
    if not jobs:
        raise UserError(f"machine {machine_id} has no background command; `exec --background` starts one")
    return str(jobs[-1]["id"])


def _state(name: str, result: ExecResult | None) -> str:
    return f"job {name} is running" if result is None else f"job {name} has ended: {_how(result)}"


def files_of(given: Sequence[str]) -> dict[str, bytes | str | Path]:
    """FILE[:PATH] as what goes where. Raises: UserError for a file that is not there."""
    files: dict[str, bytes | str | Path] = {}
    for text in given:
        source, _, target = text.partition(":")
        if not Path(source).exists():
            raise UserError(f"{source} cannot be uploaded: there is no such file")
        files[target or Path(source).resolve().name] = Path(source)
    return files


def write_output(stream: StreamName, data: bytes) -> None:
    """Write it here, at once."""
    out = sys.stdout if stream == "stdout" else sys.stderr
    if out.isatty():
        out.write(printable(_decoders[stream].decode(data)))
    elif hasattr(out, "buffer"):
        out.buffer.write(data)
    else:
        out.write(data.decode(errors="replace"))
    out.flush()


async def _follow(machine: Machine, spec: CommandSpec, *, is_quiet: bool) -> Exit:
    held: dict[StreamName, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
    async with machine.stream_command(spec) as stream:
        async for chunk in stream:
            if is_quiet:
                room = _KEPT_BYTES - len(held[chunk.stream])
                held[chunk.stream] += chunk.data[:room]
            else:
                write_output(chunk.stream, chunk.data)
        result = stream.result
    assert result is not None, "a stream that has ended has a result"
    if not is_quiet and (why := _why_killed(result, machine, spec)):
        write_output("stderr", f"{why}\n".encode())
    return Exit(result, bytes(held["stdout"]), bytes(held["stderr"]))


def _why_killed(result: ExecResult, machine: Machine, spec: CommandSpec) -> str:
    """What was over, and which option gives more; empty for a command that ended by itself."""
    if result.is_timed_out:
        return f"ended after {spec.timeout_s:g} s; --timeout gives it more"
    if result.is_out_of_memory:
        return f"ended: {machine.config.memory_mb} MB of memory were not enough; `create` and `run` take --memory"
    return ""


def _how(result: ExecResult) -> str:
    if result.is_timed_out:
        return "its time was over"
    if result.is_out_of_memory:
        return "out of memory"
    return "it was ended" if result.exit_code is None else f"exit code {result.exit_code}"
