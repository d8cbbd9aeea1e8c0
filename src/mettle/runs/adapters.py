"""Adapters of runs: which there are, taking one out, merging one into its base. What touches weights is the trainer's.

An adapter is named by a run (its newest version, or another) or by its own folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mettle.errors import UserError
from mettle.runs.export import find_version, published_versions
from mettle.storage.run_dir import RunDir
from mettle.storage.weights import ADAPTER_CONFIG, ADAPTER_FILE


def list_adapters(folder: Path) -> list[dict[str, Any]]:
    """The newest adapter of each run in a folder of runs, newest run first."""
    runs = sorted((path.parent for path in folder.glob("*/run.db")), key=lambda run: run.stat().st_mtime, reverse=True)
    return [about for run in runs for about in _newest(RunDir(run.resolve()))]


def find_adapter(source: Path, version: int | None = None) -> Path:
    """The folder of the adapter that a run or a folder names.

    Raises: UserError when there is none.
    """
    if (source / ADAPTER_CONFIG).exists():
        if version is not None:
            raise UserError(f"{source} is one adapter, which has no versions; name a run to choose among its versions")
        return source
    return Path(find_version(RunDir.existing(source), version, kind="lora").path)


def base_of(source: Path, adapter: Path, given: Path | None) -> Path:
    """The model directory that an adapter belongs to: what is said, else the run's, else what the adapter names.

    Raises: UserError when nobody knows.
    """
    if given is not None:
        return given
    model = RunDir(source.resolve()).model
    if model.exists():
        return model
    said = json.loads((adapter / ADAPTER_CONFIG).read_text()).get("base_model_name_or_path")
    if said and (Path(said) / "config.json").exists():
        return Path(said)
    raise UserError(f"the base of {adapter} is not known ({said or 'it names none'}); say it with --base DIR")


def _newest(run_dir: RunDir) -> Iterator[dict[str, Any]]:
    versions = {each.version: Path(each.path) for each in published_versions(run_dir) if each.kind == "lora"}
    if not versions:
        return
    newest = max(versions)
    config = json.loads((versions[newest] / ADAPTER_CONFIG).read_text())
    yield {
        "run": run_dir.name,
        "run_dir": str(run_dir.path),
        "version": newest,
        "versions": sorted(versions),
        "rank": config["r"],
        "alpha": config["lora_alpha"],
        "target_modules": config["target_modules"],
        "bytes": (versions[newest] / ADAPTER_FILE).stat().st_size,
        "base": str(run_dir.model.resolve()),
    }
