"""Environments behind OpenEnv servers: episodes of actions, or of tool calls.

Parts: `OpenEnvEnv`. A row is a seed; the prompt is what `prompt_renderer` makes of the first observation. Invariants: a
rollout has a session of its own; a server that is full is waited for; what the server cannot read is told to the model;
an action schema with `tool_name` and `arguments` means tools, any other means actions as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import aiohttp

from mettle.envs.decorators import cleanup, teardown
from mettle.envs.episodes import EpisodeEnv, EpisodicSumRubric, split_seeds
from mettle.envs.guests import guest
from mettle.envs.rubrics.rubric import Rubric
from mettle.envs.signatures import signature_of
from mettle.envs.state import State
from mettle.envs.tool_content import content_of
from mettle.errors import EnvironmentFault, InfraError, UserError
from mettle.records.messages import Messages, Tool, ToolMessage, UserMessage, message_from, messages_from
from mettle_openenv.server import ProjectServer, checked_project
from mettle_openenv.session import Refused, ServerFull, Session, StepOutcome

FULL_POLL_S = 0.5
MAX_RESULT_CHARS = 100_000
PENDING_PROMPT = "(the server's first observation)"
PromptRenderer = Callable[..., Any]


def as_json(observation: Any, context: str, action_schema: Mapping[str, Any] | None) -> list[dict[str, str]]:
    """The observation as JSON, at the beginning with the schema that an action has to fit."""
    text = json.dumps(observation, ensure_ascii=False)
    if context == "reset" and action_schema:
        text += f"\nAnswer with one JSON object of this schema: {json.dumps(action_schema, ensure_ascii=False)}"
    return [{"role": "user", "content": text}]


class OpenEnvEnv(EpisodeEnv):
    """Episodes on the server at `base_url`, or on that of the project in the folder `openenv_project`.

    A project's code is run only with `run_project="process"`: as a child process, not isolated from this machine.
    `prompt_renderer(observation, context="reset" | "step", action_schema, contract, seed)` takes those of its arguments
    that it names and returns messages. `capacity_wait_s` is how long a rollout waits for a server that is full.
    """

    def __init__(
        self,
        openenv_project: str | Path | None = None,
        num_train_examples: int = 100,
        num_eval_examples: int = 50,
        seed: int = 0,
        prompt_renderer: PromptRenderer | None = None,
        max_turns: int = -1,
        rubric: Rubric | None = None,
        base_url: str | None = None,
        run_project: str | None = None,
        startup_timeout_seconds: float = 30,
        message_timeout_s: float = 60.0,
        capacity_wait_s: float = 600.0,
        **kwargs: Any,
    ) -> None:
        if base_url is not None and openenv_project is not None:
            raise UserError("give base_url for a running server or openenv_project for a folder, not both")
        if base_url is not None and not base_url.startswith(("http://", "https://")):
            raise UserError(f"base_url begins with http:// or https://; it is {base_url!r}")
        self.base_url = base_url
        self.openenv_project: Path | None = None
        if base_url is None:
            self.openenv_project = _project(openenv_project, run_project, Path(sys._getframe(1).f_code.co_filename))
        self.num_train_examples = num_train_examples
        self.num_eval_examples = num_eval_examples
        self.seed = seed
        self.prompt_renderer = prompt_renderer or as_json
        self.startup_timeout_seconds = startup_timeout_seconds
        self.message_timeout_s = message_timeout_s
        self.capacity_wait_s = capacity_wait_s
        self._places: WeakKeyDictionary[asyncio.AbstractEventLoop, _Place] = WeakKeyDictionary()
        self._server: ProjectServer | None = None
        self._action_schema: dict[str, Any] | None = None
        self._tools: list[Tool] | None = None
        rows: dict[str, Any] = {**split_seeds(num_train_examples, num_eval_examples, seed, _row)}
        super().__init__(**{**rows, **kwargs}, max_turns=max_turns, rubric=rubric or EpisodicSumRubric())

    # The server

    @property
    def _place(self) -> _Place:
        return self._places.setdefault(asyncio.get_running_loop(), _Place())

    async def _address(self) -> str:
        if self.base_url is not None:
            return self.base_url
        assert self.openenv_project is not None, "there is an address or a project"
        async with self._place.lock:
            if self._server is None or not self._server.is_running:
                await self._stop_server()
                server = ProjectServer(self.openenv_project, startup_timeout_s=self.startup_timeout_seconds)
                await server.start()
                self._server = server
            return self._server.base_url

    async def _stop_server(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.stop()

    async def _schema(self, address: str) -> dict[str, Any]:
        if self._action_schema is None:
            limit = aiohttp.ClientTimeout(total=self.message_timeout_s)
            try:
                async with (
                    aiohttp.ClientSession(trust_env=False, timeout=limit) as http,
                    http.get(f"{address.rstrip('/')}/schema", raise_for_status=True) as answer,
                ):
                    described = await answer.json()
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                what = f"{type(error).__name__}: {error}"
                raise InfraError(f"the OpenEnv server at {address} does not tell its schema: {what}") from error
            schema = described.get("action") if isinstance(described, dict) else None
            self._action_schema = schema if isinstance(schema, dict) else {}
        return self._action_schema

    # One episode

    async def setup_state(self, state: State) -> State | None:
        """Begin the episode of the row's seed, where the server is full once it has a place."""
        address = await self._address()
        schema = await self._schema(address)
        contract = "mcp" if _has_tools(schema) else "gym"
        info = state.get("info")
        seed = int(info.get("seed", 0)) if isinstance(info, Mapping) else 0
        outcome = await self._begun(state, address, seed)
        session: Session = state["openenv_session"]
        if contract == "mcp":
            if self._tools is None:
                self._tools = [_tool(raw) for raw in await session.list_tools()]
            state["tool_defs"] = self._tools
        state["openenv_contract"], state["openenv_done"] = contract, outcome.is_done
        state["episode_done"] = outcome.is_done
        rendered = self._render(outcome.observation, "reset", contract, seed)
        prompt = [message_from(message) for message in state["prompt"]]
        if prompt and prompt[0]["role"] == "system" and rendered[0]["role"] != "system":
            rendered = [prompt[0], *rendered]
        state["prompt"] = rendered
        return state

    async def _begun(self, state: State, address: str, seed: int) -> StepOutcome:
        deadline = time.monotonic() + self.capacity_wait_s
        while True:
            session = state["openenv_session"] = Session(address, self.message_timeout_s)
            await session.open()
            try:
                return await session.reset(seed=seed)
            except ServerFull:
                await session.close()
                if time.monotonic() > deadline:
                    raise
                await self._place.wait_for_end()

    async def act(self, messages: Messages, state: State) -> tuple[Any, bool]:
        """Carry out the model's action, or its tool calls."""
        if state["openenv_contract"] == "mcp":
            return await self._call_tools(messages, state)
        step = state["trajectory"][-1]
        try:
            outcome = await state["openenv_session"].step(self._parse_action(messages[-1].text))
        except Refused as error:
            step["reward"] = 0.0
            return [UserMessage(content=f"Error: {error}")], False
        step["reward"] = outcome.reward
        state["openenv_done"] = outcome.is_done
        return self._render(outcome.observation, "step", "gym", None), outcome.is_done

    async def _call_tools(self, messages: Messages, state: State) -> tuple[Any, bool]:
        answers: Messages = []
        rewards: list[float] = []
        for call in messages[-1].get("tool_calls") or []:
            content, outcome = await self._tool_answer(call, state["openenv_session"])
            answers.append(ToolMessage(content=content, tool_call_id=call["id"] or ""))
            if outcome is not None:
                rewards += [outcome.reward] if outcome.reward is not None else []
                state["openenv_done"] = state["openenv_done"] or outcome.is_done
        state["trajectory"][-1]["reward"] = sum(rewards) if rewards else 0.0
        return answers, state["openenv_done"] or not answers

    async def _tool_answer(self, call: Mapping[str, Any], session: Session) -> tuple[Any, StepOutcome | None]:
        try:
            arguments = json.loads(call["arguments"] or "{}")
            if not isinstance(arguments, dict):
                raise ValueError(f"the arguments of {call['name']} are no JSON object")
            action = {"type": "call_tool", "tool_name": call["name"], "arguments": arguments}
            outcome = await session.step(action)
        except (ValueError, Refused) as error:
            return f"Error: {error}", None
        return _tool_content(outcome.observation), outcome

    def _parse_action(self, text: str) -> dict[str, Any]:
        """The JSON object in the model's text; bare text where the schema wants one text field."""
        bare = text.strip().removeprefix("```json").removeprefix("```").removesuffix("```").strip()
        try:
            action = json.loads(bare)
        except ValueError:
            action = None
        if isinstance(action, dict):
            return action
        field = _text_field(self._action_schema or {})
        if field is None:
            raise Refused("an action is one JSON object that fits the schema")
        return {field: text.strip()}

    def _render(self, observation: Any, context: str, contract: str, seed: int | None) -> Messages:
        offered = {"context": context, "action_schema": self._action_schema, "contract": contract, "seed": seed}
        renderer = self.prompt_renderer
        with guest(f"prompt_renderer of a {context}"):
            rendered = messages_from(renderer(observation, **signature_of(renderer).pick(offered)))
        if not rendered or any(message.get("content") is None for message in rendered):
            raise EnvironmentFault(f"prompt_renderer made no messages with content of a {context}")
        return rendered

    # Ends

    @cleanup
    async def cleanup_openenv(self, state: State) -> None:
        """End the episode on the server."""
        session: Session | None = state.pop("openenv_session", None)
        if session is not None:
            await session.close()
            self._place.ended()

    @teardown
    async def teardown_server(self) -> None:
        """Stop the project's server."""
        await self._stop_server()


class _Place:
    """The rollouts of one event loop that wait for the server: to come up, or to have room."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self._end = asyncio.Event()

    async def wait_for_end(self) -> None:
        """Wait until an episode ends here, and no longer than a moment: others may use the server too."""
        self._end.clear()
        try:
            async with asyncio.timeout(FULL_POLL_S):
                await self._end.wait()
        except TimeoutError:
            pass

    def ended(self) -> None:
        """An episode has ended."""
        self._end.set()


def _row(seed: int) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": PENDING_PROMPT}], "info": {"seed": seed}}


def _project(given: str | Path | None, run_project: str | None, caller: Path) -> Path:
    folder = checked_project(Path(given) if given is not None else caller.parent / "proj")
    if run_project != "process":
        raise UserError(
            f"openenv_project runs the code in {folder} on this machine, with your rights: allow it with "
            'run_project="process", or start the server elsewhere and give base_url'
        )
    return folder


def _has_tools(schema: Mapping[str, Any]) -> bool:
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and {"tool_name", "arguments"} <= set(properties):
        return True
    text = json.dumps(schema)
    return '"list_tools"' in text or '"call_tool"' in text


def _text_field(schema: Mapping[str, Any]) -> str | None:
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return None
    required = schema.get("required")
    names = list(required) if isinstance(required, list) and len(required) == 1 else list(properties)
    is_text = len(names) == 1 and properties.get(names[0], {}).get("type") == "string"
    return names[0] if is_text else None


def _tool(raw: Mapping[str, Any]) -> Tool:
    schema = raw.get("inputSchema") or raw.get("input_schema") or {"type": "object", "properties": {}}
    return Tool(name=raw["name"], description=raw.get("description") or "", parameters=schema)


def _tool_content(observation: Any) -> Any:
    if not isinstance(observation, Mapping):
        return json.dumps(observation)
    error = observation.get("error")
    if error:
        return f"Error: {error.get('message', error) if isinstance(error, Mapping) else error}"
    result = observation.get("result", observation)
    if isinstance(result, Mapping) and isinstance(result.get("content"), list):
        return content_of(dict(result), MAX_RESULT_CHARS)
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
