"""The models that a model's code asks: one prompt each, with tools of their own, many at once.

Parts: `SubModels`, the half of `RLMEnv` that asks them. Invariants: no more than `max_sub_llm_parallelism` are asked at
once; a prompt that a model cannot take is told to the code that asked, an endpoint that fails is the rollout's error.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mettle.envs.errors import OverlongPromptError, ToolCallError, attributed
from mettle.envs.signatures import maybe_await
from mettle.envs.state import State
from mettle.envs.tool_env import as_content
from mettle.envs.tool_schema import tool_of
from mettle.errors import RolloutError
from mettle.records.messages import Message, Messages, ToolMessage, UserMessage, messages_from

if TYPE_CHECKING:
    from mettle.envs.environment import Environment

    _Base = Environment
else:
    _Base = object

ANSWER_NOW = "Answer now, with what you know; there are no more tool calls."


class SubModels(_Base):
    """Asks sub-models on behalf of a rollout. The environment sets the attributes."""

    sub_model: str | None
    sub_tools: list[Callable[..., Any]]
    sub_tool_map: dict[str, Callable[..., Any]]
    sub_llm_max_turns: int
    max_sub_llm_parallelism: int

    async def llm_batch(self, state: State, prompts: Sequence[Any]) -> list[str]:
        """The answers to some prompts (texts, or lists of messages), in their order."""
        state["sub_llm_batch_count"] += 1
        state["sub_llm_max_batch_size"] = max(state["sub_llm_max_batch_size"], len(prompts))
        places = asyncio.Semaphore(max(1, self.max_sub_llm_parallelism))

        async def ask(prompt: Any) -> str:
            async with places:
                return await self._ask_sub_model(state, prompt)

        return list(await asyncio.gather(*(ask(prompt) for prompt in prompts)))

    async def _ask_sub_model(self, state: State, prompt: Any) -> str:
        messages = messages_from(prompt) if isinstance(prompt, list | tuple) else [UserMessage(content=str(prompt))]
        state["sub_llm_call_count"] += 1
        try:
            result = await self._run_sub_llm(state, state["client"], self.sub_model or state["model"], messages)
        except OverlongPromptError as error:
            return f"Error: the prompt is too long for the sub-model ({error})"
        except RolloutError as error:
            state["error"] = state.get("error") or error
            raise
        return str(result["final_content"])

    async def _run_sub_llm(self, state: State, client: Any, model: str, messages: Any) -> dict[str, Any]:
        """Ask one sub-model until it calls no more tools; `final_content` is what it said. Override to see calls."""
        conversation: Messages = messages_from(messages)
        tools = [tool_of(tool) for tool in self.sub_tools]
        for turn in range(max(1, self.sub_llm_max_turns) if tools else 1):
            response = await self.get_model_response(state, conversation, client, model, tools or [])
            self._count(state, response)
            said: Message = messages_from([{"role": "assistant", **response.message}])[0]
            calls = said.get("tool_calls") or []
            conversation = [*conversation, said]
            if not calls:
                return _result(said, turn + 1)
            conversation += [await self._sub_tool_answer(state, call) for call in calls]
        conversation = [*conversation, UserMessage(content=ANSWER_NOW)]
        response = await self.get_model_response(state, conversation, client, model, [])
        self._count(state, response)
        return _result(response.message, self.sub_llm_max_turns + 1)

    @staticmethod
    def _count(state: State, response: Any) -> None:
        usage = response.usage or {}
        state["sub_llm_total_turns"] += 1
        state["sub_llm_prompt_tokens"] += usage.get("prompt_tokens") or 0
        state["sub_llm_completion_tokens"] += usage.get("completion_tokens") or 0

    async def _sub_tool_answer(self, state: State, call: Any) -> Message:
        """What a tool says to a sub-model; what goes wrong in it is told to the sub-model."""
        state["sub_llm_total_tool_calls"] += 1
        try:
            function = self.sub_tool_map.get(call["name"])
            if function is None:
                raise KeyError(f"there is no tool {call['name']!r}; there are {sorted(self.sub_tool_map)}")
            content = as_content(await maybe_await(function, **json.loads(call["arguments"] or "{}")))
        except RolloutError as error:
            raise attributed(error, ToolCallError, call["name"]) from error
        except Exception as error:
            content = f"{type(error).__name__}: {error}"
        return ToolMessage(content=content, tool_call_id=call["id"] or "")


def _result(said: Any, num_turns: int) -> dict[str, Any]:
    return {"final_content": said.get("content") or "", "num_turns": num_turns}
