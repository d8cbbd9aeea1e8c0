"""A task's tests, run on what the agent left behind, and the reward that they write.

Parts: `verified_reward`. The tests run in a machine of their own that starts from the agent's files: no process of the
agent is left there to change the outcome, and neither are programs that it put ahead of the system's, or files where
tests and rewards lie. Invariant: a reward is what the tests wrote, or there is an error; never a silent 0.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mettle.envs.errors import JudgeError
from mettle.envs.proxy.machines import AgentMachine
from mettle_harbor.tasks import HarborTask

if TYPE_CHECKING:
    from mettle.sandbox.machines.commands import ExecResult

TESTS, ORACLE, LOGS = "/tests", "/oracle", "/logs/verifier"
OURS = frozenset({"/dev", "/proc", "/sys", "/run", "/opt", TESTS, ORACLE, "/logs"})
OUTPUT_EXCERPT = 1500


async def verified_reward(
    machine: AgentMachine, task: HarborTask, env: Mapping[str, str], workdir: str, packages: Sequence[str] = ()
) -> float:
    """Run the tests of `task` on the files of `machine`. Raises: JudgeError when they give no reward."""
    verifier = await machine.twin(await machine.snapshot(await _kept_paths(machine)), packages)
    try:
        await verifier.exec(
            f"rm -rf {TESTS} {ORACLE} {LOGS} && mkdir -p {TESTS} {LOGS} {shlex.quote(workdir)}", cwd="/"
        )
        await verifier.upload(TESTS, task.tests)
        if task.solution.is_dir():
            await verifier.upload(ORACLE, task.solution)
        result = await verifier.exec(
            ["/bin/bash", f"{TESTS}/test.sh"],
            cwd=workdir,
            env={**env, **task.verifier_env},
            timeout_s=task.verifier_timeout_s,
        )
        return _reward(await _written(verifier), result, task)
    finally:
        await verifier.delete()


async def _kept_paths(machine: AgentMachine) -> list[str]:
    """What the agent may have written: all but the host's own directories, which are mounts, and ours."""
    table = await machine.exec(["/bin/cat", "/proc/self/mountinfo"], cwd="/")  # the agent may have a `cat` of its own
    mounts = {fields[4] for line in table.stdout.splitlines() if len(fields := line.split()) > 4}
    return await _below(machine, "", mounts)


async def _below(machine: AgentMachine, folder: str, mounts: set[str]) -> list[str]:
    """Paths in `folder` that hold no mount."""
    kept: list[str] = []
    for entry in await machine.list(folder or "/"):
        path = f"{folder}/{entry.name}"
        if path in OURS or path in mounts or (entry.kind == "link" and not folder):
            continue
        if any(mount.startswith(f"{path}/") for mount in mounts):
            kept += await _below(machine, path, mounts)
        else:
            kept.append(path)
    return kept


async def _written(verifier: AgentMachine) -> str:
    for name in ("reward.txt", "reward.json"):
        try:
            text = (await verifier.download(f"{LOGS}/{name}", max_bytes=1 << 20)).decode("utf-8", "replace").strip()
        except OSError:
            continue
        if text:
            return text
    return ""


def _reward(text: str, result: ExecResult, task: HarborTask) -> float:
    if not text:
        how = "ran out of time" if result.is_timed_out else f"ended with exit code {result.exit_code}"
        said = (result.stderr or result.stdout).strip()[-OUTPUT_EXCERPT:]
        raise JudgeError(f"the tests of {task.name} wrote no {LOGS}/reward.txt; they {how}: {said}")
    try:
        value = json.loads(text)
        reward = float(value["reward"] if isinstance(value, dict) else value)
    except (ValueError, TypeError, KeyError) as error:
        raise JudgeError(f"the tests of {task.name} wrote {text[:200]!r}, which is no reward") from error
    if not math.isfinite(reward):
        raise JudgeError(f"the tests of {task.name} wrote the reward {reward}")
    return reward
