"""Settings of the sandbox pool."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from mettle.errors import UserError

Backend = Literal["zygote", "unsafe"]
Grade = Literal["none", "ns-noseccomp", "ns"]
RequiredGrade = Literal["ns-noseccomp", "ns"]
RequiredLayer = Literal[
    "user-namespace",
    "mount-namespace",
    "pid-namespace",
    "network-namespace",
    "ipc-namespace",
    "uts-namespace",
    "cgroup-namespace",
    "read-only-root",
    "private-proc",
    "no-privileges",
    "resource-limits",
    "seccomp",
    "landlock",
    "cgroup-memory",
    "cgroup-pids",
    "cgroup-cpu",
    "cgroup-kill",
]


class SandboxConfig(BaseModel):
    """What a pool requires of the host, how much it runs at once, and the limits of what it runs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    backend: Backend = "zygote"
    """`zygote`: pre-warmed processes in namespaces. `unsafe`: the same processes with no isolation at all."""

    require: RequiredGrade | tuple[RequiredGrade | RequiredLayer, ...] = "ns"
    """The least isolation that will do: a grade, or grades and layers, as in `["ns", "landlock", "cgroup-memory"]`. A
    host that gives less is refused. Nothing is asked of `unsafe`."""

    warm: int = Field(default=4, ge=0, le=4096)
    """Cells kept ready ahead of time, about 2 MB each."""

    max_running: int = Field(default_factory=lambda: 2 * (os.cpu_count() or 1), ge=1, le=4096)
    """Solutions judged at the same time; more of them wait, and waiting is not counted against their time."""

    timeout_s: float = Field(default=10.0, gt=0, le=3600)
    """Processor seconds per test, all its processes together, unless the call says otherwise."""

    memory_mb: int = Field(default=512, ge=32, le=1 << 20)
    """Resident memory per test, all its processes together and the interpreter included (about 13 MB)."""

    output_kb: int = Field(default=1024, ge=1, le=1 << 16)
    """What a test may write to its output streams, together."""

    disk_mb: int = Field(default=32, ge=4, le=1 << 14)
    """Size of the private file systems of a test, together; they live in memory."""

    max_processes: int = Field(default=16, ge=1, le=4096)
    """Processes and threads of a test, together."""

    max_open_files: int = Field(default=256, ge=16, le=1 << 16)
    """File descriptors per process."""

    max_source_kb: int = Field(default=1024, ge=1, le=1 << 16)
    """The longest source that is accepted."""

    max_input_mb: int = Field(default=16, ge=1, le=512)
    """The longest standard input, or encoded arguments, of one test."""

    python_packages: tuple[str, ...] = ()
    """Packages installed beside Mettle that machines may import, with what they require; read-only, in /packages."""

    host_uid: int = Field(default=64113, ge=1, le=(1 << 31) - 1)
    """The ordinary user, as the host counts, that judged code runs as when the pool is started by root."""

    start_timeout_s: float = Field(default=20.0, gt=0)
    """How long the template process may take to start."""


def read_requirement(names: Sequence[str]) -> SandboxConfig:
    """A config that requires these grades and layers, or the default's. Raises: UserError for an unknown name."""
    known = (*get_args(RequiredGrade), *get_args(RequiredLayer))
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise UserError(f"there is no grade and no layer of isolation {name!r}; {hint}")
    return SandboxConfig.model_validate({"require": tuple(names)} if names else {})
