"""The template's rehearsal runs a test as a cell would, and leaves nothing."""

from __future__ import annotations

import json
import subprocess
import sys

from mettle.sandbox.config import SandboxConfig
from mettle.sandbox.zygote.settings import Settings

REHEARSED = """
import json, os, resource, sys
from mettle.sandbox.zygote import child, rehearsal
from mettle.sandbox.zygote.settings import Settings

def state():
    return sorted(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_AS), os.getcwd()

settings = Settings.from_json(sys.argv[1])
child.forget_harness()
before = state()
if len(sys.argv) > 2:
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), 4096))
rehearsal.rehearse(settings)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
try:
    os.waitpid(-1, os.WNOHANG)
    children = "left"
except ChildProcessError:
    children = "none"
print(json.dumps({"same": state() == before, "children": children, "has_run": used.ru_minflt > 0}))
"""


def rehearse(*arguments: str) -> dict[str, object]:
    config = SandboxConfig()
    settings = Settings(
        control_fd=0,
        owner_pid=0,
        is_jailed=True,
        is_landlocked=False,
        host_uid=config.host_uid,
        max_processes=config.max_processes,
        max_open_files=config.max_open_files,
        max_file_bytes=1 << 20,
        disk_bytes=1 << 20,
        max_disk_files=16,
        scratch="",
        packages=(),
        preload=(),
        host_paths=(),
        host_ids=(0, 0),
        sub_ids=(),
        why_no_sub_ids="",
        may_use_event=False,
    )
    command = [sys.executable, "-c", REHEARSED, settings.to_json(), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_a_rehearsal_runs_and_leaves_no_process_descriptor_or_limit() -> None:
    assert rehearse() == {"same": True, "children": "none", "has_run": True}


def test_a_rehearsal_that_gets_no_descriptors_is_no_error() -> None:
    found = rehearse("10")
    assert found["children"] == "none"
    assert found["same"] is True
