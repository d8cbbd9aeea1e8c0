"""Folders as hashed pieces: whoever hands them over, only the right bytes become a folder."""

from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import pytest

from mettle.errors import ProviderError
from mettle.inference.outside import files
from mettle.inference.outside.files import PieceStore, WantedPiece, check_listing, wire_listing, write_folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(files, "PIECE_BYTES", 100)
    path = tmp_path / "there"
    path.mkdir()
    (path / "model.safetensors").write_bytes(bytes(range(250)))
    (path / "config.json").write_bytes(b"{}")
    (path / "empty.json").write_bytes(b"")
    (path / "notes.key").write_bytes(b"mine")
    return path


async def test_a_folder_arrives_as_it_is_without_what_is_no_part_of_a_model(folder: Path, tmp_path: Path) -> None:
    store = PieceStore()
    listed = check_listing(wire_listing(store.add(folder)))

    here = PieceStore()

    async def fetch(wanted: Sequence[WantedPiece]) -> AsyncGenerator[tuple[WantedPiece, bytes], None]:
        for number, piece in enumerate(reversed(wanted)):
            data = store.read(piece.digest)
            assert data is not None
            assert here.read(piece.digest) is None
            yield piece, data
            assert here.read(piece.digest) == data, f"piece {number} can be handed on while others are still to come"

    found = await write_folder(tmp_path / "here", listed, fetch, here)
    assert all(here.read(piece) == store.read(piece) for file in listed for piece in file.pieces)
    assert found.num_bytes == 252
    assert {path.name: path.read_bytes() for path in found.path.iterdir()} == {
        "model.safetensors": bytes(range(250)), "config.json": b"{}", "empty.json": b"",
    }  # fmt: skip


async def test_a_wrong_piece_leaves_no_folder(folder: Path, tmp_path: Path) -> None:
    async def fetch(wanted: Sequence[WantedPiece]) -> AsyncGenerator[tuple[WantedPiece, bytes], None]:
        yield wanted[0], bytes(100)

    with pytest.raises(ProviderError, match="not what its hash says"):
        await write_folder(tmp_path / "here", PieceStore().add(folder), fetch)
    assert not (tmp_path / "here").exists()


def test_a_piece_of_a_file_that_has_changed_is_not_handed_over(folder: Path) -> None:
    store = PieceStore()
    listed = {file.name: file for file in store.add(folder)}
    (folder / "config.json").write_bytes(b"[]")
    assert store.read(listed["config.json"].pieces[0]) is None
    assert store.read(listed["model.safetensors"].pieces[2]) == bytes(range(200, 250))
    assert store.read("0" * 64) is None


@pytest.mark.parametrize(
    "told",
    [
        None,
        [{"name": "../up.json", "num_bytes": 0, "pieces": []}],
        [{"name": ".hidden.json", "num_bytes": 0, "pieces": []}],
        [{"name": "run.sh", "num_bytes": 0, "pieces": []}],
        [{"name": "a.json", "num_bytes": 5, "pieces": []}],
        [{"name": "a.json", "num_bytes": 5, "pieces": ["zz" * 32]}],
        [{"name": "a.json"}],
    ],
)
def test_a_listing_that_would_write_elsewhere_is_refused(told: object) -> None:
    with pytest.raises(ProviderError):
        check_listing(told)
