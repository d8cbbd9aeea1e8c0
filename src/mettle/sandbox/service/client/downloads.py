"""What comes out of a machine onto this host's disk: one file, or a directory.

Invariant: nothing is written outside the place that was named, whatever the code inside has called its files; of a
directory only files and directories come, with nobody's special rights.
"""

from __future__ import annotations

import errno
import io
import sys
import tarfile
from pathlib import Path, PurePosixPath

from mettle.sandbox.protocols import Machine


async def download_here(machine: Machine, source: str, target: Path) -> str:
    """Write it to `target` (`-`: a file's bytes to standard output), and say what was written. Raises: OSError."""
    try:
        data = await machine.download(source)
    except IsADirectoryError:
        if str(target) == "-":
            raise
        path = PurePosixPath("/work", source)
        held = await machine.snapshot((str(path),))
        return unpack_directory(held.data, path.relative_to("/"), target)
    if str(target) == "-":
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return ""
    return _write(data, PurePosixPath(source).name, target)


def _write(data: bytes, name: str, target: Path) -> str:
    path = target / name if target.is_dir() else target
    path.write_bytes(data)
    return f"{path}: {len(data):,} bytes"


def unpack_directory(data: bytes, source: PurePosixPath, target: Path) -> str:
    """Unpack what the archive has below `source`; say how much that was, and what was left out."""
    num_files, num_bytes, num_left = 0, 0, 0
    target.mkdir(parents=True, exist_ok=True)
    if target.is_symlink() or not target.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "is no directory", str(target))
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for entry in archive:
            path = _place(entry.name, source, target)
            if path is None or not (entry.isdir() or entry.isreg()):
                num_left += 1
            elif entry.isdir():
                path.mkdir(parents=True, exist_ok=True)
            else:
                content = archive.extractfile(entry)
                assert content is not None, "a regular file has content"
                path.parent.mkdir(parents=True, exist_ok=True)
                num_bytes += path.write_bytes(content.read())
                path.chmod(0o755 if entry.mode & 0o100 else 0o644)
                num_files += 1
    left = f"; {num_left} links left out" if num_left else ""
    return f"{target}: {num_files:,} files, {num_bytes:,} bytes{left}"


def _place(name: str, source: PurePosixPath, target: Path) -> Path | None:
    """Where an entry belongs; None for a name that would leave the target, or follow a link that was there before."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.is_relative_to(source):
        return None
    found = target
    for part in path.relative_to(source).parts:
        found = found / part
        if found.is_symlink():
            return None
    return found
