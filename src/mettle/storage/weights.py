"""Published policy versions: `weights/v{n}/` with `model.safetensors`, `canary.npz` and a manifest, visible by rename.

The canary is a handful of token sequences with the trainer's own logprobs under exactly these weights; an engine that
has loaded them must reproduce the logprobs, or it serves something else. The files are not fsynced: they are handed
over through the page cache, and after a power cut the trainer publishes them again from its checkpoint.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mettle.errors import StorageError
from mettle.records.versions import WeightVersion
from mettle.storage.files import folder_aside, sha256_file, storage_errors, write_json

WEIGHT_FILE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Canary:
    """Right-padded `token_ids` [K, T] int32, their true `lengths` [K], and `logprobs` [K, T] float32.

    `logprobs[k, t]` is log p(token t | tokens < t) at temperature 1 under the published weights; position 0 and the
    padding hold 0 and do not count.
    """

    token_ids: NDArray[np.int32]
    lengths: NDArray[np.int32]
    logprobs: NDArray[np.float32]


def publish_weights(
    root: Path, version: int, save: Callable[[Path], None], canary: Canary | None = None, *, kind: str = "full"
) -> WeightVersion:
    """Publish one version: `save(path)` writes the weight file at `path`, and the folder appears complete."""
    final = root / f"v{version}"
    with folder_aside(final) as scratch:
        save(scratch / WEIGHT_FILE)
        if canary is not None:
            np.savez(
                scratch / "canary.npz", token_ids=canary.token_ids, lengths=canary.lengths, logprobs=canary.logprobs
            )
        published = WeightVersion(version, str(final), sha256_file(scratch / WEIGHT_FILE), kind)
        write_json(scratch / "manifest.json", {**asdict(published), "published_at": time.time()})
    return published


def read_version(folder: Path) -> WeightVersion:
    """The manifest of a published folder.

    Raises: StorageError when the folder is not there or not complete.
    """
    path = folder / "manifest.json"
    with storage_errors(path, "reading weights"):
        manifest = json.loads(path.read_text())
    if not (folder / WEIGHT_FILE).exists():
        raise StorageError(f"{folder} has a manifest but no {WEIGHT_FILE}")
    return WeightVersion(manifest["version"], str(folder), manifest["digest"], manifest["kind"])


def read_canary(folder: Path) -> Canary | None:
    """The canary of a published folder, or None when it was published without one."""
    path = folder / "canary.npz"
    if not path.exists():
        return None
    with np.load(path, allow_pickle=False) as arrays:
        return Canary(arrays["token_ids"], arrays["lengths"], arrays["logprobs"])


def remove_versions_before(root: Path, oldest_kept: int) -> None:
    """Delete published versions older than `oldest_kept`, except v0."""
    for folder in root.glob("v*"):
        number = folder.name[1:]
        if number.isdigit() and 0 < int(number) < oldest_kept:
            shutil.rmtree(folder, ignore_errors=True)
