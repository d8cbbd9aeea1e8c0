"""Tasks in Harbor's format, solved by an agent program, scored by the tests that come with each task.

Parts: `HarborEnv`. Invariants: tests and solution enter no machine that the agent can see; a task whose world cannot be
made here, or whose tests give no reward, is an error that says so, and never a 0.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mettle.envs.cli_agent_env import CliAgentEnv
from mettle.envs.errors import JudgeError, SandboxError, attributed
from mettle.envs.rubrics.rubric import Rubric
from mettle.envs.state import State
from mettle.errors import UserError
from mettle_harbor.servers import HarborMCPHealthcheck, servers_of, start_server
from mettle_harbor.tasks import HarborTask, find_tasks
from mettle_harbor.verifier import verified_reward

STEP_TIMEOUT_S = 600.0


class HarborEnv(CliAgentEnv):
    """`run_command` on the tasks below `dataset_path`. Arguments that `CliAgentEnv` knows may follow."""

    def __init__(
        self,
        run_command: str | Sequence[str],
        dataset_path: str | Path,
        tasks: Sequence[str] | None = None,
        agent_workdir: str = "/app",
        docker_image: str = "python:3.11-slim",
        mcp_launch_commands: Mapping[str, str] | None = None,
        mcp_healthcheck: HarborMCPHealthcheck | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("sandbox_backend") == "unsafe":
            raise UserError("Harbor tasks use absolute paths (/app, /tests, /logs), which need an isolated sandbox")
        self.dataset_path = Path(dataset_path)
        self.task_names = list(tasks) if tasks is not None else None
        self.agent_workdir = agent_workdir
        self.mcp_launch_commands = dict(mcp_launch_commands or {})
        self.mcp_healthcheck = mcp_healthcheck or HarborMCPHealthcheck()
        self._tasks = {str(task.folder): task for task in find_tasks(dataset_path, self.task_names)}
        kwargs.setdefault("dataset", self.load_harbor_dataset())
        kwargs.setdefault("rubric", Rubric(funcs=[self.harbor_reward], weights=[1.0]))
        super().__init__(run_command, docker_image=docker_image, **kwargs)

    def load_harbor_dataset(self) -> list[dict[str, Any]]:
        """A row for each task."""
        return [
            {
                "example_id": index,
                "prompt": [{"role": "user", "content": task.instruction}],
                "info": {
                    "task_name": task.name,
                    "task_dir": str(task.folder),
                    "docker_image": task.docker_image,
                    "config": task.config,
                },
            }
            for index, task in enumerate(self._tasks.values())
        ]

    def task(self, state: State) -> HarborTask:
        """The task of a rollout."""
        folder = str((state.get("info") or {}).get("task_dir"))
        if folder not in self._tasks:
            raise SandboxError(f"the row's info names no task of {self.dataset_path}: {folder!r}")
        return self._tasks[folder]

    def workdir(self, state: State) -> str:
        """Where the agent and the tests start."""
        return self.task(state).world.workdir or self.agent_workdir

    async def get_docker_image(self, state: State) -> str:
        """The task's image, or else the environment's."""
        return self.task(state).docker_image or self.docker_image

    def get_sandbox_resources(self, state: State) -> dict[str, Any]:
        """What the task asks for, or else what the environment gives."""
        resources = super().get_sandbox_resources(state)
        task = self.task(state)
        resources["memory_gb"] = task.size_gb("memory") or resources["memory_gb"]
        resources["disk_size_gb"] = task.size_gb("storage") or resources["disk_size_gb"]
        return resources

    def task_files(self, state: State) -> dict[str, Any]:
        """The instruction and the task's settings; neither tests nor solution."""
        return {**super().task_files(state), "/task/task.toml": self.task(state).folder / "task.toml"}

    def agent_timeout(self, state: State) -> float | None:
        """The task's own limit."""
        return self.task(state).agent_timeout_s

    async def build_env_vars(self, state: State) -> dict[str, str]:
        """The variables of the task's world, where the task lies, and its MCP servers."""
        task = self.task(state)
        servers = servers_of(task.config, self.mcp_launch_commands)
        return {
            "HARBOR_TASK_NAME": task.name,
            "HARBOR_TASK_DIR": "/task",
            "HARBOR_INSTRUCTION_PATH": "/task/instruction.md",
            "AGENT_WORKDIR": self.workdir(state),
            **{server.variable: server.agent_url for server in servers},
            **task.world.env,
            **await super().build_env_vars(state),
        }

    async def post_sandbox_setup(self, state: State) -> None:
        """Make the task's world, then start its servers."""
        await self._make_world(state)
        await self.pre_mcp_setup(state)
        started = [s for s in servers_of(self.task(state).config, self.mcp_launch_commands) if s.command is not None]
        await asyncio.gather(*(start_server(self.machine(state), s, self.mcp_healthcheck) for s in started))

    async def pre_mcp_setup(self, state: State) -> None:
        """Override to prepare what the MCP servers need."""

    async def _make_world(self, state: State) -> None:
        task, machine = self.task(state), self.machine(state)
        await machine.exec(f"mkdir -p /logs/verifier /logs/agent {shlex.quote(self.workdir(state))}", cwd="/")
        for step in task.world.steps:
            where = f"{task.folder}/environment/Dockerfile:{step.line}"
            if step.files:
                await machine.upload_files(step.files)
                continue
            command = f"mkdir -p {shlex.quote(step.workdir)} && cd {shlex.quote(step.workdir)} && {step.command}"
            result = await machine.exec(command, cwd="/", env=step.env, timeout_s=STEP_TIMEOUT_S)
            if result.exit_code != 0:
                said = (result.stderr or result.stdout).strip()[-500:]
                raise SandboxError(f"{where}: exit code {result.exit_code} in a sandbox without a network: {said}")

    async def start_agent(self, state: State) -> None:
        """Start the agent where the task wants it."""
        state["agent_workdir"] = self.workdir(state)
        await super().start_agent(state)

    async def post_rollout(self, state: State) -> None:
        """Run the tests on what the agent left."""
        await super().post_rollout(state)
        if state.get("error") is None:
            try:
                state["harbor_reward"] = await self.compute_reward(state)
            except Exception as error:
                raise attributed(error, JudgeError, f"the tests of {self.task(state).name}") from error

    async def compute_reward(self, state: State) -> float:
        """What the tests say. Raises: JudgeError when they say nothing."""
        task = self.task(state)
        place = self.workdir(state)
        return await verified_reward(self.machine(state), task, task.world.env, place, self.python_packages)

    async def harbor_reward(self, state: State) -> float:
        """The reward that the tests wrote."""
        reward = state.get("harbor_reward")
        if reward is None:
            raise JudgeError("the tests were not run")
        return float(reward)
