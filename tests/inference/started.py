"""`python -m mettle.inference` as a process: for what needs a server of its own, or its process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def started(folder: Path, **config: Any) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """(process, what its ready file says) of a server with this config, which ends with the block."""
    config_file, ready_file = folder / "inference.json", folder / "endpoints" / "inference.json"
    config_file.write_text(json.dumps(config, default=str))
    command = [sys.executable, "-m", "mettle.inference", "--config", str(config_file), "--ready-file", str(ready_file)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 100
        while not ready_file.exists():
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline, "the server was not ready in time"
            time.sleep(0.02)
        yield process, json.loads(ready_file.read_text())
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
