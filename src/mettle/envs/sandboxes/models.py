"""Requests and answers of the sandbox client, field by field as environments build and read them.

Invariant: a field that is not known here is kept as an attribute and ignored, as an older server would.
"""

from __future__ import annotations

import copy
from datetime import datetime
from enum import StrEnum
from typing import Any, Self

from mettle.records.fields import Fields, selected


class SandboxStatus(StrEnum):
    """Where a sandbox is in its life."""

    PENDING = "PENDING"
    PROVISIONING = "PROVISIONING"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    ERROR = "ERROR"
    TERMINATED = "TERMINATED"
    TIMEOUT = "TIMEOUT"


class Model:
    """Fields with defaults, set by keyword."""

    def __init__(self, **values: Any) -> None:
        for kind in reversed(type(self).__mro__):
            for name in vars(kind).get("__annotations__", {}):
                if hasattr(kind, name):
                    setattr(self, name, copy.copy(getattr(kind, name)))
                elif name not in values:
                    raise TypeError(f"{type(self).__name__} needs {name!r}")
        for name, value in values.items():
            setattr(self, name, value)

    def model_dump(
        self, *, include: Fields = None, exclude: Fields = None, exclude_none: bool = False, **_: Any
    ) -> dict[str, Any]:
        """The fields as plain data, those that are asked for."""
        plain = {name: value.model_dump() if isinstance(value, Model) else value for name, value in vars(self).items()}
        chosen = selected(plain, include, exclude)
        return {name: value for name, value in chosen.items() if value is not None or not exclude_none}

    def model_copy(self, *, update: dict[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with some fields changed."""
        made = copy.deepcopy(self) if deep else copy.copy(self)
        vars(made).update(update or {})
        return made

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({fields})"


class AdvancedConfigs(Model):
    """Accepted as it stands; nothing in it concerns the embedded backend."""


class CreateSandboxRequest(Model):
    """What is asked of a new sandbox. Backends of containers have images; the embedded one has the host's programs, for
    plain Python's images and those of `sandbox.host_images`, and refuses others. GPUs cannot be given here."""

    name: str
    docker_image: str | None = None
    start_command: Any = None
    cpu_cores: float = 1.0
    memory_gb: float = 1.0
    disk_size_gb: float | None = None
    gpu_count: int = 0
    gpu_type: str | None = None
    vm: bool = False
    network_access: bool = True
    timeout_minutes: float = 60
    idle_timeout_minutes: float | None = None
    environment_vars: dict[str, str] | None = None
    secrets: dict[str, str] | None = None
    labels: list[str] = []  # noqa: RUF012 (copied for each request)
    team_id: str | None = None
    region: str | None = None
    advanced_configs: Any = None
    python_packages: tuple[str, ...] = ()
    """Mettle's own: packages installed beside it that the sandbox may import."""
    backend: str | None = None
    """Mettle's own: another backend than that of this process's sandboxes; `unsafe` is no isolation at all."""


class Sandbox(Model):
    """A sandbox as it is described to its owner."""

    id: str
    name: str
    docker_image: str | None = None
    start_command: Any = None
    cpu_cores: float = 1.0
    memory_gb: float = 1.0
    disk_size_gb: float = 1.0
    disk_mount_path: str = "/work"
    gpu_count: int = 0
    status: str = SandboxStatus.RUNNING
    timeout_minutes: float = 60
    labels: list[str] = []  # noqa: RUF012
    created_at: datetime
    updated_at: datetime
    started_at: datetime | None = None
    terminated_at: datetime | None = None
    termination_reason: str | None = None
    isolation: str = "none"
    """Mettle's own: the grade of what was measured to isolate it."""


class CommandResponse(Model):
    """How a command ended."""

    stdout: str
    stderr: str
    exit_code: int


class FileUploadResponse(Model):
    """What was written."""

    success: bool
    path: str
    size: int
    timestamp: datetime


class ReadFileResponse(Model):
    """A file, or a part of it, as text."""

    content: str
    size: int
    total_size: int | None = None
    offset: int | None = None
    truncated: bool | None = None


class SandboxListResponse(Model):
    """One page of sandboxes."""

    sandboxes: list[Sandbox]
    total: int
    page: int = 1
    per_page: int = 50
    has_next: bool = False


class BulkDeleteSandboxResponse(Model):
    """Which sandboxes were deleted."""

    succeeded: list[str]
    failed: list[dict[str, str]]
    message: str = ""


class BackgroundJob(Model):
    """A command in the background, and the files inside that hold what it says and how it ends."""

    job_id: str
    sandbox_id: str
    stdout_log_file: str
    stderr_log_file: str
    exit_file: str


class BackgroundJobStatus(Model):
    """A background command, as far as it has come."""

    job_id: str
    completed: bool
    exit_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None
    stdout_truncated: bool = False
    stderr_truncated: bool = False
