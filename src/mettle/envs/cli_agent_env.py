"""An environment whose harness is somebody else's program: a command in a sandbox that takes a proxy for a model's API.

Parts: `CliAgentEnv`, `AgentError`, `SandboxTimeouts`, `CliAgentMonitorRubric`. The agent finds its task in
`/task/instruction.md` and `/task/prompt.json`, and the API at `OPENAI_BASE_URL` and `ANTHROPIC_BASE_URL`; each of its
calls is one step of the rollout. Invariants: the proxy is the only thing that the agent can reach; its secret and its
machine end with the rollout, however it ends; an agent that fails is an error of its rollout, one that was told to stop
is not; a rollout in which the model said nothing has no reward.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from mettle.envs.decorators import cleanup, stop, teardown
from mettle.envs.errors import InfraError, OverlongPromptError, SandboxError, attributed
from mettle.envs.multiturn_env import MultiTurnEnv
from mettle.envs.proxy.agent import AgentAtWork
from mettle.envs.proxy.machines import AgentMachine
from mettle.envs.proxy.monitor import CliAgentMonitorRubric
from mettle.envs.proxy.recorder import AGENT_SAMPLING, AgentSampling, Recorder
from mettle.envs.sandbox_mixin import SandboxCreationError, SandboxMixin, SandboxTimeouts
from mettle.envs.sandboxes.models import CreateSandboxRequest
from mettle.envs.state import State
from mettle.errors import RolloutError, UserError
from mettle.processes.clock import steady_time
from mettle.records.messages import Messages, Response, messages_from

if TYPE_CHECKING:
    from mettle.envs.proxy.server import ProxyListener, ProxyServer

logger = logging.getLogger(__name__)

TASK_FOLDER = "/task"
UNSAFE_TASK_FOLDER = "task"  # without isolation, absolute paths are the host's own
DEFAULT_PORT = 8765
ERROR_EXCERPT = 2000
MAX_ARTIFACT_BYTES = 1 << 20


class AgentError(InfraError):
    """The agent program failed."""

    kind = "environment"


@dataclass
class _Proxy:
    """The proxy of one event loop, and where it listens on this host, if it does."""

    server: ProxyServer
    listening: asyncio.Future[ProxyListener] | None = None
    host_port: int | None = None


class CliAgentEnv(SandboxMixin, MultiTurnEnv):
    """Runs `run_command` in a sandbox for each rollout.

    `start_command`, `cpu_cores`, `team_id`, `advanced_configs` and the `sandbox_client_*` settings belong to a hosted
    sandbox and change nothing in the embedded one. `docker_image` is the image of backends of containers; the embedded
    one has the programs of this host, and takes plain Python's images and those of `sandbox.host_images` alone.
    `max_retries`, and the delays after it, are for making the sandbox. Mettle's own settings come last, from `files`
    on; docs/how-to/train-an-agent-program.md tells what each is for.
    """

    PROTECTED_ENV_VARS = frozenset(
        {
            "ANTHROPIC_API_KEY",
            "ANTHROPIC_BASE_URL",
            "HTTPX_TIMEOUT",
            "OPENAI_API_KEY",
            "OPENAI_BASE_URL",
            "OPENAI_MODEL",
            "OPENAI_REQUEST_TIMEOUT",
            "OPENAI_TIMEOUT",
        }
    )

    def __init__(
        self,
        run_command: str | Sequence[str],
        interception_port: int | None = None,
        interception_url: str | None = None,
        max_turns: int = -1,
        poll_interval: float = 5.0,
        docker_image: str = "python:3.11-slim",
        start_command: str = "tail -f /dev/null",
        cpu_cores: int = 1,
        memory_gb: float = 2,
        disk_size_gb: float = 5,
        gpu_count: int = 0,
        environment_vars: Mapping[str, str] | None = None,
        team_id: str | None = None,
        advanced_configs: Any = None,
        labels: Sequence[str] | None = None,
        max_retries: int = 5,
        base_delay: float = 0.5,
        backoff_factor: float = 2.0,
        max_backoff_seconds: float = 30.0,
        jitter: float = 1e-3,
        sandbox_client_max_workers: int | None = None,
        sandbox_client_max_connections: int = 1000,
        sandbox_client_max_keepalive_connections: int = 200,
        sandbox_wait_for_creation_max_attempts: int = 120,
        sandbox_creations_per_minute: float | None = 128,
        timeouts: SandboxTimeouts | None = None,
        keep_sandbox_for_scoring: bool = False,
        *,
        files: Mapping[str, Any] | None = None,
        artifacts: Sequence[str] = (),
        working_dir: str = "/work",
        python_packages: Sequence[str] = (),
        wrap_up_seconds: float = 10.0,
        agent_sampling: AgentSampling = "limits",
        sandbox_backend: str = "zygote",
        **kwargs: Any,
    ) -> None:
        super().__init__(max_turns=max_turns, message_type="chat", **kwargs)
        if gpu_count:
            raise UserError(f"gpu_count is {gpu_count}, and the embedded sandbox has no GPU; leave it at 0")
        if agent_sampling not in AGENT_SAMPLING:
            raise UserError(f"agent_sampling is {agent_sampling!r}; it is one of {', '.join(AGENT_SAMPLING)}")
        self.run_command = run_command
        self.interception_port = interception_port
        self.interception_url = interception_url
        self.poll_interval = poll_interval
        self.docker_image, self.start_command = docker_image, start_command
        self.cpu_cores, self.memory_gb, self.disk_size_gb, self.gpu_count = (
            cpu_cores,
            memory_gb,
            disk_size_gb,
            gpu_count,
        )
        self.environment_vars = dict(environment_vars or {})
        self.team_id, self.advanced_configs = team_id, advanced_configs
        self.labels = list(labels or ())
        self.init_sandbox_client(
            max_retries,
            base_delay,
            backoff_factor,
            max_backoff_seconds,
            jitter,
            sandbox_client_max_workers,
            sandbox_client_max_connections,
            sandbox_client_max_keepalive_connections,
            sandbox_wait_for_creation_max_attempts,
            sandbox_creations_per_minute,
            timeouts,
        )
        self.keep_sandbox_for_scoring = keep_sandbox_for_scoring
        self.files = dict(files or {})
        self.artifacts = list(artifacts)
        self.working_dir = working_dir
        self.python_packages = tuple(python_packages)
        self.wrap_up_seconds = wrap_up_seconds
        self.agent_sampling: AgentSampling = agent_sampling
        self.sandbox_backend = sandbox_backend
        self._agents: dict[str, AgentAtWork] = {}
        self._proxies: dict[asyncio.AbstractEventLoop, _Proxy] = {}
        self.add_rubric(CliAgentMonitorRubric(self._delete_sandbox))

    # A rollout begins

    async def setup_state(self, state: State) -> State | None:
        """Make the sandbox, open the way to the proxy, start the agent."""
        changed = await super().setup_state(state)
        state = changed if changed is not None else state
        rollout_id = f"rollout_{os.urandom(4).hex()}"
        state["rollout_id"], state["agent_completed"] = rollout_id, False
        recorder = Recorder(self, state)
        proxy = await self._proxy()
        session = proxy.server.open(recorder, state["model"])
        recorder.session = session
        agent = self._agents[rollout_id] = AgentAtWork(proxy.server, recorder, session)
        port = proxy.host_port or self.interception_port or DEFAULT_PORT
        state["interception_base_url"] = f"{(self.interception_url or f'http://127.0.0.1:{port}').rstrip('/')}/v1"
        agent.machine = await self._open_sandbox(state)
        if proxy.host_port is None:
            await agent.open_door(port)
        try:
            await self.post_sandbox_setup(state)
        except Exception as error:
            raise attributed(error, SandboxError, "post_sandbox_setup") from error
        await self.start_agent(state)
        return state

    async def _open_sandbox(self, state: State) -> AgentMachine:
        """The rollout's sandbox, with its task in it."""
        resources = self.get_sandbox_resources(state)
        request = CreateSandboxRequest(
            name=state["rollout_id"],
            docker_image=await self.get_docker_image(state),
            start_command=self.start_command,
            environment_vars=await self._variables(state),
            labels=self.labels,
            team_id=self.team_id,
            advanced_configs=self.advanced_configs,
            python_packages=self.python_packages,
            backend=self.sandbox_backend,
            **resources,
        )
        try:
            sandbox = await self.with_retry(self.sandbox_client.create)(request)
        except Exception as error:
            raise SandboxCreationError(f"no sandbox could be made: {error}") from error
        self.register_sandbox(sandbox.id)
        state["sandbox_id"], state["sandbox_isolation"] = sandbox.id, sandbox.isolation
        machine = await AgentMachine.of(sandbox.id)
        await machine.upload_files({**self.task_files(state), **self.files})
        return machine

    async def _proxy(self) -> _Proxy:
        """The proxy of this event loop. It listens on this host only for agents without a network of their own."""
        loop = asyncio.get_running_loop()
        for closed in [known for known in self._proxies if known.is_closed()]:
            del self._proxies[closed]
        if loop not in self._proxies:
            from mettle.envs.proxy.server import ProxyServer

            name = urlsplit(self.interception_url or "").hostname
            self._proxies[loop] = proxy = _Proxy(ProxyServer(names=[name] if name else []))
            if self.interception_url is not None or self.sandbox_backend == "unsafe":
                proxy.listening = asyncio.ensure_future(proxy.server.listen(port=self.interception_port or 0))
        proxy = self._proxies[loop]
        if proxy.listening is not None:
            proxy.host_port = (await asyncio.shield(proxy.listening)).port
        return proxy

    def task_files(self, state: State) -> dict[str, Any]:
        """What tells the agent its task: the last thing that the user says, and the whole prompt."""
        prompt = messages_from(state["prompt"])
        asked = [message.text for message in prompt if message["role"] in ("user", "text")]
        return {
            f"{self.task_folder}/instruction.md": (asked[-1] if asked else "").encode("utf-8", "replace"),
            f"{self.task_folder}/prompt.json": json.dumps(prompt).encode(),
        }

    @property
    def task_folder(self) -> str:
        """Where the agent finds its task."""
        return UNSAFE_TASK_FOLDER if self.sandbox_backend == "unsafe" else TASK_FOLDER

    async def get_docker_image(self, state: State) -> str:
        """The image that a hosted sandbox would use."""
        return self.docker_image

    def get_sandbox_resources(self, state: State) -> dict[str, Any]:
        """What this rollout's sandbox may use. Override for resources by task."""
        return {
            "cpu_cores": self.cpu_cores,
            "memory_gb": self.memory_gb,
            "disk_size_gb": self.disk_size_gb,
            "gpu_count": self.gpu_count,
            "gpu_type": None,
            "timeout_minutes": self.compute_sandbox_timeout_minutes(),
        }

    async def build_env_vars(self, state: State) -> dict[str, str]:
        """The agent's environment variables. Override to add some; those of the proxy cannot be replaced."""
        url = str(state["interception_base_url"])
        secret = self._agent(state).session.secret
        return {
            **self.environment_vars,
            "OPENAI_BASE_URL": url,
            "OPENAI_API_KEY": secret,
            "OPENAI_MODEL": str(state["model"]),
            "OPENAI_TIMEOUT": "3600",
            "OPENAI_REQUEST_TIMEOUT": "3600",
            "HTTPX_TIMEOUT": "3600",
            "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": secret,
            "NO_PROXY": "127.0.0.1,localhost",
            "METTLE_TASK_DIR": self.task_folder,
        }

    async def post_sandbox_setup(self, state: State) -> None:
        """Override to prepare the sandbox before the agent starts."""

    async def _variables(self, state: State) -> dict[str, str]:
        """What `build_env_vars` says, with the proxy's own variables as they must be."""
        given = await CliAgentEnv.build_env_vars(self, state)
        return {**await self.build_env_vars(state), **{name: given[name] for name in self.PROTECTED_ENV_VARS}}

    async def start_agent(self, state: State) -> None:
        """Start the agent and watch it."""
        agent = self._agent(state)
        cwd = state.get("agent_workdir") or self.working_dir
        await agent.start(self.run_command, await self._variables(state), cwd, self.agent_timeout(state))
        state["agent_start_time"] = steady_time()
        agent.watcher = asyncio.create_task(self.wait_for_completion(state), name=f"agent of {state['rollout_id']}")

    def agent_timeout(self, state: State) -> float | None:
        """Seconds that the agent has. Override for limits by task; `timeout_seconds` holds besides."""
        return None

    async def wait_for_completion(self, state: State) -> None:
        """Follow the agent until it has ended, and judge how it ended."""
        agent = self._agent(state)
        assert agent.job is not None, "the agent was started"
        try:
            while (result := await agent.job.wait(self.poll_interval)) is None:
                if await self.check_agent_completed(state):
                    break
            if result is not None:
                state["agent_exit_code"] = result.exit_code
                state["agent_stdout"], state["agent_stderr"] = result.stdout, result.stderr
                state["sandbox_oom"] = result.is_out_of_memory
                if result.is_timed_out:
                    state["timed_out"] = True
                    state.stop("timeout_reached")
                else:
                    self._judge_exit(state, agent)
        except Exception as error:
            state["error"] = state.get("error") or attributed(error, SandboxError, "following the agent")
        finally:
            state["agent_completed"] = True

    def _judge_exit(self, state: State, agent: AgentAtWork) -> None:
        if agent.recorder.is_context_full:
            state["prompt_too_long"] = state["is_truncated"] = True
            state.stop("prompt_too_long")
            return
        was_refused = agent.recorder.ended.is_set() or agent.recorder.num_refused_over > 0
        if state["agent_exit_code"] == 0 or was_refused or state.get("error") is not None:
            return
        num_turns = len(state["trajectory"])
        when = f"after {num_turns} model calls" if num_turns else "before any model call"
        why = (
            "out of memory" if state["sandbox_oom"] else (state["agent_stderr"] or state["agent_stdout"] or "").strip()
        )
        state["error"] = AgentError(
            f"the agent ended with exit code {state['agent_exit_code']} {when} "
            f"(sandbox {state['sandbox_id']}): {why[-ERROR_EXCERPT:]}"
        )

    async def check_agent_completed(self, state: State) -> bool:
        """Asked between two looks at the process: override for an agent that says otherwise that it is done."""
        return False

    # The agent's calls

    async def normalize_intercepted_messages(self, intercepted_messages: Any) -> Messages:
        """Override to change what the agent sent before the model sees it."""
        return messages_from(intercepted_messages)

    async def normalize_response(self, response: Response) -> Response:
        """Override to change what is kept of an answer."""
        return response

    async def add_model_response(self, state: State, prompt_messages: Messages, response: Response) -> None:
        """Make a step of a call; the first one tells what the agent made of the prompt."""
        if not state["trajectory"]:
            state["prompt"] = prompt_messages
        await super().add_model_response(state, prompt_messages, await self.normalize_response(response))

    async def get_prompt_messages(self, state: State) -> Messages:
        """Wait until the agent is done; its calls are answered meanwhile."""
        await self._agent(state).over(self.wrap_up_seconds)
        state["final_env_response"] = []
        return []

    async def env_response(self, messages: Messages, state: State, **kwargs: Any) -> Messages:
        """Nothing: the agent leads the conversation."""
        return []

    @stop
    async def agent_completed(self, state: State) -> bool:
        """The agent has ended."""
        return bool(state.get("agent_completed", False))

    # A rollout ends

    @cleanup(priority=90)
    async def render_conversation(self, state: State) -> None:
        """Set `completion` to what followed the prompt in the latest conversation that began with it."""
        trajectory, prompt = state["trajectory"], state["prompt"]
        for step in reversed(trajectory):
            if step["prompt"][: len(prompt)] == prompt:
                state["completion"] = [*step["prompt"][len(prompt) :], *step["completion"]]
                return

    @cleanup(priority=10)
    async def cleanup_interception_context(self, state: State) -> None:
        """Revoke the secret and end the agent; what it had written is kept."""
        agent = self._agents.get(state.get("rollout_id", ""))
        if agent is None:
            return
        written = await agent.stop(str(state.get("stop_condition") or "ended"))
        if written is not None:
            state["agent_stdout"], state["agent_stderr"] = written
        session = agent.session
        state["agent_calls"] = {
            "answered": session.num_answered,
            "repeated": session.num_repeated,
            "refused": session.num_refused,
            "refusals": session.refusals,
        }
        if agent.machine is not None and not agent.machine.is_alive:
            state["sandbox_timeout"] = True

    @cleanup
    async def destroy_sandbox(self, state: State) -> None:
        """Run `post_rollout` on a rollout that ended, then delete the sandbox (or keep it for scoring)."""
        agent = self._agents.get(state.get("rollout_id", ""))
        is_ended = bool(state.get("is_completed")) and agent is not None and agent.machine is not None
        try:
            if is_ended:
                await self._collect(state)
                await self.post_rollout(state)
        except Exception as error:
            state["error"] = state.get("error") or attributed(error, SandboxError, "post_rollout")
        finally:
            if agent is not None and not state["trajectory"]:
                state["error"] = state.get("error") or self._unanswered(state, agent)
            if not (self.keep_sandbox_for_scoring and is_ended):
                await self._delete_sandbox(state)

    @staticmethod
    def _unanswered(state: State, agent: AgentAtWork) -> RolloutError:
        """What a program left is not the model's doing where the model has said nothing."""
        if agent.recorder.is_context_full:
            return OverlongPromptError("the agent's first prompt does not fit the model's context")
        return AgentError(
            f"the agent ended ({state.get('stop_condition') or 'cut off'}) without one answer of the model,"
            f" so nothing it left is the model's work (sandbox {state.get('sandbox_id')})"
        )

    async def post_rollout(self, state: State) -> None:
        """Override to look at the sandbox before it is deleted, and leave in `state` what a reward function wants."""
        names = [call["name"] for step in state["trajectory"] for call in step["completion"][0].get("tool_calls") or ()]
        found = {
            "turns": len(state["trajectory"]),
            "tools": dict(Counter(names)),
            "stop": state.get("stop_condition"),
            "exit_code": state.get("agent_exit_code"),
        }
        self.logger.info("agent finished", extra={"rollout": state["rollout_id"], **found})

    def machine(self, state: State) -> AgentMachine:
        """The rollout's sandbox: `exec`, `upload`, `download`."""
        machine = self._agent(state).machine
        if machine is None:
            raise SandboxError("this rollout's sandbox was never made")
        return machine

    async def _collect(self, state: State) -> None:
        """Read the files that rewards are given for; one that is not there is None."""
        found: dict[str, str | None] = {}
        for path in self.artifacts:
            try:
                data = await self.machine(state).download(path, max_bytes=MAX_ARTIFACT_BYTES)
                found[path] = data.decode("utf-8", "replace")
            except OSError as error:
                self.logger.debug("no artifact", extra={"path": path, "error": str(error)})
                found[path] = None
        state["artifacts"] = found

    async def _delete_sandbox(self, state: State) -> None:
        agent = self._agents.pop(state.get("rollout_id", ""), None)
        if agent is not None and state.get("sandbox_id"):
            await self.delete_sandbox(state["sandbox_id"])

    def _agent(self, state: State) -> AgentAtWork:
        agent = self._agents.get(state.get("rollout_id", ""))
        if agent is None:
            raise SandboxError("this rollout has no sandbox (any more)")
        return agent

    @teardown
    async def teardown_resources(self) -> None:
        """Stop the proxy; every sandbox that is left is deleted by the mixin."""
        proxy = self._proxies.pop(asyncio.get_running_loop(), None)
        if proxy is not None:
            await proxy.server.close()


__all__ = ["AgentError", "CliAgentEnv", "CliAgentMonitorRubric", "SandboxTimeouts"]
