"""Folders of weights as pieces that are known by their hashes, so that it does not matter who hands them over.

Parts: `describe_folder` (what a folder consists of), `PieceStore` (the pieces of folders on this disk, and of those
that are on their way), `check_listing` and `write_folder` (the other side). Invariant: a folder appears under its name
only when every byte of it has the hash that the run has told.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from mettle.errors import ProviderError
from mettle.storage.files import folder_aside, storage_errors

PIECE_BYTES: Final = 8 << 20
SUFFIXES: Final = frozenset({".json", ".safetensors", ".npz", ".jinja", ".txt", ".model"})
"""What a model or a version consists of; whatever else is in its folder stays there."""
_HEX: Final = frozenset("0123456789abcdef")


class ListedFile(NamedTuple):
    """A file's name, its length, and the sha256 of each of its pieces in order."""

    name: str
    num_bytes: int
    pieces: tuple[str, ...]


class WantedPiece(NamedTuple):
    """A piece of a folder: its hash, and where it belongs."""

    digest: str
    name: str
    offset: int
    num_bytes: int


FetchPieces = Callable[[Sequence[WantedPiece]], AsyncGenerator[tuple[WantedPiece, bytes], None]]
"""Brings each of the pieces once, in any order."""


class _Place(NamedTuple):
    path: Path
    offset: int
    num_bytes: int


def describe_folder(folder: Path) -> list[ListedFile]:
    """The files of a folder. Those that have not changed are read once.

    Raises: StorageError when it is gone.
    """
    with storage_errors(folder, "reading"):
        files = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES and path.is_file())
        return [_described(path, path.stat().st_size, path.stat().st_mtime_ns) for path in files]


@lru_cache(maxsize=256)
def _described(path: Path, num_bytes: int, _changed_ns: int) -> ListedFile:
    with path.open("rb") as file:
        pieces = tuple(hashlib.sha256(data).hexdigest() for data in iter(lambda: file.read(PIECE_BYTES), b""))
    return ListedFile(path.name, num_bytes, pieces)


class PieceStore:
    """Where pieces lie. Those of folders that are gone are forgotten when somebody asks for them."""

    def __init__(self) -> None:
        self._places: dict[str, _Place] = {}

    def add(self, folder: Path, files: Sequence[ListedFile] | None = None) -> list[ListedFile]:
        """Hand over the pieces of a folder from now on; returns what it consists of."""
        listed = describe_folder(folder) if files is None else list(files)
        for piece in pieces_of(listed):
            self.put(folder, piece)
        return listed

    def put(self, folder: Path, piece: WantedPiece) -> None:
        """Hand over a piece that lies in a folder."""
        self._places[piece.digest] = _Place(folder / piece.name, piece.offset, piece.num_bytes)

    def read(self, digest: str) -> bytes | None:
        """A piece, if it is here and unchanged."""
        place = self._places.get(digest)
        if place is None:
            return None
        try:
            with place.path.open("rb") as file:
                file.seek(place.offset)
                data = file.read(place.num_bytes)
        except OSError:
            data = b""
        if is_piece(data, digest):
            return data
        del self._places[digest]
        return None


def is_piece(data: bytes | bytearray, digest: str) -> bool:
    """Whether some bytes are the piece that has the hash."""
    return hashlib.sha256(data).hexdigest() == digest


def check_listing(told: object) -> list[ListedFile]:
    """A listing that came over a wire. Raises: ProviderError for one that is none, or would write elsewhere."""
    if not isinstance(told, list):
        raise ProviderError("the run lists no files")
    return [_checked(file) for file in told]


def _checked(file: Any) -> ListedFile:
    try:
        name, num_bytes, pieces = str(file["name"]), int(file["num_bytes"]), [str(piece) for piece in file["pieces"]]
    except (TypeError, KeyError, ValueError) as error:
        raise ProviderError(f"the run lists a file that is none: {error!r}") from error
    is_plain = name == Path(name).name and not name.startswith(".") and Path(name).suffix in SUFFIXES
    is_hashed = all(len(piece) == 64 and _HEX.issuperset(piece) for piece in pieces)
    if not (is_plain and is_hashed and num_bytes >= 0 and len(pieces) == -(-num_bytes // PIECE_BYTES)):
        raise ProviderError(f"the run lists a file that is none: {name[:80]!r}, {num_bytes} bytes")
    return ListedFile(name, num_bytes, tuple(pieces))


def wire_listing(files: Sequence[ListedFile]) -> list[Mapping[str, Any]]:
    """A listing for the wire."""
    return [file._asdict() for file in files]


@dataclass(frozen=True, slots=True)
class FetchedFolder:
    """A folder that is complete, and how many bytes were read for it."""

    path: Path
    num_bytes: int


def pieces_of(files: Sequence[ListedFile]) -> list[WantedPiece]:
    """The pieces of a folder."""
    return [
        WantedPiece(digest, file.name, offset, min(PIECE_BYTES, file.num_bytes - offset))
        for file in files
        for offset, digest in zip(range(0, file.num_bytes, PIECE_BYTES), file.pieces, strict=True)
    ]


async def write_folder(
    final: Path, files: Sequence[ListedFile], fetch: FetchPieces, arrived: PieceStore | None = None
) -> FetchedFolder:
    """Fetch the pieces of a folder, check each, hand it over to `arrived`, and let the folder appear.

    Raises: ProviderError when a piece is not what its hash says; whatever `fetch` raises.
    """
    total = 0
    with folder_aside(final) as scratch:
        for file in files:
            (scratch / file.name).touch()
        missing = set(pieces_of(files))
        async with contextlib.aclosing(fetch(pieces_of(files))) as coming:
            async for piece, data in coming:
                if len(data) != piece.num_bytes or not is_piece(data, piece.digest):
                    raise ProviderError(f"a piece of {piece.name} is not what its hash says")
                with (scratch / piece.name).open("r+b") as out:
                    out.seek(piece.offset)
                    out.write(data)
                if arrived is not None:
                    arrived.put(scratch, piece)
                missing.remove(piece)
                total += piece.num_bytes
        assert not missing, "every piece was brought"
    if arrived is not None:
        arrived.add(final, files)
    return FetchedFolder(final, total)
