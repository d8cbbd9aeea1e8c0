"""What an environment does with sandboxes: make them, move files, run long commands, and delete every one of them.

Parts: `SandboxMixin`, the errors, `SandboxTimeouts`. Invariant: a sandbox that was made is deleted at the latest when
the environment is torn down, and what goes wrong with one is a `SandboxError`, never a reward of 0.
"""

from __future__ import annotations

import asyncio
import io
import logging
import math
import random
import shlex
import tarfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from mettle.envs.decorators import teardown
from mettle.envs.sandboxes.client import ThreadedAsyncSandboxClient
from mettle.envs.sandboxes.errors import (
    CommandTimeoutError,
    SandboxFileNotFoundError,
    SandboxOOMError,
    SandboxTimeoutError,
)
from mettle.envs.sandboxes.models import CreateSandboxRequest
from mettle.errors import SandboxError, UserError
from mettle.web.backoff import Backoff

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
_random = random.Random()
_DAY_MINUTES = 24 * 60
_SPARE_MINUTES = 10


class SandboxCreationError(SandboxError):
    """No sandbox could be made."""


class SandboxNotReadyError(SandboxError):
    """The sandbox was made and did not become ready."""


class SandboxSetupError(SandboxError):
    """The sandbox could not be prepared for the rollout."""


@dataclass(frozen=True)
class SandboxTimeouts:
    """Seconds that the mixin's own small commands may take."""

    read_file: int = 10
    extract: int = 60
    poll: int = 60
    mkdir: int = 10


class SandboxMixin:
    """Mix in beside an `Environment`, and call `init_sandbox_client` in `__init__`."""

    active_sandboxes: set[str]
    sandbox_client: ThreadedAsyncSandboxClient
    timeouts: SandboxTimeouts
    sandbox_timeout_minutes: int | None = None

    def init_sandbox_client(
        self,
        max_retries: int = 5,
        base_delay: float = 0.5,
        backoff_factor: float = 2.0,
        max_backoff_seconds: float = 30.0,
        jitter: float = 0.001,
        sandbox_client_max_workers: int | None = None,
        sandbox_client_max_connections: int = 1000,
        sandbox_client_max_keepalive_connections: int = 200,
        sandbox_wait_for_creation_max_attempts: int = 120,
        sandbox_creations_per_minute: float | None = 128,
        timeouts: SandboxTimeouts | None = None,
    ) -> None:
        """Make the client. Connections and creations per minute are not limited: sandboxes are on this machine."""
        self.active_sandboxes = set()
        self.sandbox_client = ThreadedAsyncSandboxClient(
            max_workers=sandbox_client_max_workers,
            max_connections=sandbox_client_max_connections,
            max_keepalive_connections=sandbox_client_max_keepalive_connections,
        )
        self.sandbox_wait_for_creation_max_attempts = sandbox_wait_for_creation_max_attempts
        self.timeouts = timeouts or SandboxTimeouts()
        backoff = Backoff(base_delay, max_backoff_seconds, backoff_factor, jitter=0.0)
        self._pauses_s = [
            backoff.wait_s(attempt) + _random.uniform(0, jitter) for attempt in range(max(0, max_retries))
        ]

    def with_retry(self, function: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
        """`function`, tried again after a pause that grows, as often as the environment was told.

        What a person has to put right is raised at once.
        """

        async def tried(*args: P.args, **kwargs: P.kwargs) -> T:
            for pause_s in self._pauses_s:
                try:
                    return await function(*args, **kwargs)
                except UserError:
                    raise
                except Exception as error:
                    logger.warning("trying again in %.1f s: %s", pause_s, error)
                    await asyncio.sleep(pause_s)
            return await function(*args, **kwargs)

        return tried

    def compute_sandbox_timeout_minutes(self) -> int:
        """How long a sandbox may live: as was set, or somewhat longer than a rollout may take, or a day."""
        if self.sandbox_timeout_minutes is not None:
            return self.sandbox_timeout_minutes
        rollout_s: float | None = getattr(self, "timeout_seconds", None)
        return _DAY_MINUTES if rollout_s is None else math.ceil(rollout_s / 60) + _SPARE_MINUTES

    def register_sandbox(self, sandbox_id: str) -> None:
        """Remember to delete it."""
        self.active_sandboxes.add(sandbox_id)

    def deregister_sandbox(self, sandbox_id: str) -> None:
        self.active_sandboxes.discard(sandbox_id)

    async def create_sandbox(self, state: Any, request: CreateSandboxRequest) -> str:
        """A sandbox for a rollout, ready and set up; its id, which is in `state["sandbox_id"]`, too."""
        try:
            sandbox = await self.with_retry(self.sandbox_client.create)(request)
        except Exception as error:
            raise SandboxCreationError(f"no sandbox could be made: {error}") from error
        self.register_sandbox(sandbox.id)
        state["sandbox_id"] = sandbox.id
        state["sandbox_isolation"] = sandbox.isolation
        try:
            await self.sandbox_client.wait_for_creation(sandbox.id)
        except Exception as error:
            raise SandboxNotReadyError(f"sandbox {sandbox.id} did not become ready: {error}") from error
        try:
            await self.post_sandbox_setup(state)
        except SandboxError:
            raise
        except Exception as error:
            raise SandboxSetupError(f"sandbox {sandbox.id} could not be prepared: {error}") from error
        return sandbox.id

    async def post_sandbox_setup(self, state: Any) -> None:
        """Prepare a sandbox that has just been made. Override."""

    async def delete_sandbox(self, sandbox_id: str) -> None:
        """End a sandbox; one that cannot be ended is tried again when the environment is torn down."""
        try:
            await self.with_retry(self.sandbox_client.delete)(sandbox_id)
            self.deregister_sandbox(sandbox_id)
        except Exception as error:
            logger.warning("sandbox %s was not deleted: %s", sandbox_id, error)

    async def bulk_delete_sandboxes(self, sandbox_ids: Sequence[str]) -> None:
        """End many."""
        await self.sandbox_client.bulk_delete(list(sandbox_ids))
        for sandbox_id in sandbox_ids:
            self.deregister_sandbox(sandbox_id)

    async def run_background_job(
        self,
        state: Any,
        command: str,
        timeout: int,  # noqa: ASYNC109 (its name in the API)
        working_dir: str | None = None,
        poll_interval: int = 3,
    ) -> Any:
        """A long command of a rollout's sandbox, from start to end.

        Raises: CommandTimeoutError; SandboxError when the sandbox has ended, with `state["sandbox_timeout"]` or
        `state["sandbox_oom"]` saying of what.
        """
        sandbox_id = state["sandbox_id"]
        try:
            return await self.sandbox_client.run_background_job(
                sandbox_id, command, timeout=timeout, working_dir=working_dir, poll_interval=poll_interval
            )
        except CommandTimeoutError:
            raise
        except Exception as error:
            state["sandbox_timeout"] = state.get("sandbox_timeout", False) or isinstance(error, SandboxTimeoutError)
            state["sandbox_oom"] = state.get("sandbox_oom", False) or isinstance(error, SandboxOOMError)
            raise SandboxError(f"a command of sandbox {sandbox_id} was lost: {error}") from error

    async def upload_file(self, sandbox_id: str, remote_path: str, local_path: str) -> None:
        """A file of this host into a sandbox."""
        await self.with_retry(self.sandbox_client.upload_file)(sandbox_id, remote_path, local_path)

    async def upload_content(self, sandbox_id: str, content: str, remote_path: str) -> None:
        """A text into a file of a sandbox."""
        data = content.encode()
        await self.with_retry(self.sandbox_client.upload_bytes)(sandbox_id, remote_path, data, Path(remote_path).name)

    async def read_file(
        self,
        sandbox_id: str,
        remote_path: str,
        timeout: int | None = None,  # noqa: ASYNC109 (its name in the API)
    ) -> str | None:
        """A file of a sandbox as text; None when there is none."""
        limit = timeout or self.timeouts.read_file
        try:
            read = await self.sandbox_client.read_file(sandbox_id, remote_path, timeout=limit)
        except SandboxFileNotFoundError:
            return None
        text: str = read.content
        return text

    async def upload_bundle(self, sandbox_id: str, file_map: Mapping[str, str], dest_dir: str) -> None:
        """Many texts at once, as files below `dest_dir`."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            for name, text in file_map.items():
                entry = tarfile.TarInfo(name)
                data = text.encode()
                entry.size, entry.mode = len(data), 0o644
                archive.addfile(entry, io.BytesIO(data))
        bundle = f"{dest_dir.rstrip('/')}/.bundle.tar.gz"
        await self.with_retry(self.sandbox_client.upload_bytes)(sandbox_id, bundle, packed.getvalue(), "bundle.tar.gz")
        here, there = shlex.quote(bundle), shlex.quote(dest_dir)
        done = await self.sandbox_client.execute_command(
            sandbox_id, f"tar -xzf {here} -C {there} && rm {here}", timeout=self.timeouts.extract
        )
        if done.exit_code:
            raise SandboxSetupError(f"files could not be unpacked in sandbox {sandbox_id}: {done.stderr.strip()}")

    async def teardown_sandboxes(self) -> None:
        """End every sandbox that is left."""
        if self.active_sandboxes:
            await self.bulk_delete_sandboxes(sorted(self.active_sandboxes))

    async def teardown_sandbox_client(self) -> None:
        """Let go of the client."""
        self.sandbox_client.teardown()

    @teardown
    async def teardown_mixin_sandboxes(self) -> None:
        """End every sandbox that is left."""
        await self.teardown_sandboxes()

    @teardown(priority=-1)
    async def teardown_mixin_sandbox_client(self) -> None:
        """Let go of the client."""
        await self.teardown_sandbox_client()
