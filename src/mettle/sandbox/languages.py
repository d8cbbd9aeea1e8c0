"""What the judge runs besides the Python that it keeps warm: a table of interpreters and compilers, open to a user's.

Python needs no program: its solutions become a process that is already there. Every other language is a command: one
that compiles, if need be, in a cell of its own, and one that runs, in the cells of the tests. Whether a host has them
is found out in `toolchains.py`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

_COVERED: Final = ("/tmp", "/work", "/dev", "/proc", "/program", "/packages")


def is_below(path: str, ancestor: str) -> bool:
    """Whether a path is this directory or lies in it."""
    return path == ancestor or path.startswith(f"{ancestor}/")


class LanguageSpec(BaseModel):
    """One language: how its source is named, compiled and run, and what that may use.

    Words of the commands may contain `{source}` (the source file), `{output}` (what the compiler must write),
    `{program}` (what it wrote) and `{memory_mb}` (the test's limit).
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

    version: tuple[str, ...] = ()
    """A command that prints the version; its program is needed, too."""

    host_paths: tuple[str, ...] = ()
    """Directories outside /usr that it needs, as patterns; the sandbox shows them read-only."""

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
        wanted = "{program}" if self.compile else "{source}"
        if self.run and not any(wanted in word for word in self.run):
            raise ValueError(f"the run command of {self.name!r} does not name {wanted}")
        for path in self.host_paths:
            if not os.path.isabs(path) or any(is_below(path, cover) for cover in _COVERED):
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


@dataclass(frozen=True, slots=True)
class LanguageReport:
    """One language on this host: its version as code in a cell sees it, or what is missing."""

    name: str
    aliases: tuple[str, ...]
    is_available: bool
    version: str = ""
    missing: str = ""


PYTHON: Final = LanguageSpec(name="python", aliases=("python3", "py"), extension=".py", out_of_memory=("MemoryError",))
BUILT_IN: Final = (
    PYTHON,
    LanguageSpec(
        name="bash", aliases=("sh", "shell"), extension=".sh", run=("bash", "{source}"), version=("bash", "--version"),
        out_of_memory=("cannot allocate",),
    ),
    LanguageSpec(
        name="javascript", aliases=("js", "node", "nodejs"), extension=".js",
        run=("node", "--max-old-space-size={memory_mb}", "{source}"), version=("node", "--version"),
        max_processes=32, is_space_reserved=True,
        out_of_memory=("heap out of memory", "Array buffer allocation failed"),
    ),
    LanguageSpec(
        name="c", extension=".c", version=("gcc", "--version"),
        compile=("gcc", "-O2", "-std=gnu17", "-pipe", "-o", "{output}", "{source}", "-lm"), run=("{program}",),
        stack_mb=256, is_space_reserved=True,
    ),
    LanguageSpec(
        name="cpp", aliases=("c++", "cc", "cxx"), extension=".cpp", version=("g++", "--version"),
        compile=("g++", "-O2", "-std=gnu++20", "-pipe", "-o", "{output}", "{source}"), run=("{program}",),
        stack_mb=256, is_space_reserved=True, out_of_memory=("std::bad_alloc",),
    ),
    LanguageSpec(
        name="perl", aliases=("pl",), extension=".pl", run=("perl", "{source}"),
        version=("perl", "-e", "print $^V"), out_of_memory=("Out of memory",),
    ),
    LanguageSpec(
        name="java", extension=".java", stem="Main", version=("javac", "--version"),
        # A class file for each class, so that the one file that a compilation makes is an archive of them.
        compile=("sh", "-c", "javac -d classes {source} && jar -c -f {output} -C classes ."),
        run=("java", "-Xmx{memory_mb}m", "-Xss64m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData",
             "-Xshare:auto", "-cp", "{program}", "Main"),
        host_paths=("/etc/java-*-openjdk",), memory_mb=1024, max_processes=64, is_space_reserved=True,
        out_of_memory=("java.lang.OutOfMemoryError",),
    ),
)  # fmt: skip
