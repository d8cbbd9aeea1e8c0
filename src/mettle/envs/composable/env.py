"""A `CliAgentEnv` whose tasks are a `TaskSet` and whose agent is a `Harness`.

Parts: `ComposableEnv`. Invariants: the tasks' setup runs before the agent is installed, and their evaluation while the
sandbox is there; an agent that cannot be installed is the rollout's error, with what the script has said.
"""

from __future__ import annotations

import json
import posixpath
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mettle.envs.cli_agent_env import CliAgentEnv
from mettle.envs.composable.harness import Harness
from mettle.envs.composable.tasks import SandboxSpec, TaskSet
from mettle.envs.errors import SandboxError
from mettle.envs.state import State
from mettle.envs.tool_env import ToolMonitorRubric
from mettle.errors import UserError

DEFAULT_TEST_TIMEOUT_S = 900
MAX_METRICS_BYTES = 1 << 20
READ_LIMIT_S = 60
ERROR_EXCERPT = 500


class ComposableEnv(CliAgentEnv):
    """Runs the agent of `harness` on the tasks of `taskset`; further keywords are those of `CliAgentEnv`.

    The embedded sandbox has this host's programs and no network: what `install_script` downloads has to be installed
    on this host instead.
    """

    def __init__(self, taskset: TaskSet, harness: Harness, **kwargs: Any) -> None:
        kwargs.setdefault("dataset", taskset.get_dataset())
        kwargs.setdefault("rubric", taskset.get_rubric())
        super().__init__(run_command=harness.run_command, **kwargs)
        self.taskset, self.harness = taskset, harness
        if harness.tool_names:
            self.add_rubric(ToolMonitorRubric(harness.tool_names))

    # Before the agent runs

    async def setup_state(self, state: State) -> State | None:
        """The task's folder becomes the agent's."""
        state["agent_workdir"] = self.taskset.get_workdir(_info(state))
        return await super().setup_state(state)

    async def get_docker_image(self, state: State) -> str:
        """The image that the task, or else the harness, asks for."""
        spec = self._spec(state)
        return spec.image if spec else await super().get_docker_image(state)

    def get_sandbox_resources(self, state: State) -> dict[str, Any]:
        """What the task, or else the harness, asks for."""
        spec = self._spec(state)
        if spec is None:
            return super().get_sandbox_resources(state)
        names = ("cpu_cores", "memory_gb", "disk_size_gb", "gpu_count", "gpu_type", "timeout_minutes")
        return {name: getattr(spec, name) for name in names}

    def _spec(self, state: State) -> SandboxSpec | None:
        return self.taskset.get_sandbox_spec(_info(state)) or self.harness.sandbox_spec

    async def build_env_vars(self, state: State) -> dict[str, str]:
        """The environment's variables, then the harness's, then the tasks'.

        Raises: UserError for a variable of the proxy's.
        """
        added = {**(self.harness.environment_vars or {}), **(self.taskset.get_env_vars() or {})}
        taken = sorted((self.PROTECTED_ENV_VARS | {"AGENT_WORKDIR"}) & added.keys())
        if taken:
            raise UserError(f"{taken[0]} is set by the environment itself; take it out of the task set or the harness")
        workdir = {"AGENT_WORKDIR": str(state["agent_workdir"])}
        return {**await super().build_env_vars(state), **added, **workdir}

    async def post_sandbox_setup(self, state: State) -> None:
        """Prepare the task, write what the agent is told, install the agent."""
        spec = self._spec(state)
        state["sandbox_client"] = self.sandbox_client
        state["test_timeout"] = spec.timeout_minutes * 60 if spec else DEFAULT_TEST_TIMEOUT_S
        await self._make_folders(state)
        await self.taskset.setup(state)
        harness, sandbox_id = self.harness, state["sandbox_id"]
        instruction = self.taskset.get_instruction(_info(state))
        if instruction.strip():
            await self.upload_content(sandbox_id, instruction, harness.instruction_path)
        if harness.system_prompt:
            await self.upload_content(sandbox_id, harness.system_prompt, harness.system_prompt_path)
        await self._upload_folders(state)
        if harness.install_script:
            ended = await self.sandbox_client.execute_command(
                sandbox_id, harness.install_script, timeout=harness.install_timeout
            )
            if ended.exit_code != 0:
                said = f"{ended.stdout or ''}{ended.stderr or ''}".strip()[-ERROR_EXCERPT:]
                raise SandboxError(f"the agent could not be installed (exit code {ended.exit_code}): {said}")

    async def _make_folders(self, state: State) -> None:
        paths = (self.harness.instruction_path, self.harness.system_prompt_path)
        folders = [*(posixpath.dirname(path) for path in paths), state["agent_workdir"]]
        made = await self.machine(state).exec(["mkdir", "-p", *folders], timeout_s=READ_LIMIT_S)
        if made.exit_code != 0:
            raise SandboxError(f"cannot make the agent's folders: {made.stderr.strip()}")

    async def _upload_folders(self, state: State) -> None:
        places = self.harness.get_effective_upload_dir_mapping() or {}
        given = dict(self.taskset.get_upload_dirs() or {})
        if self.harness.get_upload_dirs is not None:
            given |= self.harness.get_upload_dirs() or {}
        for name, folder in given.items():
            if name in places:
                await self.machine(state).upload(places[name], Path(str(folder)))

    # When it has ended

    async def post_rollout(self, state: State) -> None:
        """Keep the agent's log and metrics, and let the tasks evaluate."""
        if self.harness.log_path:
            read = await self.machine(state).exec(["cat", self.harness.log_path], timeout_s=READ_LIMIT_S)
            state["agent_logs"] = read.stdout if read.exit_code == 0 else ""
        if self.harness.metrics_path:
            state.update(await self._metrics(state, self.harness.metrics_path))
        await self.taskset.evaluate(state)
        await super().post_rollout(state)

    async def _metrics(self, state: State, pattern: str) -> dict[str, Any]:
        """The numbers of the newest file that the pattern finds; none when there is none or it is no JSON."""
        harness = self.harness
        found = pattern.replace("{workdir}", shlex.quote(str(state["agent_workdir"])))
        command = f'cat "$(ls -t {found} | head -n 1)"'
        read = await self.machine(state).exec(command, timeout_s=READ_LIMIT_S, max_output_bytes=MAX_METRICS_BYTES)
        try:
            said = json.loads(read.stdout)
            values = said[harness.metrics_key] if harness.metrics_key else said
            names = values.keys() if harness.metrics_keys is None else harness.metrics_keys
            return {f"{harness.metrics_prefix}{name}": values[name] for name in names if name in values}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self.logger.warning("no metrics of the agent", extra={"pattern": pattern, "error": str(error)})
            return {}


def _info(state: State) -> Mapping[str, Any]:
    return state.get("info") or {}
