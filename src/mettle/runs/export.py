"""A trained policy as a model directory that anything can load: `RUN/policy`; an adapter also alone: `RUN/adapter`."""

from __future__ import annotations

import shutil
from pathlib import Path

from mettle.errors import UserError
from mettle.storage.files import folder_aside, storage_errors
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir
from mettle.storage.weights import WEIGHT_FILE, copy_adapter


def export_policy(run_dir: RunDir, ledger: Ledger, *, is_merged: bool = True) -> Path:
    """Write the newest version with the config, tokenizer and chat template of the initial policy.

    An adapter that is not to be merged is written alone: `mettle adapter merge` makes the model when it is wanted.

    Raises: UserError when nothing has been published yet.
    """
    newest = ledger.newest_version()
    if newest is None:
        raise UserError(f"run {run_dir.name} has published no weights yet")
    final = run_dir.path / "policy"
    if newest.weights.kind == "lora":
        published = Path(newest.weights.path)
        adapter = copy_adapter(published, run_dir.path / "adapter", base=run_dir.model)
        if not is_merged:
            return adapter
        # Weights are added up, which takes torch; only runs of adapters pay for its import here.
        from mettle.trainer.merging import write_merged

        return write_merged(run_dir.model, published, final)
    source = run_dir.model.resolve()
    with storage_errors(final, "exporting the policy to"), folder_aside(final) as scratch:
        for path in source.iterdir():
            if path.is_file() and ".safetensors" not in path.name and path.suffix != ".bin":
                shutil.copyfile(path, scratch / path.name)
        shutil.copyfile(Path(newest.weights.path) / WEIGHT_FILE, scratch / WEIGHT_FILE)
    return final
