"""A model directory of a base and an adapter, and an adapter as a folder of its own.

Parts: `write_merged`, `write_adapter`. Nothing of the network is built: weights are read, added to and written file by
file, so that the shards of a base stay its shards. Invariant: a folder appears complete or not at all.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from mettle.errors import UserError
from mettle.inference.engine.adapter_files import merged_state, read_adapter
from mettle.inference.engine.weights import read_state
from mettle.storage.files import folder_aside, storage_errors
from mettle.storage.weights import base_digest_of, copy_adapter, model_digest


def write_merged(base: Path, adapter: Path, final: Path) -> Path:
    """Write the model directory `final`: the base with the adapter added to its weights, in the base's own types.

    Raises: UserError when the adapter is of another base.
    """
    check_base(adapter, base)
    base_state = read_state(base)
    state = merged_state(base_state, read_adapter(adapter))
    source = base.resolve()
    with folder_aside(final) as scratch:
        for path in source.iterdir():
            if path.is_file() and path.suffix not in (".safetensors", ".bin"):
                shutil.copyfile(path, scratch / path.name)
        for path in sorted(source.glob("*.safetensors")):
            with storage_errors(final, "writing"), safe_open(str(path), "pt") as file:
                part = {name: state[name].to(base_state[name].dtype).contiguous() for name in file.keys()}  # noqa: SIM118
                save_file(part, scratch / path.name, metadata={"format": "pt"})
    return final


def write_adapter(published: Path, final: Path, *, base: Path) -> Path:
    """Write the adapter in `published` as a folder that PEFT loads, which names its base."""
    read_adapter(published)
    return copy_adapter(published, final, base=base)


def check_base(adapter: Path, base: Path) -> None:
    """Raises: UserError when an adapter says that it belongs to other weights than those in `base`."""
    if not (base / "config.json").exists():
        raise UserError(f"{base} is not a model directory: it has no config.json")
    if not (adapter / "manifest.json").exists():
        return  # somebody else's adapter does not say; its shapes are checked
    said = base_digest_of(adapter)
    if said is not None and said != model_digest(base):
        raise UserError(f"the adapter in {adapter} is of another base than {base}: their digests differ")
