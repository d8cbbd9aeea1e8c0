"""An environment as it is published: its wheel, its source archive, and the hash of its content.

Parts: `pack`, `unpack`, `bump_version`, `Packed`. Invariant: the same files make the same content hash and the same
source archive, on any machine at any time.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mettle.errors import ServiceError, UserError
from mettle.storage.files import folder_aside, sha256_file

_LEFT_OUT: Final = frozenset({"dist", "build", "outputs", "__pycache__", "node_modules"})
_MAX_UNPACKED: Final = 2 << 30


@dataclass(frozen=True, slots=True)
class Packed:
    """Wheel and source archive of one version."""

    name: str
    version: str
    wheel: Path
    source: Path
    content_hash: str
    project: dict[str, Any]


def pack(folder: Path, scratch: Path) -> Packed:
    """Build both into `scratch`.

    Raises: UserError when something of it is missing, ServiceError when it does not build.
    """
    project = _project(folder)
    name, version = str(project.get("name") or ""), str(project.get("version") or "")
    if not name or not version:
        raise UserError(f"{folder / 'pyproject.toml'} needs a name and a version under [project]")
    if not (folder / "README.md").is_file() or not (folder / "README.md").read_text(encoding="utf-8").strip():
        raise UserError(f"an environment needs a README.md that says what it is; write {folder / 'README.md'}")
    files = sorted(_files(folder))
    source = scratch / f"{name}-{version}.tar.gz"
    source.write_bytes(_archive(folder, files))
    return Packed(name, version, _wheel(folder, scratch), source, _content_hash(folder, files), project)


def unpack(archive: Path, folder: Path, *, sha256: str) -> None:
    """Unpack a source archive. Raises: UserError when it is not the one that was named, or leads out of its folder."""
    if sha256_file(archive) != sha256:
        raise UserError("the source that came is not the one that the Hub names; try again")
    try:
        with tarfile.open(archive, "r:gz") as tar, folder_aside(folder) as scratch:
            num_bytes = 0
            for member in tar:
                num_bytes += member.size
                if num_bytes > _MAX_UNPACKED or not (member.isfile() or member.isdir()):
                    raise UserError(
                        f"the source has {member.name!r}, which is too large, or neither a file nor a folder"
                    )
                tar.extract(member, scratch, filter="data")
    except tarfile.TarError as error:
        raise UserError(f"the source cannot be unpacked: {error}") from error


def bump_version(folder: Path) -> str:
    """Raise the last number of the version in pyproject.toml; returns the new one."""
    path = folder / "pyproject.toml"
    version = str(_project(folder).get("version") or "")
    found = re.fullmatch(r"(.*?)(\d+)", version)
    if found is None:
        raise UserError(f"version {version!r} of {path} does not end in a number; raise it by hand")
    raised = f"{found[1]}{int(found[2]) + 1}"
    text = path.read_text(encoding="utf-8")
    changed, times = re.subn(
        rf'^(version\s*=\s*["\']){re.escape(version)}(["\'])', rf"\g<1>{raised}\g<2>", text, count=1, flags=re.M
    )
    if times != 1:
        raise UserError(f"{path} has no line version = {version!r}; raise it by hand")
    path.write_text(changed, encoding="utf-8")
    return raised


def _project(folder: Path) -> dict[str, Any]:
    try:
        return dict(tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8")).get("project") or {})
    except ValueError as error:
        raise UserError(f"{folder / 'pyproject.toml'}: {error}") from error


def _files(folder: Path) -> Iterator[Path]:
    """What is published: everything but hidden files, what builds leave, links, and what git ignores."""
    ignored = _ignored(folder)
    for path in folder.rglob("*"):
        relative = path.relative_to(folder)
        is_left_out = any(p.startswith(".") or p in _LEFT_OUT or p.endswith(".egg-info") for p in relative.parts)
        if path.is_file() and not path.is_symlink() and not is_left_out and relative.as_posix() not in ignored:
            yield relative


def _ignored(folder: Path) -> set[str]:
    command = ["git", "-C", str(folder), "ls-files", "--others", "--ignored", "--exclude-standard", "-z", "."]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return set()
    return set(done.stdout.split("\0")) if done.returncode == 0 else set()


def _content_hash(folder: Path, files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"file:{path.as_posix()}".encode())
        digest.update((folder / path).read_bytes())
    return digest.hexdigest()


def _archive(folder: Path, files: list[Path]) -> bytes:
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in files:
            data = (folder / path).read_bytes()
            entry = tarfile.TarInfo(path.as_posix())
            entry.size, entry.mode = len(data), 0o644
            tar.addfile(entry, io.BytesIO(data))
    return gzip.compress(plain.getvalue(), mtime=0)


def _wheel(folder: Path, scratch: Path) -> Path:
    from mettle.envs.packages.install import builds_with_what_is_here, pip_error

    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    here = ["--no-build-isolation"] if builds_with_what_is_here(folder) else []
    done = subprocess.run(
        [*command, *here, "--wheel-dir", str(scratch / "dist"), str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = list((scratch / "dist").glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise ServiceError(f"{folder} does not build: {pip_error(done.stderr)}")
    return wheels[0]
