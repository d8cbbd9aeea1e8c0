"""Published policy versions: `weights/v{n}/` with the weights, `canary.npz` and a manifest, visible by rename.

A version of kind "full" is `model.safetensors`; one of kind "lora" is a PEFT adapter (`adapter_model.safetensors` with
`adapter_config.json`), whose manifest names the digest of the base that it belongs to.
The canary is a handful of token sequences with the trainer's own logprobs under exactly these weights; an engine that
has loaded them must reproduce the logprobs, or it serves something else. The files are not fsynced: they are handed
over through the page cache, and after a power cut the trainer publishes them again from its checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mettle.errors import StorageError, UserError
from mettle.records.versions import WeightVersion
from mettle.storage.files import folder_aside, sha256_file, storage_errors, write_json
from mettle.storage.headers import tensors_of

WEIGHT_FILE = "model.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
_TYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_FILE_OF_KIND = {"full": WEIGHT_FILE, "lora": ADAPTER_FILE}


@dataclass(frozen=True, slots=True)
class Canary:
    """Right-padded `token_ids` [K, T] int32, their true `lengths` [K], and `logprobs` [K, T] float32.

    `logprobs[k, t]` is log p(token t | tokens < t) at temperature 1 under the published weights; position 0 and the
    padding hold 0 and do not count.
    """

    token_ids: NDArray[np.int32]
    lengths: NDArray[np.int32]
    logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class AdapterNotes:
    """What is published with an adapter: PEFT's config, and the digest of the base (`model_digest`)."""

    config: dict[str, Any]
    base_digest: str


def publish_weights(
    root: Path,
    version: int,
    save: Callable[[Path], str | None],
    canary: Canary | None = None,
    *,
    adapter: AdapterNotes | None = None,
    served_as: str | None = None,
) -> WeightVersion:
    """Publish one version: `save(path)` writes the weight file at `path`, and the folder appears complete.

    Where `save` says the file's sha256, it is not read for it. `served_as` is the type in which the engine that it is
    for computes; the manifest names it beside the type of the file's tensors.
    """
    final = root / f"v{version}"
    kind = "full" if adapter is None else "lora"
    with folder_aside(final) as scratch:
        path = scratch / _FILE_OF_KIND[kind]
        digest = save(path)
        if canary is not None:
            np.savez(
                scratch / "canary.npz", token_ids=canary.token_ids, lengths=canary.lengths, logprobs=canary.logprobs
            )
        published = WeightVersion(version, str(final), digest or sha256_file(path), kind)
        manifest = {**asdict(published), "published_at": time.time(), "dtype": _type_of(path)}
        if served_as is not None:
            manifest["served_as"] = served_as
        if adapter is not None:
            write_json(scratch / ADAPTER_CONFIG, adapter.config)
            manifest["base_digest"] = adapter.base_digest
        write_json(scratch / "manifest.json", manifest)
    return published


def copy_adapter(published: Path, final: Path, *, base: Path) -> Path:
    """Copy the adapter that was published in a folder into one that PEFT loads, which names its base."""
    with folder_aside(final) as scratch:
        config = json.loads((published / ADAPTER_CONFIG).read_text())
        write_json(scratch / ADAPTER_CONFIG, config | {"base_model_name_or_path": str(base.resolve())})
        shutil.copyfile(published / ADAPTER_FILE, scratch / ADAPTER_FILE)
        if (published / "manifest.json").exists():
            shutil.copyfile(published / "manifest.json", scratch / "manifest.json")
    return final


def _type_of(path: Path) -> str | None:
    """The type of a safetensors file's tensors, by its header; of several the one with most tensors."""
    try:
        types = Counter(name for name, _ in tensors_of(path).values())
        ((name, _),) = types.most_common(1)
    except (UserError, ValueError):  # or it has no tensor
        return None
    return _TYPE_NAMES.get(name, str(name))


def read_version(folder: Path) -> WeightVersion:
    """The manifest of a published folder.

    Raises: StorageError when the folder is not there or not complete.
    """
    manifest = _manifest(folder)
    name = _FILE_OF_KIND.get(manifest["kind"], WEIGHT_FILE)
    if not (folder / name).exists():
        raise StorageError(f"{folder} has a manifest but no {name}")
    return WeightVersion(manifest["version"], str(folder), manifest["digest"], manifest["kind"])


def weight_file(version: WeightVersion) -> Path:
    """The file that a version's digest is of."""
    return Path(version.path) / _FILE_OF_KIND[version.kind]


def base_digest_of(folder: Path) -> str | None:
    """The digest of the base that a published adapter belongs to; None for full weights."""
    digest: str | None = _manifest(folder).get("base_digest")
    return digest


def model_digest(folder: Path) -> str:
    """One digest of all safetensors files of a model directory, read once as long as they do not change."""
    files = sorted(folder.glob("*.safetensors"))
    return _digest_of(tuple((str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files))


@lru_cache(maxsize=8)
def _digest_of(files: tuple[tuple[str, int, int], ...]) -> str:
    total = hashlib.sha256()
    for name, _, _ in files:
        total.update(bytes.fromhex(sha256_file(Path(name))))
    return total.hexdigest()


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    with storage_errors(path, "reading weights"):
        manifest: dict[str, Any] = json.loads(path.read_text())
    return manifest


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
