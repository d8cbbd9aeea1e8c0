"""What is put into a container: the agent and the zygote as one archive, named by what is in it.

Beside each source lies its bytecode for the Python of this process: an image with the same version starts with a
quarter less work, and any other one compiles. The bytecode of one source is not always the same bytes, so the name is
made of the sources and the version.
Invariant: a name stands for the same sources, so that an archive that is there already need not be brought again.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import io
import marshal
import sys
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
_UNCHECKED: Final = (1).to_bytes(4, "little")


class Bundle(NamedTuple):
    """The archive, and the first 16 digits of the digest that names it."""

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
    names = [f"mettle/{folder}__init__.py" for folder in _STUBS]
    sources = dict.fromkeys(names, b"")
    paths = [path for room in _ROOMS for path in sorted((house / room).glob("*.py"))]
    for path in [*(house / name for name in _FILES), *paths]:
        sources[f"mettle/{path.relative_to(house).as_posix()}"] = path.read_bytes()
    digest = hashlib.sha256(sys.version.encode())
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, source in sources.items():
            digest.update(f"{name} {len(source)} ".encode() + source)
            _add(archive, name, source)
            _add(archive, f"{name}c", _bytecode(name, source))
    return Bundle(packed.getvalue(), digest.hexdigest()[:16])


def _bytecode(name: str, source: bytes) -> bytes:
    """As in a .pyc file that is not to be compared with its source (PEP 552)."""
    code = compile(source, f"{FOLDER}/{ARCHIVE}/{name}", "exec", dont_inherit=True)
    return importlib.util.MAGIC_NUMBER + _UNCHECKED + importlib.util.source_hash(source) + marshal.dumps(code)


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    entry = zipfile.ZipInfo(name, _EPOCH)
    entry.external_attr, entry.compress_type = 0o444 << 16, zipfile.ZIP_DEFLATED
    archive.writestr(entry, data)


def agent_command(interpreter: str, *arguments: str) -> list[str]:
    """What a container runs as its process 1."""
    return [interpreter, "-I", "-S", "-B", "-c", BOOT, f"{FOLDER}/{ARCHIVE}", *arguments]
