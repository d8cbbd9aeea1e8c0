"""What is put into a container: the agent and the zygote as one archive, named by what is in it.

Invariant: the same sources give the same bytes, so that an archive that is there already need not be brought again; a
name with another digest is another agent.
"""

from __future__ import annotations

import functools
import hashlib
import io
import tarfile
import zipfile
from pathlib import Path
from typing import Final, NamedTuple

from mettle.sandbox.containers.agent.boot import BOOT

FOLDER: Final = "/mettle"
ARCHIVE: Final = "agent.zip"
_ROOMS: Final = ("sandbox/containers/agent", "sandbox/zygote")
_FILES: Final = ("errors.py", "sandbox/machines/capture.py", "sandbox/service/messages.py")
# The real ones import what is not in there.
_STUBS: Final = ("", "sandbox/", "sandbox/containers/", "sandbox/machines/", "sandbox/service/")
_EPOCH: Final = (1980, 1, 1, 0, 0, 0)


class Bundle(NamedTuple):
    """The archive, and the first 16 digits of its digest."""

    data: bytes
    digest: str

    def as_tar(self) -> bytes:
        """The archive as the one file of a tar archive, readable by everybody."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive:
            entry = tarfile.TarInfo(ARCHIVE)
            entry.size, entry.mode = len(self.data), 0o444
            archive.addfile(entry, io.BytesIO(self.data))
        return packed.getvalue()


@functools.cache
def make_bundle() -> Bundle:
    """The archive of this installation."""
    house = Path(__file__).resolve().parents[2]
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for folder in _STUBS:
            _add(archive, f"mettle/{folder}__init__.py", b"")
        paths = [path for room in _ROOMS for path in sorted((house / room).glob("*.py"))]
        for path in [*(house / name for name in _FILES), *paths]:
            _add(archive, f"mettle/{path.relative_to(house).as_posix()}", path.read_bytes())
    data = packed.getvalue()
    return Bundle(data, hashlib.sha256(data).hexdigest()[:16])


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    entry = zipfile.ZipInfo(name, _EPOCH)
    entry.external_attr, entry.compress_type = 0o444 << 16, zipfile.ZIP_DEFLATED
    archive.writestr(entry, data)


def agent_command(interpreter: str, *arguments: str) -> list[str]:
    """What a container runs as its process 1."""
    return [interpreter, "-I", "-S", "-B", "-c", BOOT, f"{FOLDER}/{ARCHIVE}", *arguments]
