"""Jobs for a shell in a machine of the model's own, graded by what it leaves there.

Parts: `ShellTaskEnv`, rows, rewards. A job is drawn from its family and a seed; a row names the two and
holds no result. Invariants: files and processes live from command to command until the rollout is over; nothing that
was run inside, nor printed, has a say in the reward; a rollout whose machine failed is an error.
"""

from __future__ import annotations

import asyncio
import json
import random
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import shell_answers
import shell_data
import shell_files
import shell_programs
import shell_services
from shell_job import NOUNS, Job, Program
from shell_leftovers import MAX_FILE_BYTES, Leftovers, hold

import mettle.envs as vf
from mettle.envs.proxy.machines import AgentMachine
from mettle.envs.sandboxes import CreateSandboxRequest

MODULES = (shell_answers, shell_files, shell_data, shell_programs, shell_services)
MAKERS = {maker.__name__: maker for module in MODULES for maker in module.FAMILIES}
SYSTEM_PROMPT = (
    "You work in a Linux machine with the tool `bash`. Each command begins in the folder of the task; files and "
    "processes stay, variables do not. When the task is done, say so without calling the tool."
)
EVAL_SHARE = 5
"""One job in so many is for evaluation."""
NUM_LOOKS, LOOK_S = 500, 0.02
PREPARE_S = 20


def job_of(info: Mapping[str, Any]) -> Job:
    """The job of a row."""
    maker: Callable[[random.Random], Job] = MAKERS[info["family"]]
    return maker(random.Random(f"{info['family']}/{info['seed']}"))


def make_rows(num_rows: int, *, for_eval: bool, families: list[str], seed: int) -> list[dict[str, Any]]:
    """Jobs of one split, as many of each family, in a drawn order. No question comes twice."""
    rng = random.Random(f"{seed}/{for_eval}")
    rows: dict[str, dict[str, Any]] = {}
    while len(rows) < num_rows:
        family = families[len(rows) % len(families)]
        info = {"family": family, "seed": rng.getrandbits(48), "folder": f"/work/{'-'.join(rng.sample(NOUNS, 2))}"}
        question = f"The folder is `{info['folder']}`. {job_of(info).question}"
        if (zlib.crc32(question.encode()) % EVAL_SHARE == 0) == for_eval and question not in rows:
            rows[question] = {"question": question, "info": info}
    made = list(rows.values())
    rng.shuffle(made)
    return made


class ShellTaskEnv(vf.SandboxEnv):
    """Sets a job up in the rollout's machine and looks at what is left of it."""

    def __init__(self, *, memory_mb: int, disk_mb: int, **kwargs: Any) -> None:
        super().__init__(sandbox_name="shell-task", **kwargs)
        self.sandbox_request.memory_gb, self.sandbox_request.disk_size_gb = memory_mb / 1024, disk_mb / 1024
        self._programs: dict[str, dict[str, Any]] = {}

    async def setup_state(self, state: vf.State, **kwargs: Any) -> vf.State:
        """Commands begin in the folder of the job."""
        state["working_dir"] = state["info"]["folder"]
        return await super().setup_state(state, **kwargs)

    async def post_sandbox_setup(self, state: vf.State) -> None:
        """Bring the files, and start what is to run."""
        job, folder = job_of(state["info"]), state["info"]["folder"]
        machine = await AgentMachine.of(state["sandbox_id"])
        await machine.exec(["mkdir", "-p", folder])
        await machine.upload_files({f"{folder}/{path}": content for path, content in job.files.items()})
        if job.prepare:
            ended = await machine.exec(job.prepare, cwd=folder, timeout_s=PREPARE_S)
            if ended.exit_code != 0:
                raise vf.SandboxError(f"the job {state['info']} could not be prepared: {ended.stderr}")
        self._programs[state["sandbox_id"]] = {
            name: await _start(machine, program, folder) for name, program in job.programs.items()
        }

    async def post_rollout(self, state: vf.State) -> None:
        """Check what is left, from outside."""
        programs = self._programs.pop(state["sandbox_id"], {})
        if state.get("error") is not None:
            return
        job = job_of(state["info"])
        machine = await AgentMachine.of(state["sandbox_id"])
        left = Leftovers(machine, state["info"]["folder"], programs, self._fresh_machine)
        state["checked"] = {"goals": await hold(job.goals, left), "guards": await hold(job.guards, left)}

    @asynccontextmanager
    async def _fresh_machine(self) -> AsyncIterator[AgentMachine]:
        request: CreateSandboxRequest = self.sandbox_request.model_copy(deep=True)
        sandbox = await self.with_retry(self.sandbox_client.create)(request)
        self.register_sandbox(sandbox.id)
        try:
            yield await AgentMachine.of(sandbox.id)
        finally:
            await self.delete_sandbox(sandbox.id)

    def demonstrate(self, messages: vf.Messages, row: Mapping[str, Any]) -> dict[str, Any]:
        """The next command of the job's solution, by how many were given."""
        solution = job_of(row["info"]).solution
        done = sum(len(message.get("tool_calls") or ()) for message in messages if message["role"] == "assistant")
        if done >= len(solution):
            return {"role": "assistant", "content": "Done."}
        call = {"id": f"call_{done}", "name": "bash", "arguments": json.dumps({"command": solution[done]})}
        return {"role": "assistant", "content": None, "tool_calls": [call]}


async def _start(machine: AgentMachine, program: Program, folder: str) -> Any:
    argv = [part.replace("{folder}", folder) for part in program.argv]
    job = await machine.start(argv, cwd=folder, stdin=program.stdin, max_output_bytes=1 << 12)
    for _ in range(NUM_LOOKS):
        if await _is_ready(machine, program):
            return job
        await asyncio.sleep(LOOK_S)
    raise vf.SandboxError(f"{argv[:2]} is not ready in its machine after {NUM_LOOKS * LOOK_S:g} s")


async def _is_ready(machine: AgentMachine, program: Program) -> bool:
    try:
        if program.port is not None:
            (await machine.connect(program.port)).close()
        if program.file is not None:
            await machine.download(program.file, max_bytes=MAX_FILE_BYTES)
    except (ConnectionRefusedError, FileNotFoundError):
        return False
    return True


def solved(state: vf.State) -> float:
    """1 when all goals are met and nothing was harmed that had to stay."""
    checked = state["checked"]
    return float(all(checked["goals"]) and all(checked["guards"]))


def fraction_met(state: vf.State) -> float:
    """Share of the goals that are met; 0 when something was harmed that had to stay."""
    checked = state["checked"]
    return sum(checked["goals"]) / len(checked["goals"]) if all(checked["guards"]) else 0.0


def load_environment(
    families: list[str] | None = None,
    partial_credit: bool = False,
    max_turns: int = 12,
    command_timeout_s: int = 20,
    memory_mb: int = 256,
    disk_mb: int = 64,
    num_train: int = 1000,
    num_eval: int = 100,
    seed: int = 0,
) -> vf.SandboxEnv:
    """Jobs of some `families` (all of them by default)."""
    chosen = list(families or MAKERS)
    unknown = [family for family in chosen if family not in MAKERS]
    if unknown:
        raise ValueError(f"there are no families {unknown}; there are {sorted(MAKERS)}, not more")
    weights = [0.0, 1.0] if partial_credit else [1.0, 0.0]
    split: dict[str, Any] = {"families": chosen, "seed": seed}
    return ShellTaskEnv(
        memory_mb=memory_mb,
        disk_mb=disk_mb,
        dataset=lambda: make_rows(num_train, for_eval=False, **split),
        eval_dataset=lambda: make_rows(num_eval, for_eval=True, **split),
        system_prompt=SYSTEM_PROMPT,
        rubric=vf.Rubric([solved, fraction_met], weights=weights),
        max_turns=max_turns,
        timeout_per_command_seconds=command_timeout_s,
        timeout_minutes=30,
    )
