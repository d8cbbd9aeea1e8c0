"""A process on a node: what its actor says of it and of what it has started there."""

import os
import subprocess
import sys
import time

import pytest

from mettle.processes.beats import Beat, decode_beat, read_beats, write_beat
from mettle.runs.cluster.actor import PlacedCommand
from mettle.web.keys import WORKERS_KEY_ENV

pytestmark = pytest.mark.usefixtures("forked")


def test_beats_of_what_has_ended_on_the_node_are_brought_to_nobody(tmp_path):
    actor = PlacedCommand("127.0.0.1", "node/1")
    ready = tmp_path / "ready.json"
    arguments = ["workers-0", "--host", "{host}", "--ready-file", str(ready)]
    fields = {
        "name": "workers-0", "module": "mettle.envs.workers.place", "arguments": arguments,
        "environment": {WORKERS_KEY_ENV: "key"},
    }  # fmt: skip
    try:
        pid = actor.start(fields, str(tmp_path / "out"))
        deadline = time.monotonic() + 200.0
        while not ready.exists():
            assert time.monotonic() < deadline, (tmp_path / "out").read_text()
            time.sleep(0.02)
        dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
        write_beat(actor._beats, Beat("worker-w-workers-0-1", int(dead.stdout), 0.0))
        write_beat(actor._beats, Beat("worker-w-workers-0-2", os.getpid(), time.monotonic()))
        beats = [decode_beat(text) for text in actor.look()["beats"]]
        assert {beat.name: beat.pid for beat in beats} == {"workers-0": pid, "worker-w-workers-0-2": os.getpid()}
        assert all(beat.at <= 0.0 for beat in beats)
        assert set(read_beats(actor._beats)) == {"workers-0", "worker-w-workers-0-2"}
    finally:
        actor.end()
