"""A push that is killed at any point leaves nothing that anybody sees, and the next one goes through."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("killed_pushes.py")


@pytest.mark.e2e
@pytest.mark.nightly
def test_database_and_blobs_agree_after_a_kill_at_any_point_of_a_push(tmp_path):
    done = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    *killed, whole = json.loads(done.stdout)
    assert len(killed) == 11
    for point in killed:
        assert point["killed"] == -signal.SIGKILL
        assert point["seen"] == {"status": 404}
        assert (point["again"], point["then"]) == (0, {"status": 200, "whole": True})
    assert whole["killed"] == 0
    assert whole["seen"] == {"status": 200, "whole": True}
    assert whole["again"] == 1  # the same version once more is refused
