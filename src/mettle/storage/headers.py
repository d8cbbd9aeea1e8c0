"""What the files of a model say of its weights without any weight being read: the headers of safetensors files.

Parts: `tensors_of`, `shapes_of`, `shapes_in`. Invariant: a file that is none (a pointer of Git LFS in its place, half a
download) is told as such, whatever its first bytes say of a length.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from mettle.errors import UserError

MAX_HEADER_BYTES: Final = 100_000_000
"""More is no header, by the format."""


def tensors_of(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """(type as the format calls it, shape) of each tensor in a file, by name.

    Raises: UserError when it is no such file.
    """
    try:
        with file.open("rb") as stream:
            num_bytes = int.from_bytes(stream.read(8), "little")
            if num_bytes > MAX_HEADER_BYTES:
                raise ValueError("its header would be longer than a header can be")
            header = json.loads(stream.read(num_bytes))
        if not isinstance(header, dict):
            raise ValueError("its header is no object")
        entries = [(name, header[name]) for name in header if name != "__metadata__"]
        return {name: (str(entry["dtype"]), tuple(map(int, entry["shape"]))) for name, entry in entries}
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise UserError(f"{file} cannot be read as safetensors: {error}") from error


def shapes_of(file: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of a file's tensors by name.

    Raises: UserError when it is no such file.
    """
    return {name: shape for name, (_, shape) in tensors_of(file).items()}


def shapes_in(folder: Path) -> dict[str, tuple[int, ...]]:
    """Those of all files of a model; empty where its weights lie in files of another kind."""
    return {name: shape for file in sorted(folder.glob("*.safetensors")) for name, shape in shapes_of(file).items()}
