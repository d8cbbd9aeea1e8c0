"""What a process of `engines` is: makes the model directory where it needs one, then becomes an inference server.

    python -m mettle.hub.serving.program FOLDER

`FOLDER/order.json` has the order; the server says in `FOLDER/ready.json` where it answers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from mettle.hub.evaluating.program import model_of_version
from mettle.storage.files import write_json
from mettle.storage.run_dir import RunDir

ORDER: Final = "order.json"
CONFIG: Final = "config.json"
READY: Final = "ready.json"


def command_of(folder: Path) -> list[str]:
    """The command of the server."""
    order = json.loads((folder / ORDER).read_text(encoding="utf-8"))
    model = order["path"] or str(model_of_version(folder, RunDir(Path(order["run"])), int(order["version"])))
    write_json(folder / CONFIG, {"model": model, "served_model_name": order["name"], "host": "127.0.0.1", "port": 0})
    words = ["--config", str(folder / CONFIG), "--ready-file", str(folder / READY)]
    return [sys.executable, "-m", "mettle.inference", *words]


if __name__ == "__main__":
    try:
        words = command_of(Path(sys.argv[1]))
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")
    os.execv(words[0], words)
