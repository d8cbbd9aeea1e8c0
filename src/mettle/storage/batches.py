"""Batches on disk: immutable, content-addressed, readable without torch.

One `.npz` (uncompressed) a batch: arrays named `r{rank}.m{micro}.{field}` and one JSON header. The file's name is the
sha256 of its bytes, so that a batch read after a crash is the batch that was shipped or an error.
"""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path

import numpy as np

from mettle.errors import StorageError
from mettle.records.tokens import DTYPES, Batch, MicroBatch
from mettle.storage.files import storage_errors, write_atomic


def write_batch(folder: Path, batch: Batch) -> tuple[str, Path]:
    """Write `batch` and return its digest and path. Writing the same batch twice is one file."""
    arrays: dict[str, np.ndarray] = {}
    for rank, micro_batches in enumerate(batch.ranks):
        for index, micro in enumerate(micro_batches):
            for name, dtype in DTYPES.items():
                arrays[f"r{rank}.m{index}.{name}"] = np.ascontiguousarray(getattr(micro, name), dtype=dtype)
    header = {
        "step": batch.step,
        "ranks": [len(micro_batches) for micro_batches in batch.ranks],
        "draw_ids": list(batch.draw_ids),
        "staleness": list(batch.staleness),
        "metrics": batch.metrics,
    }
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    data = buffer.getvalue()
    digest = hashlib.sha256(data).hexdigest()
    path = folder / f"{digest}.npz"
    if not path.exists():
        write_atomic(path, data)
    return digest, path


def read_batch(folder: Path, digest: str) -> Batch:
    """Read a batch back and check that its bytes are those that were shipped.

    Raises: StorageError if the file is missing, or cut short, or changed.
    """
    path = folder / f"{digest}.npz"
    with storage_errors(path, "reading batch"):
        data = path.read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if found != digest:
        raise StorageError(f"batch {path} is damaged: its bytes hash to {found[:12]}, not {digest[:12]}")
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        header = json.loads(arrays["header"].tobytes())
        ranks = tuple(
            tuple(MicroBatch(**{name: arrays[f"r{rank}.m{index}.{name}"] for name in DTYPES}) for index in range(count))
            for rank, count in enumerate(header["ranks"])
        )
    mean, largest = header["staleness"]
    return Batch(header["step"], ranks, tuple(header["draw_ids"]), (float(mean), int(largest)), header["metrics"])
