"""Environments in which the model sees its context only through code: recursive language models (arXiv 2512.24601).

Parts: `RLMEnv`, `RLMCodeExecutionTimeout`. The model has one tool, a Python (`call_python_repl`) or a shell
(`call_bash_repl`); its code reads the context from files, calls the root tools, asks sub-models with `llm_batch`, and
sets the answer. Invariants: its code runs in the rollout's sandbox, and tools, here; the rollout ends with the answer
that the code called ready, else with the best it has.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal

from mettle.envs.decorators import cleanup, teardown
from mettle.envs.errors import SandboxError
from mettle.envs.proxy.machines import AgentMachine
from mettle.envs.python_env import PythonEnded, PythonEnv
from mettle.envs.rlm.bridge import FunctionBridge, arguments_of
from mettle.envs.rlm.context_files import MAX_BYTES, ContextFiles
from mettle.envs.rlm.metrics import RLMMonitorRubric, new_counts, set_metrics
from mettle.envs.rlm.prompts import scaffold, with_scaffold
from mettle.envs.rlm.repl import (
    GUEST_FOLDER,
    READ_ANSWER,
    CodeAnswer,
    bash_command,
    guest_files,
    python_answer,
    python_prelude,
)
from mettle.envs.rlm.settings import ready_settings
from mettle.envs.rlm.sub_models import SubModels
from mettle.envs.sandbox_env import joined_output
from mettle.envs.sandboxes.models import CreateSandboxRequest
from mettle.envs.sandboxes.shared import shared_machines
from mettle.envs.signatures import maybe_await
from mettle.envs.state import State
from mettle.errors import UserError
from mettle.records.messages import Messages

Tools = Sequence[Callable[..., Any]]
WORKING_DIR = "/work"
READ_LIMIT_S = 10.0
TOLD_OF_TIMEOUT = "Error: Command timed out"


class RLMCodeExecutionTimeout(SandboxError):
    """The model's code took too long, and `abort_on_code_timeout` is set."""


class _Rollout:
    """What belongs to one rollout and is no data."""

    def __init__(self, files: ContextFiles, bridge: FunctionBridge) -> None:
        self.files, self.bridge = files, bridge
        self.machine: AgentMachine | None = None


class _Executor:
    """`env._executor`, by which published environments run commands beside the model's."""

    def __init__(self, env: RLMEnv) -> None:
        self._env = env

    async def _execute_sandbox_command(
        self,
        sandbox_id: str,
        command: str,
        timeout: float | None = None,  # noqa: ASYNC109 (the name that they call it by)
    ) -> Any:
        limit_s = self._env.code_execution_timeout if timeout is None else timeout
        return await self._env.sandbox_client.execute_command(sandbox_id, command, timeout=int(limit_s))


class RLMEnv(SubModels, PythonEnv):
    """A model that works on its context with code.

    `tools` are for the model's code and for sub-models, `root_tools` for its code alone, `sub_tools` for sub-models.
    The context of a row is text or JSON under `context_key` of its `info`, or a folder under `context_dir_key`. Code
    runs in a sandbox whatever `execution_backend` says. Further keywords: the sandbox's as `SandboxEnv` has them, with
    or without `sandbox_` in front, and the names of earlier releases (`settings`).
    """

    def __init__(
        self,
        tools: Tools | None = None,
        root_tools: Tools | None = None,
        sub_tools: Tools | None = None,
        sub_model: str | None = None,
        repl_language: Literal["bash", "python"] = "bash",
        max_turns: int = 50,
        sub_llm_max_turns: int = 5,
        max_sub_llm_parallelism: int = 5,
        max_output_length: int = 8192,
        max_startup_wait_seconds: int = 120,
        code_execution_timeout: int = 120,
        abort_on_code_timeout: bool = False,
        pip_install_packages: str = "",
        context_key: str = "context",
        context_dir_key: str = "context_dir",
        filesystem_copy_max_bytes: int | None = MAX_BYTES,
        retain_filesystem_after_rollout: bool = False,
        enable_sub_llms: bool = True,
        execution_backend: Literal["local", "sandbox"] = "local",
        **kwargs: Any,
    ) -> None:
        if repl_language not in ("bash", "python"):
            raise UserError(f"repl_language is {repl_language!r}; it is bash or python")
        settings, sandbox = ready_settings(kwargs)
        super().__init__(
            pip_install_packages=pip_install_packages,
            max_startup_wait_seconds=max_startup_wait_seconds,
            timeout_per_command_seconds=code_execution_timeout,
            **{"max_turns": max_turns, **sandbox, **settings},
        )
        self.remove_tool(self.python)
        for name, value in sandbox.items():
            setattr(self, f"sandbox_{name}", value)
        self.repl_language, self.sub_model, self.execution_backend = repl_language, sub_model, execution_backend
        self.sub_llm_max_turns = kwargs.get("sub_tool_max_turns", sub_llm_max_turns)
        self.max_sub_llm_parallelism, self.max_output_length = max_sub_llm_parallelism, max_output_length
        self.code_execution_timeout, self.abort_on_code_timeout = code_execution_timeout, abort_on_code_timeout
        self.context_key, self.context_dir_key = context_key, context_dir_key
        self.filesystem_copy_max_bytes = filesystem_copy_max_bytes
        self.retain_filesystem_after_rollout = retain_filesystem_after_rollout
        self.enable_sub_llms = enable_sub_llms
        self._set_tools(list(tools or ()), list(root_tools or ()), list(sub_tools or ()))
        self._executor = _Executor(self)
        self._root_tool_context_var: ContextVar[dict[str, Any] | None] = ContextVar("root_tool_context", default=None)
        self._rollouts: dict[str, _Rollout] = {}
        self.add_tool(self._repl, args_to_skip=["state"])
        self.add_rubric(RLMMonitorRubric())

    def _set_tools(self, shared: list[Any], root: list[Any], sub: list[Any]) -> None:
        self.shared_tools = shared
        self.root_tools, self.sub_tools = [*shared, *root], [*shared, *sub]
        self.root_tool_map = {tool.__name__: tool for tool in self.root_tools}
        self.sub_tool_map = {tool.__name__: tool for tool in self.sub_tools}
        self.root_tool_doc_funcs = list(self.root_tools)
        self.root_tool_names = list(self.root_tool_map)
        self.root_oai_tools: list[Any] = []

    @property
    def _repl(self) -> Callable[..., Any]:
        return self.call_python_repl if self.repl_language == "python" else self.call_bash_repl

    # A rollout begins

    async def setup_state(self, state: State, **kwargs: Any) -> State:
        """Stage the context, make the sandbox, and open the bridge into it."""
        files = await asyncio.to_thread(
            ContextFiles.stage,
            state.get("info") or {},
            self.context_key,
            self.context_dir_key,
            self.filesystem_copy_max_bytes,
        )
        rollout = _Rollout(files, FunctionBridge(partial(self._answer_call, state)))
        self._rollouts[state["trajectory_id"]] = rollout
        state.update(new_counts())
        state["rollout_id"] = f"rlm_{state['trajectory_id'][:8]}"
        state["rlm_rollout_dir"], state["rlm_fs_root"] = str(files.rollout_dir), str(files.root)
        state["rlm_fs_has_data"], state["rlm_fs_metadata"] = files.has_data, dict(files.metadata)
        state["retain_filesystem_after_rollout"] = self.retain_filesystem_after_rollout
        state = await super().setup_state(state, **kwargs)
        await self._open_bridge(state, rollout)
        await self.on_sandbox_ready(state, state["sandbox_id"])
        text = scaffold(
            self.repl_language,
            self.root_tool_map,
            files.named,
            self.max_output_length,
            has_sub_models=self.enable_sub_llms,
        )
        state["raw_prompt"], state["prompt"] = state["prompt"], with_scaffold(state["prompt"], text)
        return state

    async def create_sandbox(self, state: Any, request: CreateSandboxRequest) -> str:
        """A sandbox with the packages that were asked for, whoever made the request."""
        request.python_packages = request.python_packages or self.python_packages
        return await super().create_sandbox(state, request)

    async def _open_bridge(self, state: State, rollout: _Rollout) -> None:
        await self._wait_for_sandbox_ready(state["sandbox_state"], state["sandbox_id"])
        machine = rollout.machine = await AgentMachine.of(state["sandbox_id"])
        port = await rollout.bridge.serve(await machine.listen(0))
        await machine.upload_files(guest_files(port, rollout.bridge.secret, self._function_names()))
        await machine.exec(["sh", "-c", f"chmod +x {GUEST_FOLDER}/bin/* 2>/dev/null; true"])
        if rollout.files.has_data:
            await machine.upload(WORKING_DIR, rollout.files.root)

    def _function_names(self) -> list[str]:
        return [*(["llm_batch"] if self.enable_sub_llms else []), *self.root_tool_map]

    async def on_sandbox_ready(self, state: State, sandbox_id: str) -> None:
        """Override to prepare the sandbox before the model's first turn."""

    # The model's code

    def update_tool_args(
        self, tool_name: str, tool_args: dict[str, Any], messages: Messages, state: State, **kwargs: Any
    ) -> dict[str, Any]:
        """The rollout for the model's one tool."""
        return {**tool_args, "state": state}

    async def call_python_repl(self, code: str, state: State) -> str:
        """Run Python code whose variables stay; what it prints, and the value of a last expression, is shown.

        Args:
            code: The code.
        """
        where = (state["sandbox_id"], state["sandbox_state"], state["python_state"])
        started = time.perf_counter()
        if not state["python_state"]["ready"]:
            await self.python(python_prelude(self._function_names()), *where)
        said = await self.python(code, *where)
        self._note_answer(state, await self._python_answer(state))
        return self._told(state, said, started)

    async def call_bash_repl(self, code: str, state: State) -> str:
        """Run commands in a bash whose directory and exported variables stay; what they print is shown.

        Args:
            code: The commands.
        """
        machine = self._rollouts[state["trajectory_id"]].machine
        assert machine is not None, "the sandbox was made in setup_state"
        started = time.perf_counter()
        ended = await machine.exec(bash_command(code), timeout_s=self.code_execution_timeout, cwd=WORKING_DIR)
        said = joined_output(ended.stdout, ended.stderr)
        if ended.is_timed_out:
            said = f"{TOLD_OF_TIMEOUT} after {self.code_execution_timeout}s\n{said}".strip()
        self._note_answer(state, await self._bash_answer(machine))
        return self._told(state, said or "(no output)", started)

    def _told(self, state: State, said: str, started: float) -> str:
        state["repl_call_count"] += 1
        state["repl_total_time_seconds"] += time.perf_counter() - started
        if self.abort_on_code_timeout and said.startswith(TOLD_OF_TIMEOUT):
            raise RLMCodeExecutionTimeout(f"the model's code took more than {self.code_execution_timeout} s")
        if len(said) > self.max_output_length:
            said = f"{said[: self.max_output_length]}\n[... {len(said) - self.max_output_length} characters not shown]"
        return said

    async def _python_answer(self, state: State) -> CodeAnswer | None:
        home = shared_machines()
        if not state["python_state"]["ready"]:
            return None
        asked = self._ask_python(home, state["sandbox_id"], state["python_state"], READ_ANSWER, READ_LIMIT_S)
        try:
            reply = await home.run(asked)
        except PythonEnded:
            state["python_state"]["ready"] = False
            return None
        return python_answer((reply.answer or {}).get("result"))

    @staticmethod
    async def _bash_answer(machine: AgentMachine) -> CodeAnswer | None:
        try:
            ready = await machine.download(f"{GUEST_FOLDER}/ready", max_bytes=100)
            content = await machine.download(f"{GUEST_FOLDER}/content", max_bytes=MAX_BYTES)
        except OSError:
            return None
        is_ready = ready.decode("utf-8", "replace").strip().lower() in ("1", "true", "yes")
        return CodeAnswer(is_ready, content.decode("utf-8", "replace"))

    @staticmethod
    def _note_answer(state: State, answer: CodeAnswer | None) -> None:
        if answer is not None:
            state["rlm_content"] = answer.content
            if answer.is_ready:
                state["final_answer"] = answer.content

    async def _answer_call(
        self, state: State, name: str, args: list[Any], kwargs: dict[str, Any], is_text: bool
    ) -> Any:
        """A call that the model's code makes through the bridge."""
        function = self.root_tool_map.get(name)
        if function is None and name == "llm_batch" and self.enable_sub_llms:
            prompts = kwargs.get("prompts", args[0] if len(args) == 1 and isinstance(args[0], list) else args)
            return await self.llm_batch(state, [prompts] if isinstance(prompts, str) else list(prompts))
        if function is None:
            raise KeyError(f"there is no function {name!r}; there are {self._function_names()}")
        state["root_tool_call_count"] += 1
        token = self._root_tool_context_var.set({"state": state})
        try:
            return await maybe_await(function, **arguments_of(function, args, kwargs, is_text=is_text))
        finally:
            self._root_tool_context_var.reset(token)

    async def get_prompt_messages(self, state: State) -> Messages:
        """The conversation so far; with an answer that is ready, there is no further call of the model."""
        messages = await super().get_prompt_messages(state)
        if "final_answer" in state and state["trajectory"]:
            last = state["trajectory"][-1]
            state["final_env_response"] = messages[len(last["prompt"]) + len(last["completion"]) :]
        return messages

    # A rollout ends

    @cleanup(priority=50)
    async def finish_recursion(self, state: State) -> None:
        """Settle the answer and the metrics, close the bridge, keep or remove the files."""
        rollout = self._rollouts.pop(state["trajectory_id"], None)
        if rollout is None:
            return
        await rollout.bridge.close()
        set_metrics(state)
        if "final_answer" not in state:
            said = [step["completion"][-1].get("content") for step in state["trajectory"] if step["completion"]]
            state["final_answer"] = state.get("rlm_content") or (str(said[-1] or "") if said else "")
        if not self.retain_filesystem_after_rollout:
            await asyncio.to_thread(rollout.files.remove)
        elif rollout.machine is not None and rollout.machine.is_alive:
            await rollout.files.take_over(rollout.machine, WORKING_DIR)

    @teardown
    async def close_bridges(self) -> None:
        """Those of rollouts that never ended."""
        for rollout in self._rollouts.values():
            await rollout.bridge.close()
            rollout.files.remove()
        self._rollouts.clear()


__all__ = ["RLMCodeExecutionTimeout", "RLMEnv", "RLMMonitorRubric"]
