"""Environments in which the model works in a sandbox of its own, with a shell as its tool.

Parts: `SandboxEnv`, `SandboxMonitorRubric`. Invariants: each rollout has one sandbox, made in `setup_state` and deleted
after `post_rollout`, whatever became of the rollout; what a command does is told to the model, and only a sandbox that
is gone is an error.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TypedDict

from mettle.envs.decorators import cleanup
from mettle.envs.rubrics.rubric import Rubric
from mettle.envs.sandbox_mixin import SandboxCreationError, SandboxMixin, SandboxNotReadyError
from mettle.envs.sandboxes.errors import CommandTimeoutError
from mettle.envs.sandboxes.models import CreateSandboxRequest
from mettle.envs.state import State
from mettle.envs.stateful_tool_env import StatefulToolEnv
from mettle.errors import SandboxError
from mettle.records.messages import Messages

__all__ = ["SandboxCreationError", "SandboxEnv", "SandboxMonitorRubric", "SandboxNotReadyError", "SandboxState"]


class SandboxState(TypedDict):
    """What a rollout knows about its sandbox."""

    ready: bool
    ready_wait_time: float
    command_execution_times: list[float]


class SandboxMonitorRubric(Rubric):
    """Metrics `sandbox_ready_wait_time` and `sandbox_command_execution_time` (seconds; the mean over commands)."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_metric(self.sandbox_ready_wait_time)
        self.add_metric(self.sandbox_command_execution_time)

    async def sandbox_ready_wait_time(self, state: State) -> float:
        return float((state.get("sandbox_state") or {}).get("ready_wait_time", 0.0))

    async def sandbox_command_execution_time(self, state: State) -> float:
        times = (state.get("sandbox_state") or {}).get("command_execution_times") or []
        return sum(times) / len(times) if times else 0.0


class SandboxEnv(SandboxMixin, StatefulToolEnv):
    """A `StatefulToolEnv` with the tool `bash(command)` in a sandbox of the rollout's own.

    `team_id`, `advanced_configs`, `gpu_count` and the client's workers and connections are accepted as they stand; the
    embedded sandbox has this host's programs, no GPU and no network. `docker_image` is the image of backends of
    containers; the embedded one takes plain Python's and those of `sandbox.host_images`, and refuses others.
    """

    def __init__(
        self,
        sandbox_name: str = "sandbox-env",
        docker_image: str = "python:3.11-slim",
        start_command: str = "tail -f /dev/null",
        cpu_cores: int = 1,
        memory_gb: int = 2,
        disk_size_gb: int = 5,
        gpu_count: int = 0,
        timeout_minutes: int = 60,
        timeout_per_command_seconds: int = 30,
        environment_vars: dict[str, str] | None = None,
        team_id: str | None = None,
        advanced_configs: Any = None,
        labels: list[str] | None = None,
        max_retries: int = 5,
        base_delay: float = 0.5,
        backoff_factor: float = 2.0,
        max_backoff_seconds: float = 30.0,
        jitter: float = 1e-3,
        stop_errors: Sequence[type[Exception]] | None = None,
        sandbox_client_max_workers: int | None = None,
        sandbox_client_max_connections: int = 100,
        sandbox_client_max_keepalive_connections: int = 50,
        **kwargs: Any,
    ) -> None:
        super().__init__(stop_errors=[SandboxError] if stop_errors is None else stop_errors, **kwargs)
        self.init_sandbox_client(
            max_retries=max_retries,
            base_delay=base_delay,
            backoff_factor=backoff_factor,
            max_backoff_seconds=max_backoff_seconds,
            jitter=jitter,
            sandbox_client_max_workers=sandbox_client_max_workers,
            sandbox_client_max_connections=sandbox_client_max_connections,
            sandbox_client_max_keepalive_connections=sandbox_client_max_keepalive_connections,
        )
        self.sandbox_name = sandbox_name
        self.timeout_per_command_seconds = timeout_per_command_seconds
        self.sandbox_request = CreateSandboxRequest(
            name=sandbox_name,
            docker_image=docker_image,
            start_command=start_command,
            cpu_cores=cpu_cores,
            memory_gb=memory_gb,
            disk_size_gb=disk_size_gb,
            gpu_count=gpu_count,
            timeout_minutes=timeout_minutes,
            environment_vars=environment_vars,
            team_id=team_id,
            advanced_configs=advanced_configs,
            labels=labels or [],
        )
        self.add_rubric(SandboxMonitorRubric())
        self.add_tool(self.bash, args_to_skip=["sandbox_id", "sandbox_state", "working_dir"])

    def get_sandbox_request(self, state: State) -> CreateSandboxRequest:
        """What this rollout's sandbox is to be. Override to decide by the row."""
        return self.sandbox_request.model_copy(deep=True)

    async def setup_state(self, state: State, **kwargs: Any) -> State:
        """Make the rollout's sandbox."""
        prepared = await super().setup_state(state, **kwargs)
        state = state if prepared is None else prepared
        state["sandbox_state"] = SandboxState(ready=False, ready_wait_time=0.0, command_execution_times=[])
        await self.create_sandbox(state, self.get_sandbox_request(state))
        return state

    def update_tool_args(
        self, tool_name: str, tool_args: dict[str, Any], messages: Messages, state: State, **kwargs: Any
    ) -> dict[str, Any]:
        """The sandbox and the directory for `bash`."""
        if tool_name != "bash":
            return tool_args
        hidden = {"sandbox_id": state["sandbox_id"], "sandbox_state": state["sandbox_state"]}
        return {**tool_args, **hidden, "working_dir": state.get("working_dir")}

    async def bash(
        self, command: str, sandbox_id: str, sandbox_state: SandboxState, working_dir: str | None = None
    ) -> str:
        """Run `command` in a shell. Files and background processes stay for the next command.

        Args:
            command: The command.
        """
        await self._wait_for_sandbox_ready(sandbox_state, sandbox_id)
        limit_s = self.timeout_per_command_seconds
        started = time.perf_counter()
        try:
            ended = await self.sandbox_client.execute_command(
                sandbox_id, command, working_dir=working_dir, timeout=limit_s
            )
        except CommandTimeoutError:
            sandbox_state["command_execution_times"].append(float(limit_s))
            return f"Error: Command timed out after {limit_s}s"
        except Exception as error:
            raise SandboxError(f"the sandbox of a command is gone: {error}") from error
        sandbox_state["command_execution_times"].append(time.perf_counter() - started)
        return joined_output(ended.stdout, ended.stderr) or "(no output)"

    async def _wait_for_sandbox_ready(self, sandbox_state: SandboxState, sandbox_id: str) -> None:
        if sandbox_state["ready"]:
            return
        started = time.perf_counter()
        try:
            await self.sandbox_client.wait_for_creation(sandbox_id)
        except Exception as error:
            raise SandboxNotReadyError(f"sandbox {sandbox_id} did not become ready: {error}") from error
        sandbox_state["ready"] = True
        sandbox_state["ready_wait_time"] = time.perf_counter() - started

    async def post_rollout(self, state: State) -> None:
        """The last look at the sandbox before it is deleted: run tests, keep results in the state. Override."""

    @cleanup
    async def destroy_sandbox(self, state: State) -> None:
        """Let `post_rollout` look at the sandbox, and delete it in any case."""
        try:
            if state.get("sandbox_id") is not None:
                await self.post_rollout(state)
        finally:
            if state.get("sandbox_id") is not None:
                await self.delete_sandbox(state["sandbox_id"])


def joined_output(stdout: str, stderr: str) -> str:
    """What a command has said, as the model reads it."""
    said, complained = stdout.strip(), stderr.strip()
    return "\n".join([*([said] if said else []), *([f"stderr:\n{complained}"] if complained else [])])
