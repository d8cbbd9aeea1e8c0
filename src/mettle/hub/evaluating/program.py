"""What the worker starts for one evaluation: makes the model directory where it needs one, then becomes `mettle eval`.

    python -m mettle.hub.evaluating.program FOLDER

`FOLDER/order.json` has the order. A version of a run's whole weights is served from links, an adapter is merged into
its base first. One that was cut off goes on with what is there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from mettle.hub.training.submission import as_toml
from mettle.storage.run_dir import RunDir
from mettle.storage.weights import ADAPTER_CONFIG, WEIGHT_FILE

ORDER: Final = "order.json"
_METTLE: Final = (sys.executable, "-m", "mettle.cli")


def command_of(folder: Path) -> list[str]:
    """The command of an evaluation, or of its rest."""
    begun = next(iter(sorted(folder.glob("results/*/*/run.db"))), None)
    if begun is not None:
        return [*_METTLE, "eval", "run", "--resume", str(begun.parent), "--disable-tui"]
    order = json.loads((folder / ORDER).read_text(encoding="utf-8"))
    settings: dict[str, Any] = {**order["settings"], "output_dir": str(folder / "results")}
    if order["version"]:
        settings["model"] = str(model_of_version(folder, RunDir(Path(order["version"][0])), int(order["version"][1])))
    (folder / "eval.toml").write_text(as_toml({"eval": [settings]}), encoding="utf-8")
    return [*_METTLE, "eval", "run", str(folder / "eval.toml"), "--disable-tui"]


def model_of_version(folder: Path, run: RunDir, version: int) -> Path:
    """The model directory of a version, made in `folder` where it is not there: links, or an adapter merged."""
    target = folder / f"v{version}"
    if (target / "config.json").exists():
        return target
    shutil.rmtree(target, ignore_errors=True)
    weights = run.version(version)
    if (weights / ADAPTER_CONFIG).exists():
        words = ["adapter", "merge", str(weights), str(target), "--base", str(run.model)]
        subprocess.run([*_METTLE, *words], check=True)
        return target
    target.mkdir(parents=True)
    (target / WEIGHT_FILE).symlink_to((weights / WEIGHT_FILE).resolve())
    for file in sorted(run.model.iterdir()):
        if file.is_file() and file.suffix != ".safetensors" and file.name != "config.json":
            (target / file.name).symlink_to(file.resolve())
    (target / "config.json").symlink_to((run.model / "config.json").resolve())  # last: it says that all is there
    return target


if __name__ == "__main__":
    try:
        words = command_of(Path(sys.argv[1]))
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")
    os.execv(words[0], words)
