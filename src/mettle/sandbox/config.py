"""Settings of the sandbox pool."""

from __future__ import annotations

import os
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from mettle.sandbox.backends import BUILT_IN, backend_names
from mettle.sandbox.backends.docker_config import DockerConfig
from mettle.sandbox.backends.kubernetes_config import KubernetesConfig
from mettle.sandbox.languages import LanguageSpec

Backend = str
Grade = Literal["none", "ns-noseccomp", "ns", "kernel"]
RequiredGrade = Literal["ns-noseccomp", "ns", "kernel"]


class SandboxConfig(BaseModel):
    """What a pool requires of the host, how much it runs at once, and the limits of what it runs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    backend: Backend = "zygote"
    """`zygote`: pre-warmed processes in namespaces. `unsafe`: the same with no isolation at all. `remote`: services
    started by `mettle sandbox serve`, at `urls`. Others by the entry point group `mettle.sandboxes`."""

    urls: tuple[str, ...] = ()
    """Of `remote`: the services, as `http://host:port` or `unix:/path`; work goes to the least loaded."""

    token_env: str = "METTLE_SANDBOX_TOKEN"
    """Of `remote`: the environment variable that holds the token, if the services ask for one."""

    docker: DockerConfig = DockerConfig()
    """Of `docker`."""

    kubernetes: KubernetesConfig = KubernetesConfig()
    """Of `kubernetes`."""

    require: RequiredGrade = "ns"
    """The least isolation that will do; a host that gives less is refused. Nothing is asked of `unsafe`."""

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

    languages: tuple[LanguageSpec, ...] = ()
    """Interpreters and compilers besides the built-in ones, or in place of one of the same name."""

    preload: tuple[str, ...] = ()
    """Modules (numpy, say) imported once and inherited by every Python test. A test's memory includes theirs."""

    max_source_kb: int = Field(default=1024, ge=1, le=1 << 16)
    """The longest source that is accepted."""

    max_input_mb: int = Field(default=16, ge=1, le=512)
    """The longest standard input, or encoded arguments, of one test."""

    python_packages: tuple[str, ...] = ()
    """Packages installed beside Mettle that code may import, with what they require; read-only, in /packages."""

    host_uid: int = Field(default=64113, ge=1, le=(1 << 31) - 1)
    """The ordinary user, as the host counts, that judged code runs as when the pool is started by root."""

    start_timeout_s: float = Field(default=20.0, gt=0)
    """How long the template process may take to start."""

    @field_validator("backend")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if name not in BUILT_IN and name not in (known := backend_names()):
            raise ValueError(f"there is no sandbox backend {name!r}; there are {', '.join(known)}")
        return name

    @model_validator(mode="after")
    def _has_services(self) -> Self:
        if (self.backend == "remote") != bool(self.urls):
            raise ValueError("sandbox.urls and sandbox.backend 'remote' go together: give both, or neither")
        return self
