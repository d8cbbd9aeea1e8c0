"""Looking into a wheel or a source archive that a stranger has sent, without unpacking it.

Parts: `read_wheel`, `read_source`, `list_files`, `read_member`, `unpacked_members`. Invariants: nothing is written; no
more than a bounded number of bytes and entries is ever read, whatever the archive says of itself; a name that leads out
of the archive, a link or a device is refused.
"""

from __future__ import annotations

import io
import re
import tarfile
import tomllib
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final, cast

from mettle.errors import UserError

MAX_ENTRIES: Final = 20_000
MAX_UNPACKED_BYTES: Final = 2 << 30
MAX_TEXT_BYTES: Final = 1 << 20
VERSION: Final = re.compile(r"\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?")
NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,98}[A-Za-z0-9])?")
_WHEEL: Final = re.compile(r"([A-Za-z0-9._]+)-([A-Za-z0-9.!+_]+)(-\d[\w.]*)?-[\w.]+-[\w.]+-[\w.]+\.whl")


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """What a source archive says of itself."""

    readme: str
    project: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Listed:
    """A file of an archive."""

    path: str
    num_bytes: int


def normalized_name(name: str) -> str:
    """A package's name as an index spells it (PEP 503). Raises: UserError when it is none."""
    if not NAME.fullmatch(name):
        raise UserError(f"{name[:80]!r} is no name of a package: letters, digits, dots and dashes make one")
    return re.sub(r"[-_.]+", "-", name).lower()


def checked_version(version: str) -> str:
    """Raises: UserError when it is no version as pip understands it."""
    if not VERSION.fullmatch(version) or len(version) > 60:
        raise UserError(f"{version[:60]!r} is no version; write it like 0.1.0, 0.1.1rc1 or 0.1.1.post1")
    return version


def wheel_name_parts(filename: str) -> tuple[str, str]:
    """(name, version) of a wheel's file name. Raises: UserError when it is no such name."""
    found = _WHEEL.fullmatch(filename)
    if found is None or len(filename) > 200:
        raise UserError(f"{filename[:80]!r} is no name of a wheel; it is like name-0.1.0-py3-none-any.whl")
    return normalized_name(found[1]), found[2]


def read_wheel(path: Path, *, name: str, version: str) -> str:
    """The METADATA of a wheel. Raises: UserError when it is no wheel of that name and version, or is hostile."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            _check_sizes(len(entries), sum(entry.file_size for entry in entries))
            for entry in entries:
                _check_path(entry.filename)
                if (entry.external_attr >> 16) & 0o170000 == 0o120000:
                    raise UserError(f"the wheel has a link, {entry.filename[:80]!r}; wheels have none")
            found = [e for e in entries if re.fullmatch(r"[^/]+\.dist-info/METADATA", e.filename)]
            if len(found) != 1:
                raise UserError(f"the wheel has {len(found)} files *.dist-info/METADATA; a wheel has one")
            text = _limited(archive.open(found[0]), "METADATA")
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, OSError, RuntimeError, ValueError) as error:
        raise UserError(f"this is no wheel that can be read: {error}") from error
    headers = Parser().parsestr(text, headersonly=True)
    if normalized_name(headers["Name"] or "") != name or headers["Version"] != version:
        said = f"{headers['Name']} {headers['Version']}"
        raise UserError(f"the wheel says that it is {said[:120]}, and {name} {version} was announced")
    return text


def read_source(path: Path, *, name: str, version: str) -> SourceFacts:
    """README and project of a source archive. Raises: UserError when it lacks them, is another's, or is hostile."""
    wanted: dict[str, str] = {}
    for member, file in unpacked_members(path):
        if member in ("README.md", "pyproject.toml") and file is not None:
            wanted[member] = _limited(file, member)
    if not wanted.get("README.md", "").strip():
        raise UserError("an environment needs a README.md that says what it is; write one, and push again")
    try:
        project = tomllib.loads(wanted["pyproject.toml"])["project"]
        said = f"{project['name']} {project['version']}"
        is_same = normalized_name(str(project["name"])) == name and str(project["version"]) == version
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"the source has no pyproject.toml with a name and a version: {error}") from error
    if not is_same:
        raise UserError(f"the source says that it is {said[:120]}, and {name} {version} was announced")
    return SourceFacts(wanted["README.md"], project)


def list_files(path: Path) -> list[Listed]:
    """The files of a source archive, by path."""
    return sorted((Listed(name, size) for name, size in _sizes(path)), key=lambda each: each.path)


def read_member(path: Path, wanted: str, max_bytes: int) -> tuple[bytes, int] | None:
    """(the first bytes, size) of a file in a source archive; None when it is not there."""
    for member, file in unpacked_members(path):
        if member == wanted and file is not None:
            data = file.read(max_bytes)
            return data, len(data) + _rest(file)
    return None


def _rest(file: IO[bytes]) -> int:
    """Bytes that are still to be read, which this reads."""
    num_bytes = 0
    while chunk := file.read(1 << 20):
        num_bytes += len(chunk)
    return num_bytes


def _sizes(path: Path) -> Iterator[tuple[str, int]]:
    for member, file in unpacked_members(path):
        if file is not None:
            yield member, _rest(file)


class _Bounded(io.RawIOBase):
    """A stream that fails after so many bytes: what an archive unpacks to is not known before."""

    def __init__(self, file: io.BufferedIOBase, max_bytes: int) -> None:
        self._file, self._left, self._max_bytes = file, max_bytes, max_bytes

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(min(size, 1 << 20) if size >= 0 else 1 << 20)
        self._left -= len(data)
        if self._left < 0:
            raise UserError(f"the archive unpacks to more than {self._max_bytes >> 20:,} MiB")
        return data


def unpacked_members(path: Path, max_bytes: int = MAX_UNPACKED_BYTES) -> Iterator[tuple[str, IO[bytes] | None]]:
    """(path, content) of a source archive's members, one after the other; folders have None.

    Raises: UserError for one that is hostile, or unpacks to more than `max_bytes`.
    """
    import gzip

    try:
        with (
            gzip.open(path) as raw,
            tarfile.open(fileobj=cast(IO[bytes], _Bounded(raw, max_bytes)), mode="r|", bufsize=1 << 16) as archive,
        ):
            for number, entry in enumerate(archive):
                _check_sizes(number + 1, entry.size)
                _check_path(entry.name)
                if not (entry.isfile() or entry.isdir()):
                    raise UserError(f"the archive has {entry.name[:80]!r}, which is neither a file nor a folder")
                # A bounded read may be short, so a member is what the header says that it is, or is refused below.
                yield str(PurePosixPath(entry.name)), archive.extractfile(entry) if entry.isfile() else None
    except (tarfile.TarError, zlib.error, EOFError, OSError, ValueError) as error:
        raise UserError(f"this is no tar.gz that can be read: {error}") from error


def _limited(file: IO[bytes], name: str) -> str:
    data = file.read(MAX_TEXT_BYTES + 1)
    if len(data) > MAX_TEXT_BYTES:
        raise UserError(f"{name} is longer than {MAX_TEXT_BYTES >> 10:,} KiB")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{name} is not UTF-8") from None


def _check_sizes(num_entries: int, num_bytes: int) -> None:
    if num_entries > MAX_ENTRIES:
        raise UserError(f"the archive has more than {MAX_ENTRIES:,} entries")
    if num_bytes > MAX_UNPACKED_BYTES:
        raise UserError(f"the archive unpacks to more than {MAX_UNPACKED_BYTES >> 20:,} MiB")


def _check_path(name: str) -> None:
    parts = PurePosixPath(name).parts
    is_odd = any(ord(letter) < 32 for letter in name) or "\\" in name or len(name) > 500
    if name.startswith("/") or ".." in parts or is_odd or (parts and ":" in parts[0]):
        raise UserError(f"the archive has a path that leads out of it: {name[:80]!r}")
