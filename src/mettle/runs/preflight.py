"""Preflight: what Mettle needs of a machine, each with what was found and what to do about it.

A check measures rather than believes: it imports torch in a process of its own, writes a file, binds a port, and lets
code in a sandbox try the doors. `repairs` puts right what can be. Invariant: a check never raises and changes nothing;
what goes wrong in it is its finding.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mettle.extras import CHECKOUT, install_line, missing_by_extra, missing_requirements
from mettle.processes.host import free_memory_bytes, multiplies_bfloat16

Level = Literal["ok", "warn", "fail"]

GIB = 2**30
MIN_MEMORY_BYTES = 2 * GIB
"""The quickstart stays under this."""
MIN_DISK_BYTES = GIB
HUB_PORT = 7860
TORCH_TIMEOUT_S = 120.0

VLLM_PYTHON = "METTLE_VLLM_PYTHON"
"""Names the interpreter of vLLM's environment, for the check; a config says it as inference.vllm.python."""
_VLLM = (
    "import json, vllm; from vllm.platforms import current_platform as p;"
    " print(json.dumps({'version': vllm.__version__, 'device': p.device_type or 'no device'}))"
)
MIN_VLLM = (0, 32)
_TORCH = (
    "import json, torch; print(json.dumps({'version': torch.__version__, 'threads': torch.get_num_threads(),"
    " 'gpus': [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]}))"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found. `advice` says what to do when the level is not ok."""

    name: str
    level: Level
    detail: str
    advice: str = ""
    commands: tuple[str, ...] = ()
    """What a person can type to put it right; those that begin with sudo need root, `ulimit` changes this shell."""


def findings() -> Iterator[Finding]:
    """Run every check, cheapest first."""
    for name in CHECKS:
        yield run_check(name)


def run_check(name: str, before: Finding | None = None) -> Finding:
    """Run one check; `before` stands in for one that is there no more."""
    try:
        return CHECKS[name]()
    except KeyError:
        return before or Finding(name, "fail", "there is no such check", "please report this")
    except Exception as error:
        return Finding(name, "fail", f"the check itself failed: {type(error).__name__}: {error}", "please report this")


def _python() -> Finding:
    version = f"{platform.python_version()} at {sys.executable}"
    if sys.prefix == sys.base_prefix:
        return Finding("python", "warn", f"{version}, no virtual environment", _venv_advice())
    return Finding("python", "ok", version)


def _cores() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cpu_quota()
    usable = cores if quota is None else min(float(cores), quota)
    detail = f"{cores} cores" + (f", limited to {quota:g} by the container" if quota is not None else "")
    detail += "; they multiply bfloat16" if multiplies_bfloat16() else "; no bfloat16, so float32 is the type to take"
    if usable < 2:
        return Finding(
            "cores", "warn", detail, "sampling and training share one core, so a run takes about twice as long"
        )
    return Finding("cores", "ok", detail)


def _memory() -> Finding:
    available = free_memory_bytes()
    if available is None:
        return Finding(
            "memory", "warn", "cannot be told on this system", f"a run wants {MIN_MEMORY_BYTES / GIB:.0f} GiB"
        )
    detail = f"{available / GIB:.1f} GiB available"
    if available < MIN_MEMORY_BYTES:
        return Finding(
            "memory", "warn", detail, f"the quickstart wants {MIN_MEMORY_BYTES / GIB:.0f} GiB; close something"
        )
    return Finding("memory", "ok", detail)


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free
    detail = f"{free / GIB:.1f} GiB free in {Path.cwd()}"
    if free < MIN_DISK_BYTES:
        return Finding("disk", "fail", detail, "free some space, or give runs another place with --dir")
    return Finding("disk", "ok", detail)


def _write_access() -> Finding:
    try:
        with tempfile.TemporaryFile(dir=Path.cwd()) as file:
            file.write(b"mettle")
    except OSError as error:
        advice = "change to a folder that you may write to, or give runs another place with --dir"
        return Finding("write access", "fail", f"{Path.cwd()}: {error.strerror}", advice)
    return Finding("write access", "ok", str(Path.cwd()))


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    detail = f"{soft} (can be raised to {hard})"
    if soft < 1024:
        wanted = min(4096, hard) if hard > 0 else 4096
        advice = f"run `ulimit -n {wanted}` first; each connection takes one"
        return Finding("open files", "warn", detail, advice, (f"ulimit -n {wanted}",))
    return Finding("open files", "ok", detail)


def _ports() -> Finding:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError as error:
        return Finding("ports", "fail", f"cannot listen on 127.0.0.1: {error.strerror}", "allow loopback connections")
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", HUB_PORT))
    except OSError:
        advice = "give `mettle hub serve` another with --port; runs take free ones by themselves"
        return Finding("ports", "warn", f"{HUB_PORT}, the Hub's, is in use", advice)
    return Finding("ports", "ok", f"127.0.0.1 and {HUB_PORT}, the Hub's, are free")


def _extras() -> Finding:
    try:
        missing = missing_by_extra()
    except importlib.metadata.PackageNotFoundError:
        return Finding("packages", "warn", "Mettle runs from its source and is not installed", _install_advice())
    command = (_pip_command(missing_requirements()),) if any(missing.values()) else ()
    absent = {extra: names for extra, names in missing.items() if names}
    core = absent.pop("", None)
    if core:
        return Finding("packages", "fail", f"missing: {', '.join(core)}", _install_advice(), command)
    if absent:
        detail = "; ".join(f"[{extra}] lacks {', '.join(names)}" for extra, names in absent.items())
        is_needed = bool({"serve", "train", "hub"} & set(absent))
        advice = _install_advice() if is_needed else "needed for some environments and commands; each names its extra"
        return Finding("packages", "warn", detail, advice, command)
    return Finding("packages", "ok", "the core and " + ", ".join(f"[{extra}]" for extra in missing if extra))


def _torch() -> Finding:
    import json

    try:
        done = subprocess.run(
            [sys.executable, "-c", _TORCH], capture_output=True, text=True, timeout=TORCH_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Finding(
            "torch", "fail", f"takes more than {TORCH_TIMEOUT_S:.0f} s to import", "look at the disk's speed"
        )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Finding(
            "torch", "fail", last, f"{_install_advice()}; without it environments and evals work, training does not"
        )
    found = json.loads(done.stdout)
    where = ", ".join(found["gpus"]) or f"CPU, {found['threads']} threads"
    return Finding("torch", "ok", f"{found['version']}, {where}")


def _vllm() -> Finding:
    import importlib.util
    import json

    named = os.environ.get(VLLM_PYTHON)
    how_to = 'docs/how-to/serve-with-vllm.md says how to make one; nothing but engine = "vllm" wants it'
    if named and not Path(named).exists():
        return Finding("vllm", "warn", f"{VLLM_PYTHON} is {named}, and there is no such file", how_to)
    spec = importlib.util.find_spec("vllm")
    if not named and (spec is None or spec.origin is None):  # a folder of that name is no package
        return Finding("vllm", "ok", f"none here, and {VLLM_PYTHON} names no environment that has it")
    python = named or sys.executable
    try:
        done = subprocess.run(
            [python, "-c", _VLLM], capture_output=True, text=True, timeout=TORCH_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Finding("vllm", "warn", f"takes more than {TORCH_TIMEOUT_S:.0f} s to import in {python}", how_to)
    except OSError as error:
        return Finding("vllm", "warn", f"{python} cannot be started: {error.strerror}", how_to)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Finding("vllm", "warn", f"cannot be imported in {python}: {last}", how_to)
    found = json.loads(done.stdout.strip().splitlines()[-1])
    detail = f"{found['version']} on {found['device']}, in {python}"
    if tuple(int(part) for part in found["version"].split(".")[:2] if part.isdigit()) < MIN_VLLM:
        return Finding("vllm", "warn", detail, f"Mettle takes vLLM from {'.'.join(map(str, MIN_VLLM))} on")
    return Finding("vllm", "ok", detail)


def _isolation() -> Finding:
    from mettle.errors import MettleError
    from mettle.sandbox import probe

    try:
        report = probe()
    except MettleError as error:
        return Finding("sandbox", "warn", str(error), "`mettle sandbox doctor` shows each layer")
    if report.grade == "ns":
        return Finding("sandbox", "ok", f"isolation {report.grade!r}: namespaces and seccomp are in force")
    advice = "`mettle sandbox doctor` shows each layer; environments that judge code will not start with less than 'ns'"
    lacking = [layer.name for layer in report.layers if not layer.is_in_force]
    detail = f"isolation {report.grade!r}; not in force: {', '.join(lacking)}"
    return Finding("sandbox", "warn", detail, advice, sandbox_commands())


def sandbox_commands(proc: Path = Path("/proc/sys")) -> tuple[str, ...]:
    """The settings of this kernel that keep ordinary users from namespaces, as the commands that change them."""
    found = []
    for name, (is_closed, value) in _NAMESPACE_SETTINGS.items():
        try:
            setting = (proc / name.replace(".", "/")).read_text().strip()
        except OSError:
            continue
        if is_closed(setting):
            found.append(f"sudo sysctl -w {name}={value}")
    return tuple(found)


_NAMESPACE_SETTINGS: dict[str, tuple[Callable[[str], bool], str]] = {
    "kernel.unprivileged_userns_clone": (lambda value: value == "0", "1"),
    "kernel.apparmor_restrict_unprivileged_userns": (lambda value: value == "1", "0"),
    "user.max_user_namespaces": (lambda value: value == "0", "15000"),
}
"""When each setting keeps namespaces closed, and what opens them."""


def state_folder() -> Path:
    """Where crash reports go."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "mettle"


def _state_folder() -> Finding:
    try:
        folder = state_folder()
    except RuntimeError:  # There is no home directory.
        return Finding("state folder", "ok", "none: there is no home directory; crash reports go to temporary files")
    if folder.exists() and not folder.is_dir():
        return Finding("state folder", "warn", f"{folder} is a file", f"move it away: crash reports go to {folder}")
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if os.access(nearest, os.W_OK | os.X_OK) and (nearest == folder or nearest.is_dir()):
        return Finding("state folder", "ok", str(folder))
    return Finding(
        "state folder", "warn", f"{nearest} cannot be written", f"chmod u+rwx {nearest}, or set XDG_STATE_HOME"
    )


def _dead_runs() -> Finding:
    from mettle.runs.leftovers import dead_runs

    found = dead_runs()
    if not found:
        return Finding("dead runs", "ok", "none in ./runs left anything behind")
    names = ", ".join(left.run.name for left in found)
    num = sum(len(left.files) for left in found)
    advice = "`mettle doctor --fix` clears it; `mettle rl resume RUN` goes on with the run either way"
    return Finding("dead runs", "warn", f"{names}: {num} files of processes that are gone", advice)


def _environment_packages() -> Finding:
    from mettle.runs.leftovers import environments_with_missing_packages

    found = environments_with_missing_packages()
    if not found:
        return Finding("environment packages", "ok", "what ./environments needs is installed")
    command = shlex.join([sys.executable, "-m", "pip", "install", *(w for path in found for w in ("-e", str(path)))])
    names = ", ".join(path.name for path in found)
    return Finding("environment packages", "warn", f"packages are missing for {names}", f"`{command}`", (command,))


def _git() -> Finding:
    from mettle.runs.leftovers import paths_not_ignored

    lacking = paths_not_ignored()
    if not lacking:
        return Finding("git", "ok", "outputs are not added to a repository")
    return Finding("git", "warn", f"git would add {', '.join(lacking)}", "add them to .gitignore; --fix does")


def _browser() -> Finding:
    import webbrowser

    has_display = bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or sys.platform == "darwin")
    try:
        name = webbrowser.get().name
    except webbrowser.Error:
        name = ""
    if name and has_display:
        return Finding("browser", "ok", name)
    return Finding("browser", "ok", "none to open here; runs print the address of their page")


def _environments() -> Finding:
    from mettle.envs.packages.registry import list_environments

    names = [env.name for env in list_environments()]
    if not names:
        return Finding(
            "environments", "warn", "none found", "`mettle env init NAME` makes one; `mettle env install NAME`"
        )
    return Finding("environments", "ok", ", ".join(names))


def _install_advice() -> str:
    return "`make install`" if CHECKOUT is not None else f"`{install_line('train', 'hub')}`"


def _venv_advice() -> str:
    return "`make install` makes one in .venv" if CHECKOUT is not None else "`python3 -m venv .venv` makes one"


CHECKS: dict[str, Callable[[], Finding]] = {
    "python": _python,
    "packages": _extras,
    "cores": _cores,
    "memory": _memory,
    "disk": _disk,
    "write access": _write_access,
    "open files": _open_files,
    "ports": _ports,
    "browser": _browser,
    "state folder": _state_folder,
    "environments": _environments,
    "environment packages": _environment_packages,
    "dead runs": _dead_runs,
    "git": _git,
    "torch": _torch,
    "vllm": _vllm,
    "sandbox": _isolation,
}


def _pip_command(missing: Mapping[str, Sequence[str]]) -> str:
    """The exact command that installs what is missing."""
    wanted = dict.fromkeys(requirement for requirements in missing.values() for requirement in requirements)
    return shlex.join([sys.executable, "-m", "pip", "install", *wanted])


def _cpu_quota() -> float | None:
    """CPUs that the container may use, when it is limited."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)
