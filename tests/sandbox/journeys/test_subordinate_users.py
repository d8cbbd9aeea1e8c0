"""An ordinary user's pools with ranges in /etc/subuid: each test and machine is a user of its own to the host."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import ordinary
import pytest

FIRST, NUMBER = 1_500_000, 8192
_PROGRAMS = ("newuidmap", "newgidmap", "unshare", "setpriv")
_FILES = ("subuid", "subgid", "passwd")
# What a pool of this user's makes, as the host sees it; then one machine takes all pages of pipes and all descriptors
# in flight that its user may have, and the others are asked for their share.
_LOOK = """
import asyncio, json, os, re, sys
from pathlib import Path
from hoards import HOARDS, SHARE
from mettle.sandbox import MachineConfig, MachinePool, SandboxConfig, SandboxPool, StdioTest
from mettle.sandbox.zygote import watch
def users(template_pid):
    owners = {}
    for pid in watch.descendants(template_pid):
        status = Path(f"/proc/{pid}/status").read_text()
        owners.setdefault(int(re.search(r"^Uid:\\t(\\d+)", status, re.M)[1]), []).append(pid)
    return sorted(owners)
async def main():
    config = SandboxConfig(require=("ns", "own-host-user"), warm=2)
    async with SandboxPool(config) as pool, MachinePool(config) as machines:
        made = [await machines.create(MachineConfig(memory_mb=1024, disk_mb=64)) for _ in range(3)]
        found = {"cells": users(pool.template_pid), "machines": users(machines.template_pid), "wrong": []}
        for hoard in HOARDS:
            if hoard.name not in sys.argv[1:]: continue
            job = await made[0].start(["python3", "-c", hoard.program])
            while not (held := re.search(r"held (\\d+)", (await job.output()).stdout)): await asyncio.sleep(0.02)
            assert int(held[1]) >= hoard.least, (hoard.name, held[1])
            [result] = (await pool.judge(SHARE, [StdioTest("", "all right")], timeout_s=3)).tests
            if not result.has_passed: found["wrong"].append(["a test", hoard.name, result.stdout, result.stderr])
            answer = await made[1].exec(["python3", "-", "machine"], stdin=SHARE, timeout_s=20)
            if answer.stdout != "all right\\n": found["wrong"].append(["a machine", hoard.name, answer.stdout, answer.stderr])
        print(json.dumps(found))
asyncio.run(main())
"""


@pytest.fixture(scope="module")
def interpreter(_needs_isolation: None) -> str:
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing or not all(os.path.exists(f"/etc/{name}") for name in _FILES):
        pytest.skip(f"this host has no {', '.join(missing) or 'files of subordinate users'}")
    found = ordinary.interpreter()
    if found is None:
        pytest.skip("started by an ordinary user already, or no interpreter that one can run finds these packages")
    return found


@pytest.fixture
def etc(tmp_path: Path) -> Path:
    """Files that cover the host's for one program: the user has a name, and ranges."""
    (tmp_path / "passwd").write_text(f"{Path('/etc/passwd').read_text()}ranger:x:{ordinary.UID}:{ordinary.UID}::/:\n")
    for name in ("subuid", "subgid"):
        (tmp_path / name).write_text(f"ranger:{FIRST}:{NUMBER}\n")
    for path in (tmp_path, *tmp_path.iterdir()):
        path.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    "hoards",
    [
        [],
        pytest.param(["pages of pipes", "descriptors on their way"], marks=pytest.mark.nightly),
    ],
    ids=["at rest", "beside a hoarder"],
)
def test_each_machine_and_test_is_another_user_and_none_is_the_owner(
    interpreter: str, etc: Path, hoards: list[str]
) -> None:
    covered = {f"/etc/{name}": etc / name for name in _FILES}
    run = ordinary.run_beside(covered, interpreter, ["-c", _LOOK, *hoards], timeout_s=120)
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout)
    templates = {ordinary.UID, FIRST}
    cells, machines = set(found["cells"]) - templates, set(found["machines"]) - templates
    assert len(machines) == 3
    assert len(cells) >= 2
    assert not cells & machines, "two pools gave out one user"
    assert all(FIRST <= user < FIRST + NUMBER for user in cells | machines), found
    assert ordinary.UID not in cells | machines
    assert found["wrong"] == []
