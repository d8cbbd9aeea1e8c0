"""Clients of this process's sandboxes: asynchronous, blocking, and the one that verifiers' environments hold.

Parts: `AsyncSandboxClient`; `ThreadedAsyncSandboxClient` (the same, since nothing here blocks an event loop);
`SandboxClient` (for code without an event loop); `APIClient` (nothing to log in to). Invariant: every client sees every
sandbox of this process; closing one closes no sandbox.
"""
# The parameters are called what environments call them.
# ruff: noqa: ASYNC109

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeVar

from mettle.envs.sandboxes.boxes import Box, open_box
from mettle.envs.sandboxes.errors import (
    APIError,
    DownloadTimeoutError,
    SandboxNotRunningError,
    UploadTimeoutError,
)
from mettle.envs.sandboxes.models import (
    BackgroundJob,
    BackgroundJobStatus,
    BulkDeleteSandboxResponse,
    CommandResponse,
    FileUploadResponse,
    ReadFileResponse,
    Sandbox,
    SandboxListResponse,
    SandboxStatus,
)
from mettle.envs.sandboxes.shared import SharedMachines, shared_machines
from mettle.errors import RolloutError

T = TypeVar("T")
_COMMAND_S: Final = 300.0
_TRANSFER_S: Final = 300.0


class APIClient:
    """Accepted where a client is made, and not used."""

    def __init__(self, api_key: str | None = None, **_: Any) -> None:
        self.api_key = api_key


AsyncAPIClient = APIClient


class AsyncSandboxClient:
    """Sandboxes, from any event loop."""

    def __init__(self, api_key: str | None = None, *_: Any, **__: Any) -> None:
        self.api_key = api_key

    async def __aenter__(self) -> AsyncSandboxClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def create(self, request: Any) -> Sandbox:
        """A new sandbox, running. Raises: APIError when none can be made."""

        async def work(home: SharedMachines) -> Sandbox:
            try:
                box = await open_box(home, request)
            except RolloutError as error:
                raise APIError(f"no sandbox could be made: {error}") from error
            home.boxes[box.id] = box
            return box.described

        return await _run(work)

    async def get(self, sandbox_id: str) -> Sandbox:
        """How a sandbox is."""

        async def work(home: SharedMachines) -> Sandbox:
            return _look(_box(home, sandbox_id))

        return await _run(work)

    async def list(
        self,
        team_id: str | None = None,
        status: str | None = None,
        labels: Sequence[str] | None = None,
        page: int = 1,
        per_page: int = 50,
        exclude_terminated: bool | None = None,
        **_: Any,
    ) -> SandboxListResponse:
        """The sandboxes of this process, page by page."""

        async def work(home: SharedMachines) -> SandboxListResponse:
            found = [_look(box) for box in home.boxes.values() if set(labels or ()) <= set(box.described.labels)]
            found = [one for one in found if status in (None, one.status)]
            if exclude_terminated:
                found = [one for one in found if one.status == SandboxStatus.RUNNING]
            shown = found[(page - 1) * per_page : page * per_page]
            return SandboxListResponse(
                sandboxes=shown, total=len(found), page=page, per_page=per_page, has_next=page * per_page < len(found)
            )

        return await _run(work)

    async def wait_for_creation(self, sandbox_id: str, max_attempts: int = 60, **_: Any) -> None:
        """Sandboxes are ready when `create` returns; raises if this one has ended since."""

        async def work(home: SharedMachines) -> None:
            _box(home, sandbox_id).require_running()

        await _run(work)

    async def bulk_wait_for_creation(self, sandbox_ids: Sequence[str], **_: Any) -> dict[str, str]:
        """The status of each."""
        for sandbox_id in sandbox_ids:
            await self.wait_for_creation(sandbox_id)
        return {sandbox_id: SandboxStatus.RUNNING.value for sandbox_id in sandbox_ids}

    async def delete(self, sandbox_id: str) -> dict[str, Any]:
        """End a sandbox. One that has ended is no error."""

        async def work(home: SharedMachines) -> dict[str, Any]:
            box = home.boxes.pop(sandbox_id, None)
            if box is not None:
                await box.machine.delete()
            return {"id": sandbox_id, "status": SandboxStatus.TERMINATED.value}

        return await _run(work)

    async def bulk_delete(
        self, sandbox_ids: Sequence[str] | None = None, labels: Sequence[str] | None = None, **_: Any
    ) -> BulkDeleteSandboxResponse:
        """End many, by id or by label."""
        chosen = list(sandbox_ids or ())
        if labels:
            chosen += [sandbox.id for sandbox in (await self.list(labels=labels, per_page=1 << 30)).sandboxes]
        await asyncio.gather(*(self.delete(sandbox_id) for sandbox_id in chosen))
        return BulkDeleteSandboxResponse(succeeded=chosen, failed=[], message=f"{len(chosen)} deleted")

    async def execute_command(
        self,
        sandbox_id: str,
        command: str,
        working_dir: str | None = None,
        env: dict[str, str] | None = None,
        timeout: float | None = None,
        user: str | None = None,
    ) -> CommandResponse:
        """Run a command in a shell, from /work. Raises: CommandTimeoutError; SandboxNotRunningError."""

        async def work(home: SharedMachines) -> CommandResponse:
            return await _box(home, sandbox_id).execute(command, working_dir, env, timeout or _COMMAND_S)

        return await _run(work)

    async def start_background_job(
        self,
        sandbox_id: str,
        command: str,
        working_dir: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
    ) -> BackgroundJob:
        """Start a command and return at once."""

        async def work(home: SharedMachines) -> BackgroundJob:
            return await _box(home, sandbox_id).start_job(command, working_dir, env)

        return await _run(work)

    async def get_background_job(
        self, sandbox_id: str, job: BackgroundJob, timeout: float | None = None
    ) -> BackgroundJobStatus:
        """How far a background command has come."""

        async def work(home: SharedMachines) -> BackgroundJobStatus:
            return await _box(home, sandbox_id).job_status(job)

        return await _run(work)

    async def run_background_job(
        self,
        sandbox_id: str,
        command: str,
        timeout: float = 900,
        working_dir: str | None = None,
        env: dict[str, str] | None = None,
        poll_interval: float = 3,
    ) -> BackgroundJobStatus:
        """Start a command and wait for it. Raises: CommandTimeoutError."""

        async def work(home: SharedMachines) -> BackgroundJobStatus:
            return await _box(home, sandbox_id).run_job(command, working_dir, env, timeout)

        return await _run(work)

    async def upload_bytes(
        self, sandbox_id: str, file_path: str, file_bytes: bytes, filename: str = "", timeout: float | None = None
    ) -> FileUploadResponse:
        """Write a file. Raises: APIError for what is in its way; UploadTimeoutError."""

        async def work(home: SharedMachines) -> FileUploadResponse:
            box = _box(home, sandbox_id)
            box.require_running()
            try:
                async with asyncio.timeout(timeout or _TRANSFER_S):
                    await box.machine.upload(file_path, file_bytes)
            except TimeoutError as error:
                raise UploadTimeoutError(sandbox_id, file_path, timeout or _TRANSFER_S) from error
            except OSError as error:
                raise APIError(f"{file_path} could not be written in sandbox {sandbox_id}: {error}") from error
            return FileUploadResponse(success=True, path=file_path, size=len(file_bytes), timestamp=datetime.now(UTC))

        return await _run(work)

    async def upload_file(
        self, sandbox_id: str, file_path: str, local_file_path: str, timeout: float | None = None
    ) -> FileUploadResponse:
        """Write a file of this host. Raises: FileNotFoundError when there is none."""
        data = await asyncio.to_thread(Path(local_file_path).read_bytes)
        return await self.upload_bytes(sandbox_id, file_path, data, timeout=timeout)

    async def read_file(
        self,
        sandbox_id: str,
        file_path: str,
        timeout: float | None = None,
        offset: int | None = None,
        length: int | None = None,
    ) -> ReadFileResponse:
        """A file as text. Raises: SandboxFileNotFoundError; APIError; DownloadTimeoutError."""
        data = await self._download(sandbox_id, file_path, timeout)
        start = offset or 0
        part = data[start : start + length] if length is not None else data[start:]
        return ReadFileResponse(
            content=part.decode(errors="replace"),
            size=len(part),
            total_size=len(data),
            offset=start,
            truncated=start + len(part) < len(data),
        )

    async def download_file(
        self, sandbox_id: str, file_path: str, local_file_path: str, timeout: float | None = None
    ) -> None:
        """Bring a file to this host. Raises: SandboxFileNotFoundError; APIError; DownloadTimeoutError."""
        data = await self._download(sandbox_id, file_path, timeout)
        await asyncio.to_thread(Path(local_file_path).write_bytes, data)

    async def _download(self, sandbox_id: str, file_path: str, timeout: float | None) -> bytes:
        async def work(home: SharedMachines) -> bytes:
            try:
                async with asyncio.timeout(timeout or _TRANSFER_S):
                    return await _box(home, sandbox_id).read(file_path)
            except TimeoutError as error:
                raise DownloadTimeoutError(sandbox_id, file_path, timeout or _TRANSFER_S) from error
            except OSError as error:
                raise APIError(f"{file_path} could not be read in sandbox {sandbox_id}: {error}") from error

        return await _run(work)

    async def get_logs(self, sandbox_id: str) -> str:
        """A sandbox of this kind has no log of its own."""
        await self.get(sandbox_id)
        return ""

    async def aclose(self) -> None:
        """Nothing to close: sandboxes belong to the process."""


class ThreadedAsyncSandboxClient(AsyncSandboxClient):
    """The client that `SandboxEnv` holds as `sandbox_client`; its workers and connections are not needed here."""

    def __init__(
        self,
        max_workers: int | None = None,
        max_connections: int = 1000,
        max_keepalive_connections: int = 200,
        **client_kwargs: Any,
    ) -> None:
        super().__init__(client_kwargs.get("api_key"))

    def teardown(self, wait: bool = True) -> None:
        """Nothing to tear down."""


class SandboxClient:
    """The same calls, for code without an event loop: `create`, `execute_command`, and all others, blocking."""

    def __init__(self, api_client: Any = None, **_: Any) -> None:
        self._client = AsyncSandboxClient()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return shared_machines().submit(method(*args, **kwargs)).result()

        call.__name__, call.__doc__ = name, method.__doc__
        return call


async def _run(work: Callable[[SharedMachines], Coroutine[Any, Any, T]]) -> T:
    home = shared_machines()
    return await home.run(work(home))


def _box(home: SharedMachines, sandbox_id: str) -> Box:
    box: Box | None = home.boxes.get(sandbox_id)
    if box is None:
        raise SandboxNotRunningError(sandbox_id, status=SandboxStatus.TERMINATED.value)
    return box


def _look(box: Box) -> Sandbox:
    described = box.described
    if box.machine.is_alive or described.status != SandboxStatus.RUNNING:
        return described
    try:
        box.require_running()
    except SandboxNotRunningError as error:
        described.status = error.status or SandboxStatus.TERMINATED.value
        described.termination_reason = box.machine.why_ended
        described.terminated_at = described.updated_at = datetime.now(UTC)
    return described
