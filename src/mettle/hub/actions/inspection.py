"""The check of one release, in a process of its own: installed, loaded, and its quality card made, in a machine.

    install   wheels alone (pip runs none of their code), into folders that hold nothing else; what no index here has
              is said, and taken from beside Mettle where it is installed there
    load      `load_environment` of the installed wheel, without the source beside it
    card      the quality card over the source

Run as `python -m mettle.hub.actions.inspection FOLDER`: reads `order.json`, prints what it does, writes `outcome.json`.
Invariants: code of the release runs in a machine alone; what comes out of that is text that nobody vouches for.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import mettle
from mettle.envs.packages.archive import unpack
from mettle.envs.packages.install import pip_error, requirement_name
from mettle.errors import MettleError, SandboxError, UserError
from mettle.hub.actions.order import CheckOrder, read_order
from mettle.hub.actions.states import CANCELLED, FAILED, SUCCESS
from mettle.processes.orphans import end_with_parent
from mettle.quality.confined import MARK, MAX_TASK_CHARS, MAX_TASKS
from mettle.sandbox import Machine, MachineConfig, MachinePool, SandboxConfig
from mettle.storage.files import write_json

ORDER: Final = "order.json"
OUTCOME: Final = "outcome.json"
MAX_INSTALLED_BYTES: Final = 2 << 30
MAX_CARD_BYTES: Final = 2 << 20
LOAD_S: Final = 180.0
CARD_S: Final = 900.0
PIP_S: Final = 600.0
_BROUGHT: Final = ("mettle-lab", "pytest", "pytest-asyncio")
"""What a machine has besides the release: Mettle with what it requires, and what runs tests."""
_SITE: Final = b"import site; site.addsitedir('/packages')\n"


class CheckFailed(Exception):
    """The release is at fault; the message says how."""


def inspect(order: CheckOrder, folder: Path) -> dict[str, Any]:
    """{"state", "card"}, and the texts of some tasks where it came so far; what was done is printed."""
    try:
        brought = _install(order, folder)
        unpack(Path(order.source), folder / "source", sha256=order.source_sha256)
        return asyncio.run(_in_a_machine(order, folder, brought))
    except CheckFailed as error:
        _say(f"error: {error}")
        return {"state": FAILED, "card": None}
    except (SandboxError, UserError, OSError, subprocess.SubprocessError) as error:
        _say(f"not checked: {error}")
        return {"state": CANCELLED, "card": None}


def _install(order: CheckOrder, folder: Path) -> list[str]:
    """Into `wheel` and `packages`; returns the packages that are taken from beside Mettle."""
    _say(f"install {order.slug}@{order.version}")
    if order.refused:
        raise CheckFailed(
            f"it needs {', '.join(order.refused)}: a private name of this Hub, which is looked for nowhere else"
        )
    beside: list[str] = []
    for requirement in order.requirements:
        if not _is_brought(requirement):
            beside += _fetch(requirement, folder, order.index)
    for number, (path, name) in enumerate(order.wheels):
        # Hard links would let pip's own checks of names see the blob's, which is a digest.
        shutil.copyfile(path, folder / name)
        _pip(["--no-deps", "--no-index", str(folder / name)], folder / ("packages" if number else "wheel"))
        _say(f"installed {name}")
    installed = _num_bytes(folder)
    if installed > MAX_INSTALLED_BYTES:
        raise CheckFailed(f"it installs {installed >> 20:,} MiB; {MAX_INSTALLED_BYTES >> 20:,} is the most")
    return beside


def _is_brought(requirement: str) -> bool:
    """Whether Mettle itself requires a package of that name, so that every machine has it."""
    own = {requirement_name(each) for each in importlib.metadata.requires("mettle-lab") or [] if "extra ==" not in each}
    return requirement_name(requirement) in own


def _fetch(requirement: str, folder: Path, index: str) -> list[str]:
    if " @ " in requirement:
        raise CheckFailed(f"{requirement.partition(' @ ')[0]} comes from an address and not from an index")
    where = ["--index-url", index] if index else []
    try:
        _pip(["--only-binary", ":all:", *where, requirement], folder / "packages")
    except CheckFailed as error:
        name = requirement_name(requirement)
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            raise CheckFailed(f"could not install {requirement}: {error}") from error
        _say(f"could not install {requirement} ({error}); {name} {version} of this machine is used")
        return [name]
    _say(f"installed {requirement}")
    return []


def _pip(words: list[str], target: Path) -> None:
    base = [sys.executable, "-I", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    done = subprocess.run(
        [*base, "--no-compile", "--upgrade", "--target", str(target), *words], capture_output=True, text=True,
        timeout=PIP_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise CheckFailed(pip_error(done.stderr))


async def _in_a_machine(order: CheckOrder, folder: Path, beside: list[str]) -> dict[str, Any]:
    packages = [name for name in (*_BROUGHT, *beside) if _is_installed(name)]
    config = MachineConfig(
        memory_mb=3072, disk_mb=512 + 2 * (_num_bytes(folder) >> 20), max_processes=256,
        lifetime_s=LOAD_S + CARD_S + 60,
        network={"allow": order.reach} if order.reach else None,
    )  # fmt: skip
    async with MachinePool(SandboxConfig(python_packages=tuple(packages), warm=0)) as machines:
        machine = await machines.create(config)
        _say(f"machine with isolation {machines.isolation.grade}, reaching {', '.join(order.reach) or 'nothing'}")
        module = order.name.replace("-", "_")
        files = {
            "/work/site/mettle": Path(mettle.__file__).parent, "/work/site/sitecustomize.py": _SITE,
            "/work/wheel": folder / "wheel", f"/work/environments/{module}": folder / "source",
        }  # fmt: skip
        if (folder / "packages").is_dir():
            files["/work/packages"] = folder / "packages"
        await machine.upload_files(files)  # type: ignore[arg-type]
        await _run(machine, ["load", order.name], LOAD_S, cwd="/", has_wheel=True)
        await _run(machine, ["card", order.name, "/work/card.json"], CARD_S, cwd="/work", has_wheel=False)
        try:
            made = json.loads(await machine.download("/work/card.json", max_bytes=MAX_CARD_BYTES))
            card = _shaped(made)
            tasks = [str(each)[:MAX_TASK_CHARS] for each in list(made.get("tasks") or [])[:MAX_TASKS]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckFailed(f"its card cannot be read: {error}") from error
    for section, checks in card["sections"].items():
        for each in checks:
            if each["status"] in ("fail", "untested"):
                _say(f"{each['status']}: {section}: {each['name']}: {each['detail']}")
    _say(f"card: {card['status']}")
    return {"state": SUCCESS if card["has_passed"] else FAILED, "card": card, "tasks": tasks}


async def _run(machine: Machine, words: list[str], timeout_s: float, *, cwd: str, has_wheel: bool) -> None:
    places = ["/work/site", *(["/work/wheel"] if has_wheel else []), "/work/packages", "/packages"]
    environment = {"PYTHONPATH": os.pathsep.join(places), MARK: "1"}
    done = await machine.exec(
        ["python3", "-m", "mettle.quality.confined", *words], cwd=cwd, env=environment, timeout_s=timeout_s
    )
    for line in f"{done.stdout}\n{done.stderr}".splitlines()[-60:]:
        if line.strip():
            _say(f"  {line[:500]}")
    if done.is_timed_out:
        raise CheckFailed(f"{words[0]}: no end within {timeout_s:g} s")
    if done.is_out_of_memory:
        raise CheckFailed(f"{words[0]}: it needs more than {machine.config.memory_mb:,} MB")
    if done.exit_code != 0:
        said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        raise CheckFailed(f"{words[0]}: {said[-1][7:] if said else f'exit code {done.exit_code}'}")


def _num_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _shaped(value: Any) -> dict[str, Any]:
    """The parts of a card that are shown, as text of bounded length: the code of the release may have written it."""
    sections = {
        str(name)[:40]: [
            {key: str(each[key])[:600] for key in ("name", "status", "detail", "fix")} for each in checks[:200]
        ] for name, checks in list(value["sections"].items())[:12]
    }  # fmt: skip
    found = [
        {key: str(each.get(key, ""))[:300] for key in ("rule", "file", "line", "what")}
        for each in (value.get("lint") or {}).get("findings", [])[:100]
    ]
    statuses = [each["status"] for checks in sections.values() for each in checks]
    worst = next((word for word in ("fail", "untested", "warn") if word in statuses), "pass")
    return {
        "status": worst, "has_passed": worst in ("pass", "warn") and bool(statuses), "sections": sections,
        "findings": found,
    }  # fmt: skip


def _say(line: str) -> None:
    print(line.replace("\0", " "), flush=True)


def main(folder: Path) -> None:
    """Check the order of a folder."""
    end_with_parent()
    os.nice(10)
    order = read_order(folder / ORDER)
    with tempfile.TemporaryDirectory(prefix="work-", dir=folder) as scratch:
        try:
            outcome = inspect(order, Path(scratch))
        except MettleError as error:
            _say(f"not checked: {error}")
            outcome = {"state": CANCELLED, "card": None}
    write_json(folder / OUTCOME, outcome)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
