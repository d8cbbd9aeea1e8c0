"""Batches on disk: immutable, content-addressed, readable without torch.

One `.npz` (uncompressed) a batch: an array for each column of a token, `sequence_lengths`, and one JSON header. The
file's name is the sha256 of its bytes, so that a batch read after a crash is the batch that was shipped or an error.
Only what trains is in there, nothing of when or how fast it came about: the same rollouts are the same file.
"""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from mettle.errors import StorageError
from mettle.records.tokens import COLUMNS, Batch, SampledBy, filled
from mettle.storage.files import storage_errors, write_atomic


def batch_path(folder: Path, digest: str) -> Path:
    """Where the batch of a digest lies."""
    return folder / f"{digest}.npz"


def write_batch(folder: Path, batch: Batch) -> tuple[str, Path]:
    """Write `batch` and return its digest and path. Writing the same batch twice is one file."""
    data = encode_batch(batch)
    digest = hashlib.sha256(data).hexdigest()
    path = batch_path(folder, digest)
    if not path.exists():
        write_atomic(path, data)
    return digest, path


def replace_batch(folder: Path, batch: Batch) -> None:
    """Write `batch` over whatever stands in its place."""
    data = encode_batch(batch)
    write_atomic(batch_path(folder, hashlib.sha256(data).hexdigest()), data)


def encode_batch(batch: Batch) -> bytes:
    """The bytes of a batch's file. Their sha256 is its digest."""
    arrays = {name: np.ascontiguousarray(getattr(batch, name), dtype=column.dtype) for name, column in COLUMNS.items()}
    arrays = {name: array for name, array in arrays.items() if array.size or not COLUMNS[name].is_wide}
    arrays["sequence_lengths"] = np.ascontiguousarray(batch.sequence_lengths, dtype=np.int32)
    header: dict[str, Any] = {
        "step": batch.step,
        "draw_ids": list(batch.draw_ids),
        "staleness": list(batch.staleness),
    }
    if batch.replicas:
        header["replicas"] = batch.replicas
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def read_batch(folder: Path, digest: str) -> Batch:
    """Read a batch back and check that its bytes are those that were shipped.

    Raises: StorageError if the file is missing, or cut short, or changed, or of another version of this format.
    """
    path = batch_path(folder, digest)
    with storage_errors(path, "reading batch"):
        data = path.read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if found != digest:
        raise StorageError(f"batch {path} is damaged: its bytes hash to {found[:12]}, not {digest[:12]}")
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        always = {name for name, column in COLUMNS.items() if not column.is_wide}
        missing = {*always, "sequence_lengths", "header"} - set(arrays.files)
        if missing:
            raise StorageError(f"batch {path} was written by another version: it has no {', '.join(sorted(missing))}")
        header = json.loads(arrays["header"].tobytes())
        given = {name: arrays[name] for name in COLUMNS if name in arrays.files}
        columns = filled(len(given["token_ids"]), given)
        mean, largest = header["staleness"]
        return Batch(
            sequence_lengths=arrays["sequence_lengths"],
            step=header["step"],
            draw_ids=tuple(header["draw_ids"]),
            staleness=(float(mean), int(largest)),
            replicas=tuple(SampledBy(*own) for own in header.get("replicas", ())),
            **columns,
        )
