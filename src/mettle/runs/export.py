"""A trained policy as a model directory that anything can load: `RUN/policy`; an adapter also alone: `RUN/adapter`.

Parts: `export_policy` at the end of a run; `write_model` of any version; `find_version`, `published_versions`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from mettle.errors import StorageError, UserError
from mettle.records.versions import WeightVersion
from mettle.storage.files import folder_aside, storage_errors
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir
from mettle.storage.weights import WEIGHT_FILE, copy_adapter, read_version, weight_file


def export_policy(run_dir: RunDir, ledger: Ledger, *, is_merged: bool = True) -> Path:
    """Write the newest version, with the config, tokenizer and chat template of the initial policy, into the run.

    An adapter that is not to be merged is written alone: `mettle adapter merge` makes the model when it is wanted.

    Raises: UserError when nothing has been published yet.
    """
    newest = ledger.newest_version()
    if newest is None:
        raise UserError(f"run {run_dir.name} has published no weights yet")
    published = newest.weights
    if published.kind == "lora":
        adapter = copy_adapter(Path(published.path), run_dir.path / "adapter", base=run_dir.model)
        if not is_merged:
            return adapter
    return write_model(run_dir, published, run_dir.path / "policy")


def write_model(run_dir: RunDir, version: WeightVersion, final: Path) -> Path:
    """Write one version of a run's policy as the model directory `final`; an adapter is added to its base's weights.

    Raises: UserError when the adapter is of another base than the run's.
    """
    if version.kind == "lora":
        # Weights are added up, which takes torch; only runs of adapters pay for its import here.
        from mettle.trainer.merging import write_merged

        return write_merged(run_dir.model, Path(version.path), final)
    source = run_dir.model.resolve()
    with storage_errors(final, "exporting the policy to"), folder_aside(final) as scratch:
        for path in source.iterdir():
            if path.is_file() and ".safetensors" not in path.name and path.suffix != ".bin":
                shutil.copyfile(path, scratch / path.name)
        shutil.copyfile(weight_file(version), scratch / WEIGHT_FILE)
    return final


def find_version(run_dir: RunDir, number: int | None = None, *, kind: str | None = None) -> WeightVersion:
    """The version of a run that is on disk: the newest, or this one; with `kind` only those that are so.

    Raises: UserError when there is none; it names those that there are.
    """
    what = "adapter" if kind == "lora" else "version"
    versions = {each.version: each for each in published_versions(run_dir) if kind in (None, each.kind)}
    if not versions:
        why = "it trains all weights, or has published nothing yet" if kind == "lora" else "it has published no weights"
        raise UserError(f"run {run_dir.name} has no {what}: {why}")
    chosen = max(versions) if number is None else number
    if chosen not in versions:
        known = ", ".join(f"v{each}" for each in sorted(versions))
        raise UserError(f"run {run_dir.name} has no {what} v{chosen} on disk any more; it has {known}")
    return versions[chosen]


def published_versions(run_dir: RunDir) -> Iterator[WeightVersion]:
    """The versions of a run that are on disk, in no order."""
    for folder in run_dir.weights.glob("v*"):
        try:
            yield read_version(folder)
        except StorageError:
            continue  # a run that goes on is just removing it
