"""What the judge runs besides the Python that it keeps warm: a table of interpreters and compilers, open to a user's.

Python needs no program: its solutions become a process that is already there. Every other language is a command: one
that compiles, if need be, in a cell of its own, and one that runs, in the cells of the tests. Whether a host has them
is found out in `toolchains.py`.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Final

from mettle.sandbox.config import LanguageSpec


@dataclass(frozen=True, slots=True)
class LanguageReport:
    """One language on this host: its version as code in a cell sees it, or what is missing."""

    name: str
    aliases: tuple[str, ...]
    is_available: bool
    version: str = ""
    missing: str = ""


PYTHON: Final = LanguageSpec(name="python", aliases=("python3", "py"), extension=".py", out_of_memory=("MemoryError",))
# The same interpreter, started anew: for programs that are called with names of files.
PYTHON_PROGRAM: Final = PYTHON.model_copy(
    update={"run": (os.path.realpath(sys.executable), "-I", "-S", "{source}"), "is_space_reserved": True}
)
BUILT_IN: Final = (
    PYTHON,
    LanguageSpec(
        name="bash", aliases=("sh", "shell"), extension=".sh", run=("bash", "{source}"),
        call=("bash", "{driver}", "{source}"), call_form="text", version=("bash", "--version"),
        out_of_memory=("cannot allocate",),
    ),
    LanguageSpec(
        name="javascript", aliases=("js", "node", "nodejs"), extension=".js",
        run=("node", "--max-old-space-size={memory_mb}", "{source}"),
        call=("node", "--max-old-space-size={memory_mb}", "{driver}", "{source}"), version=("node", "--version"),
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
    LanguageSpec(
        name="rust", aliases=("rs",), extension=".rs", version=("rustc", "--version"),
        compile=("rustc", "--edition=2021", "-O", "-o", "{output}", "{source}"), run=("{program}",),
        host_paths=("~/.rustup/toolchains/stable-*", "/usr/local/rustup/toolchains/*"),
        stack_mb=256, is_space_reserved=True, out_of_memory=("memory allocation of",),
    ),
    LanguageSpec(
        name="go", aliases=("golang",), extension=".go", version=("go", "version"),
        compile=("go", "build", "-o", "{output}", "{source}"), run=("{program}",), host_paths=("/usr/local/go",),
        environment=(("CGO_ENABLED", "0"), ("GOCACHE", "/tmp/go"), ("GOPATH", "/tmp/gopath"), ("GOTOOLCHAIN", "local")),
        max_processes=128, is_space_reserved=True, compile_disk_mb=1024, compile_timeout_s=60,
        out_of_memory=("runtime: out of memory", "cannot allocate memory"),
    ),
    LanguageSpec(
        name="ruby", aliases=("rb",), extension=".rb", run=("ruby", "{source}"), version=("ruby", "--version"),
        is_space_reserved=True, out_of_memory=("failed to allocate memory",),
    ),
    LanguageSpec(
        name="php", extension=".php", run=("php", "-d", "memory_limit={memory_mb}M", "{source}"),
        version=("php", "--version"), is_space_reserved=True, out_of_memory=("Allowed memory size",),
    ),
    LanguageSpec(
        name="lua", extension=".lua", run=("lua", "{source}"), version=("lua", "-v"),
        out_of_memory=("not enough memory",),
    ),
    LanguageSpec(
        name="tcl", aliases=("tclsh",), extension=".tcl", run=("tclsh", "{source}"),
        # tclsh has no option that prints a version, and reads what it is to do.
        version=("sh", "-c", "echo 'puts \"Tcl [info patchlevel]\"' | tclsh"), out_of_memory=("unable to alloc",),
    ),
    LanguageSpec(
        name="r", aliases=("rscript",), extension=".R", run=("Rscript", "--vanilla", "{source}"),
        version=("Rscript", "--version"), host_paths=("/etc/R",), is_space_reserved=True, max_processes=64,
        out_of_memory=("cannot allocate",),
    ),
    LanguageSpec(
        name="julia", aliases=("jl",), extension=".jl", run=("julia", "--startup-file=no", "{source}"),
        version=("julia", "--version"), host_paths=("/opt/julia*", "/usr/local/julia*"), memory_mb=1024,
        max_processes=64, is_space_reserved=True, out_of_memory=("OutOfMemoryError",),
    ),
    LanguageSpec(
        name="haskell", aliases=("hs",), extension=".hs", version=("ghc", "--version"),
        compile=("ghc", "-O1", "-v0", "-outputdir", "objects", "-o", "{output}", "{source}"), run=("{program}",),
        stack_mb=256, is_space_reserved=True, out_of_memory=("heap overflow",),
    ),
)  # fmt: skip
