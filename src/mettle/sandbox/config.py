"""Settings of the sandbox pool, and of a language that it is to judge."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from mettle.errors import UserError
from mettle.sandbox.containers.docker.config import DockerConfig
from mettle.sandbox.containers.kubernetes.config import KubernetesConfig
from mettle.sandbox.plugins import BUILT_IN, backend_names

Backend = str
Grade = Literal["none", "landlock-only", "ns-noseccomp", "ns", "kernel"]
RequiredGrade = Literal["landlock-only", "ns-noseccomp", "ns", "kernel"]
RequiredLayer = Literal[
    "user-namespace",
    "mount-namespace",
    "pid-namespace",
    "network-namespace",
    "network",
    "ipc-namespace",
    "uts-namespace",
    "cgroup-namespace",
    "read-only-root",
    "private-proc",
    "own-proc",
    "no-privileges",
    "resource-limits",
    "seccomp",
    "own-kernel",
    "own-users",
    "own-host-user",
    "landlock",
    "cpu-meter",
    "cgroup-memory",
    "cgroup-pids",
    "cgroup-cpu",
    "cgroup-kill",
]
Requirement = RequiredGrade | tuple[RequiredGrade | RequiredLayer, ...]


_COVERED: Final = ("/tmp", "/work", "/dev", "/proc", "/program", "/packages")


def is_below(path: str, ancestor: str) -> bool:
    """Whether a path is this directory or lies in it."""
    return path == ancestor or path.startswith(f"{ancestor}/")


def is_covered(path: str) -> bool:
    """Whether the sandbox has something of its own there."""
    return any(is_below(path, cover) for cover in _COVERED)


class LanguageSpec(BaseModel):
    """One language: how its source is named, compiled and run, and what that may use.

    Words of the commands may contain `{source}` (the source file), `{output}` (what the compiler must write),
    `{program}` (what it wrote), `{driver}` (the program that calls a function) and `{memory_mb}` (the test's limit).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1)
    """The word for it in `judge(language=...)`."""

    aliases: tuple[str, ...] = ()
    """Other words for it."""

    extension: str = Field(pattern=r"^(\.\w+)?$")
    """Of the source file, with the point."""

    stem: str = Field(default="solution", pattern=r"^\w+$")
    """Of the source file, before the extension."""

    compile: tuple[str, ...] = ()
    """The command that makes one file, `{output}`, of the source; empty where nothing is compiled."""

    run: tuple[str, ...] = ()
    """The command that runs it. Empty only for the Python that is kept warm."""

    call: tuple[str, ...] = ()
    """The command that calls a function of the source: it names `{driver}` and `{source}`. Empty where none does."""

    call_form: Literal["json", "text"] = "json"
    """How a driver is given a call and gives the value back; see the drivers of `javascript` and `bash`."""

    driver: str = ""
    """The program of `{driver}`, as text. Built-in languages have theirs."""

    version: tuple[str, ...] = ()
    """A command that prints the version; its program is needed, too."""

    host_paths: tuple[str, ...] = ()
    """Directories outside /usr that it needs, as patterns (~ is the home directory); the sandbox shows them read-only,
    and not those that it covers with its own."""

    environment: tuple[tuple[str, str], ...] = ()
    """Variables that it needs, besides PATH, HOME and LANG."""

    timeout_s: float | None = Field(default=None, gt=0, le=3600)
    """Processor seconds per test when the call says nothing; None is the pool's."""

    memory_mb: int | None = Field(default=None, ge=32, le=1 << 20)
    """Resident memory per test when the call says nothing; None is the pool's."""

    max_processes: int | None = Field(default=None, ge=1, le=4096)
    """Processes and threads of a test, together; None is the pool's."""

    stack_mb: int = Field(default=8, ge=1, le=1 << 16)
    """The main thread's stack."""

    is_space_reserved: bool = False
    """It reserves far more address space than it uses, so that only resident memory is limited."""

    compile_timeout_s: float = Field(default=30.0, gt=0, le=3600)
    """Processor seconds of the compiler."""

    compile_memory_mb: int = Field(default=1024, ge=32, le=1 << 20)
    """Resident memory of the compiler and all that it starts."""

    compile_disk_mb: int = Field(default=256, ge=4, le=1 << 14)
    """Size of the file systems of a compilation, together; they live in memory."""

    out_of_memory: tuple[str, ...] = ()
    """What it prints when an allocation has failed: then a bad end is the verdict `memory`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.compile and not any("{output}" in word for word in self.compile):
            raise ValueError(f"the compile command of {self.name!r} does not say where {{output}} goes")
        if not self.run and self.name != "python":
            raise ValueError(f"language {self.name!r} has no run command")
        wanted = "{program}" if self.compile else "{source}"
        if self.run and not any(wanted in word for word in self.run):
            raise ValueError(f"the run command of {self.name!r} does not name {wanted}")
        if self.call and (self.compile or not {"{driver}", "{source}"} <= set(self.call)):
            raise ValueError(
                f"the call command of {self.name!r} must name {{driver}} and {{source}}, and compile nothing"
            )
        for path in self.host_paths:
            if not path.startswith(("/", "~/")) or is_covered(path):
                raise ValueError(f"host path {path!r} of {self.name!r} cannot be shown under its own name")
        return self

    @property
    def source_name(self) -> str:
        return self.stem + self.extension

    @property
    def is_warm(self) -> bool:
        """Whether its solutions become a process of the template's own interpreter."""
        return not self.run

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


class SandboxConfig(BaseModel):
    """What a pool requires of the host, how much it runs at once, and the limits of what it runs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    backend: Backend = "zygote"
    """`zygote`: pre-warmed processes in namespaces. `unsafe`: the same with no isolation at all. `remote`: services
    started by `mettle sandbox serve`, at `urls`. Others by the entry point group `mettle.sandboxes`."""

    urls: tuple[str, ...] = ()
    """Of `remote`: the services, as `https://host:port`, `http://` on this host, or `unix:/path`; work goes to the
    least loaded."""

    url_files: tuple[Path, ...] = ()
    """Of `remote`: files in which services say where they are (JSON with `url`), which appear, change and go while
    services come, move and are lost; a run on a cluster has them. In place of `urls`, or beside them."""

    token_env: str = "METTLE_SANDBOX_TOKEN"
    """Of `remote`: the environment variable that holds the token, if the services ask for one."""

    docker: DockerConfig = DockerConfig()
    """Of `docker`."""

    kubernetes: KubernetesConfig = KubernetesConfig()
    """Of `kubernetes`."""

    ca_file: Path | None = None
    """Of `remote`: the certificates (PEM) to trust for `https://`, in place of those of this host."""

    plain_http: bool = False
    """Of `remote`: send the token over plain HTTP to other hosts, too, where the network in between can read it."""

    require: Requirement = "ns"
    """The least isolation that will do: a grade, or grades and layers, as in `["ns", "landlock", "cgroup-memory"]`. A
    host that gives less is refused. Names are ids of `mettle sandbox doctor --json`. Nothing is asked of `unsafe`.
    Only `"landlock-only"` lets Python be judged where the host allows no namespaces."""

    warm: int = Field(default=4, ge=0, le=4096)
    """Cells kept ready ahead of time, about 2 MB each."""

    max_running: int = Field(default_factory=lambda: 2 * (os.cpu_count() or 1), ge=1, le=4096)
    """Solutions judged at the same time; more of them wait, and waiting is not counted against their time."""

    timeout_s: float = Field(default=10.0, gt=0, le=3600)
    """Processor seconds per test, all its processes together, unless the call says otherwise."""

    cpu_meter: Literal["auto", "event", "cgroup", "estimate"] = "auto"
    """What counts a test's processor seconds. `event`: a counter of the kernel's that every child inherits. `cgroup`:
    `cpu.stat` of a cgroup for each cell. Both count children that nobody waits for, which `estimate` adds as far as
    they are seen. `auto` takes the first of these that the host has; one that is named and missing is refused."""

    memory_mb: int = Field(default=512, ge=32, le=1 << 20)
    """Resident memory per test, all its processes together and the interpreter included (about 13 MB)."""

    output_kb: int = Field(default=1024, ge=1, le=1 << 16)
    """What a test may write to its output streams, together."""

    max_remembered: int = Field(default=0, ge=0, le=1 << 20)
    """Judgements to remember, so that the same code on the same tests is run once. 0 is none: code that draws random
    numbers or looks at a clock would give all who wrote it one and the same luck."""

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

    host_images: tuple[str, ...] = ("python", "python:*", "library/python:*", "docker.io/library/python:*")
    """Images, as patterns, in whose place a machine of the embedded backend has this host's own programs; one that asks
    for another image is refused there. Add those whose contents are installed on this host."""

    host_uid: int = Field(default=64113, ge=1, le=(1 << 31) - 1)
    """The ordinary user, as the host counts, that a pool's template becomes when root starts it; what it runs gets
    users of its own."""

    first_host_uid: int = Field(default=1_879_048_192, ge=1, le=(1 << 31) - 1)
    """The first of the users (and groups), as the host counts, that root's pools take for what they run: one for each
    cell and machine, in blocks of 4096 for each pool. They should be nobody's; these are what systemd leaves free."""

    num_host_uids: int = Field(default=1 << 27, ge=0, le=1 << 31)
    """How many of them there are. With less than 4096, all that a pool of root's runs shares `host_uid`."""

    start_timeout_s: float = Field(default=20.0, gt=0)
    """How long the template process may take to start."""

    @field_validator("backend")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if name not in BUILT_IN and name not in (known := backend_names()):
            raise ValueError(f"there is no sandbox backend {name!r}; there are {', '.join(known)}")
        return name

    @property
    def allows_landlock_only(self) -> bool:
        """Whether a person has named the grade without namespaces."""
        return self.require == "landlock-only" or "landlock-only" in self.require

    @model_validator(mode="after")
    def _has_services(self) -> Self:
        if (self.backend == "remote") != bool(self.urls or self.url_files):
            raise ValueError("sandbox.urls and sandbox.backend 'remote' go together: give both, or neither")
        return self


def read_requirement(names: Sequence[str]) -> SandboxConfig:
    """A config that requires these grades and layers, or the default's. Raises: UserError for an unknown name."""
    known = (*get_args(RequiredGrade), *get_args(RequiredLayer))
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise UserError(f"there is no grade and no layer of isolation {name!r}; {hint}")
    return SandboxConfig.model_validate({"require": tuple(names)} if names else {})
