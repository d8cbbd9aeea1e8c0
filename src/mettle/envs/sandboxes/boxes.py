"""One sandbox: a machine, what its owner is told about it, and its commands in the background.

Everything here runs in the shared machines's event loop. Parts: `Box`, `open_box` (a request turned into a machine).
Invariant: an error is of `errors.py`, and names the sandbox.
"""

from __future__ import annotations

import logging
import re
import secrets
import shlex
import shutil
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from mettle.envs.sandboxes.errors import (
    CommandTimeoutError,
    SandboxFileNotFoundError,
    SandboxNotRunningError,
    SandboxTimeoutError,
)
from mettle.envs.sandboxes.models import (
    BackgroundJob,
    BackgroundJobStatus,
    CommandResponse,
    CreateSandboxRequest,
    Sandbox,
    SandboxStatus,
)
from mettle.envs.sandboxes.shared import SharedMachines

if TYPE_CHECKING:
    from mettle.sandbox.protocols import Job, Machine

logger = logging.getLogger(__name__)

_KEEP_ALIVE: Final = re.compile(r"(tail -f /dev/null|sleep (infinity|inf|\d+))?")
_MAX_LOG_BYTES: Final = 16 << 20
_TRUNCATED_EXIT: Final = 137
_warned: set[str] = set()


def warn_once(text: str) -> None:
    """Say something one time in this process."""
    if text not in _warned:
        _warned.add(text)
        logger.warning(text)


class Box:
    """A machine under the name that environments know it by."""

    def __init__(self, machine: Machine, described: Sandbox) -> None:
        self.machine = machine
        self.described = described
        self._jobs: dict[str, Job] = {}

    @property
    def id(self) -> str:
        return self.machine.id

    async def execute(
        self, command: str, working_dir: str | None, env: dict[str, str] | None, timeout_s: float
    ) -> CommandResponse:
        """Run a command in a shell. Raises: CommandTimeoutError; SandboxNotRunningError."""
        self.require_running(command)
        result = await self.machine.exec([*_shell(), command], cwd=working_dir or "/work", env=env, timeout_s=timeout_s)
        if result.is_timed_out:
            raise CommandTimeoutError(self.id, command, timeout_s)
        code = _TRUNCATED_EXIT if result.exit_code is None else result.exit_code
        return CommandResponse(stdout=result.stdout, stderr=result.stderr, exit_code=code)

    async def start_job(self, command: str, working_dir: str | None, env: dict[str, str] | None) -> BackgroundJob:
        """Start a command whose output and exit code go to files inside."""
        self.require_running(command)
        job_id = secrets.token_hex(4)
        names = {name: f"/tmp/job_{job_id}.{name}" for name in ("stdout", "stderr", "exit")}
        if self.described.isolation == "none":
            names = {name: f"/work/.job_{job_id}.{name}" for name in names}
        out, err, end = (shlex.quote(name.replace("/work/", "", 1)) for name in names.values())
        shell = shlex.join(_shell())
        script = (
            f'{shell} "$0" >{out} 2>{err} </dev/null; code=$?; echo $code >{end}.part; mv {end}.part {end}; exit $code'
        )
        if working_dir and self.described.isolation != "none":
            script = f"cd {shlex.quote(working_dir)} && {script}"
        self._jobs[job_id] = await self.machine.start(["sh", "-c", script, command], env=env)
        return BackgroundJob(
            job_id=job_id,
            sandbox_id=self.id,
            stdout_log_file=names["stdout"],
            stderr_log_file=names["stderr"],
            exit_file=names["exit"],
        )

    async def job_status(self, job: Any) -> BackgroundJobStatus:
        """How far a job has come; its output when it is over."""
        self.require_running()
        running = self._jobs.get(job.job_id)
        result = running.poll() if running is not None else None
        if result is None:
            return BackgroundJobStatus(job_id=job.job_id, completed=False)
        stdout = await self._log(job.stdout_log_file)
        stderr = await self._log(job.stderr_log_file)
        return BackgroundJobStatus(
            job_id=job.job_id, completed=True, exit_code=result.exit_code, stdout=stdout, stderr=stderr
        )

    async def run_job(
        self, command: str, working_dir: str | None, env: dict[str, str] | None, timeout_s: float
    ) -> BackgroundJobStatus:
        """Start a job and wait for it. Raises: CommandTimeoutError, after which it has been ended."""
        job = await self.start_job(command, working_dir, env)
        running = self._jobs[job.job_id]
        if await running.wait(timeout_s) is None:
            await running.kill()
            raise CommandTimeoutError(self.id, command, timeout_s)
        return await self.job_status(job)

    async def read(self, path: str) -> bytes:
        """A file's bytes. Raises: SandboxFileNotFoundError."""
        self.require_running()
        try:
            return await self.machine.download(path)
        except FileNotFoundError as error:
            raise SandboxFileNotFoundError(f"no file {path} in sandbox {self.id}") from error

    def require_running(self, command: str | None = None) -> None:
        """Raises: SandboxTimeoutError when its time was over; SandboxNotRunningError when it has ended otherwise."""
        if self.machine.is_alive:
            return
        why = self.machine.why_ended or "its process 1 ended"
        is_over = "lifetime" in why or "nothing was asked" in why
        kind = SandboxTimeoutError if is_over else SandboxNotRunningError
        status = SandboxStatus.TIMEOUT if is_over else SandboxStatus.TERMINATED
        message = f"Sandbox {self.id} is not running: {why}"
        raise kind(self.id, status=status, error_type=status, command=command, message=message)

    async def _log(self, path: str) -> str:
        try:
            return (await self.machine.download(path, max_bytes=_MAX_LOG_BYTES)).decode(errors="replace")
        except FileNotFoundError:
            return ""


def _shell() -> tuple[str, ...]:
    return ("bash", "-c") if shutil.which("bash", path="/usr/bin:/bin") else ("sh", "-c")


async def open_box(machines: SharedMachines, request: CreateSandboxRequest | Any) -> Box:
    """Make what a request asks for; a GPU, which there is none of, is said once.

    Raises: UserError for an image that the backend does not have.
    """
    from mettle.sandbox import MachineConfig

    _warn_of_what_is_missing(request)
    most = machines.config
    memory_mb = min(int(request.memory_gb * 1024), most.max_memory_mb)
    disk_mb = min(int((getattr(request, "disk_size_gb", None) or 1) * 1024), most.max_disk_mb)
    idle_minutes = getattr(request, "idle_timeout_minutes", None)
    env = {**(request.environment_vars or {}), **(getattr(request, "secrets", None) or {})}
    config = MachineConfig(
        memory_mb=max(16, memory_mb),
        disk_mb=max(1, disk_mb),
        max_processes=most.max_processes,
        lifetime_s=request.timeout_minutes * 60,
        idle_s=idle_minutes * 60 if idle_minutes else None,
        env={name: str(value) for name, value in env.items()},
        labels={label: "" for label in request.labels or ()},
        image=request.docker_image or None,
    )
    packages = tuple(getattr(request, "python_packages", ()))
    machine = await machines.create(config, packages, getattr(request, "backend", None))
    box = Box(machine, _describe(machine, request))
    command = request.start_command
    if isinstance(command, str) and not _KEEP_ALIVE.fullmatch(command.strip()):
        await machine.start([*_shell(), command])
    return box


def _warn_of_what_is_missing(request: Any) -> None:
    if request.gpu_count:
        warn_once(f"a sandbox was asked for with {request.gpu_count} GPU(s); the embedded sandbox has none")


def _describe(machine: Machine, request: Any) -> Sandbox:
    now = datetime.now(UTC)
    return Sandbox(
        id=machine.id,
        name=request.name,
        docker_image=request.docker_image,
        start_command=request.start_command,
        cpu_cores=request.cpu_cores,
        memory_gb=machine.config.memory_mb / 1024,
        disk_size_gb=machine.config.disk_mb / 1024,
        gpu_count=0,
        timeout_minutes=request.timeout_minutes,
        labels=list(request.labels or ()),
        created_at=now,
        updated_at=now,
        started_at=now,
        isolation=machine.isolation.grade,
    )
