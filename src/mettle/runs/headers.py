"""What the files of a model say of its weights without any weight being read: the headers of safetensors files."""

from __future__ import annotations

import json
from pathlib import Path

from mettle.errors import UserError


def shapes_of(file: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of a file's tensors by name.

    Raises: UserError when it is no such file.
    """
    try:
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    except (ValueError, OSError) as error:
        raise UserError(f"{file} cannot be read as safetensors: {error}") from error
    return {name: tuple(about["shape"]) for name, about in header.items() if name != "__metadata__"}


def shapes_in(folder: Path) -> dict[str, tuple[int, ...]]:
    """Those of all files of a model; empty where its weights lie in files of another kind."""
    return {name: shape for file in sorted(folder.glob("*.safetensors")) for name, shape in shapes_of(file).items()}
