"""Installing environments with pip, and reading what pip says."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from mettle.errors import ServiceError, UserError

NOT_NEEDED: Final = frozenset({"verifiers", "prime", "mettle-lab"})
"""What Mettle itself stands for: another environment framework would only be in its way."""


def package_folder(source: str) -> Path | None:
    """The folder that is meant; None for the name of a package.

    Raises: UserError for a path that is no environment package.
    """
    candidates = [Path(source), Path("environments") / source.replace("-", "_"), Path("environments") / source]
    for path in candidates:
        if (path / "pyproject.toml").is_file():
            return path.resolve()
    if Path(source).exists() or source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise UserError(f"no environment package in {source}: it has no pyproject.toml")
    return None


def install_wheels(wheels: list[Path]) -> None:
    """Install wheels that are here, and what they need. Raises: ServiceError when pip could not."""
    needed = sorted({need for wheel in wheels for need in needs(wheel) if requirement_name(need) not in NOT_NEEDED})
    own = {requirement_name(wheel.name.split("-")[0]) for wheel in wheels}
    others = [need for need in needed if requirement_name(need) not in own]
    base = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for arguments in ([*others] if others else None, ["--no-deps", "--force-reinstall", *map(str, wheels)]):
        if arguments is None:
            continue
        done = subprocess.run([*base, *arguments], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ServiceError(f"pip could not install {' '.join(arguments[-2:])}: {pip_error(done.stderr)}")


def needs(wheel: Path) -> list[str]:
    """The requirements of a wheel that are no extra's."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(entry for entry in archive.namelist() if entry.endswith(".dist-info/METADATA"))
        headers = Parser().parsestr(archive.read(name).decode("utf-8"), headersonly=True)
    return [str(need) for need in headers.get_all("Requires-Dist") or [] if "extra ==" not in need]


def needed_names(wheel: Path) -> list[str]:
    """Their names as an index spells them."""
    return [requirement_name(need) for need in needs(wheel)]


def builds_with_what_is_here(folder: Path) -> bool:
    """True when the package is built by hatchling and that is installed, so that nothing has to be fetched."""
    manifest = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    backend = (manifest.get("build-system") or {}).get("build-backend")
    return backend == "hatchling.build" and all(find_spec(name) is not None for name in ("hatchling", "editables"))


def pip_error(text: str) -> str:
    """The line that says what is wrong: pip ends with notes about it."""
    lines = [line.strip(" \u2502\u2570\u2500>\u00d7") for line in text.splitlines()]
    wanted = re.compile(r"(ERROR:|\w*Error:|error in ) ?(?!subprocess)")
    errors = [line.removeprefix("ERROR: ") for line in lines if wanted.match(line)]
    rest = [line for line in lines if line and not line.startswith("note:")]
    return (errors or rest or ["it said nothing"])[-1]


def requirement_name(requirement: str) -> str:
    """The name of a requirement as an index spells it; empty where there is none."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement.strip())
    return re.sub(r"[-_.]+", "-", found[0]).lower() if found else ""
