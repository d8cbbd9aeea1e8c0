"""What a good rollout looks like, shown by the environment itself: for the warm-up and for tests of its reward.

Parts: `Demonstrator`, a client that plays them; `has_demonstrations`. An environment shows what is wanted of a model
in one of three ways, the first that is there: `env.demonstrate(messages, row)`, a policy that sees the conversation and
the row and returns a text or an assistant message (with tool calls, if need be); a `demonstration` column, a text or a
list of messages; an `answer`, which is the whole reply. Invariant: a demonstration is played through the environment
like any rollout, so that a wrong one is seen by its reward.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any, Protocol

from mettle.clients.base import Client
from mettle.envs.errors import EnvironmentFault
from mettle.records.messages import AssistantMessage, Messages, Response, ResponseMessage, Tool, messages_from


class Demonstrating(Protocol):
    """What is asked of an environment here; see `mettle.envs.environment.Environment`."""

    demonstrate: Any


def has_demonstrations(env: Demonstrating, row: Mapping[str, Any]) -> bool:
    """Whether the environment shows what is wanted for this row."""
    return env.demonstrate is not None or bool(row.get("demonstration") or row.get("answer"))


class Demonstrator(Client):
    """Answers as the environment demonstrates. Give it to `run_rollout` as the client."""

    base_url = ""

    def __init__(self, env: Demonstrating) -> None:
        self._env = env

    async def get_response(
        self,
        prompt: Messages,
        model: str,
        sampling_args: Mapping[str, Any] | None = None,
        tools: list[Tool] | None = None,
        *,
        state: Any = None,
        **kwargs: Any,
    ) -> Response:
        """The demonstrated next message of the rollout `state`.

        Raises: EnvironmentFault when nothing more is demonstrated for its row.
        """
        assert state is not None, "a demonstration is made for a row, which is known from the rollout's state"
        said = await self._next(prompt, state["input"], len(state["trajectory"]))
        given = said if isinstance(said, Mapping) else AssistantMessage(content=str(said))
        [message] = messages_from([given])
        calls = message.get("tool_calls")
        answer = ResponseMessage(
            content=message.get("content"),
            tool_calls=calls,
            finish_reason="tool_calls" if calls else "stop",
            is_truncated=False,
        )
        return Response(id=os.urandom(8).hex(), created=0, model=model, usage=None, message=answer)

    async def _next(self, prompt: Messages, row: Mapping[str, Any], turn: int) -> Any:
        if self._env.demonstrate is not None:
            said = self._env.demonstrate(prompt, row)
            return await said if inspect.isawaitable(said) else said
        shown = row.get("demonstration") or row.get("answer")
        own = shown if isinstance(shown, list) else [{"role": "assistant", "content": str(shown)}] if shown else []
        turns = [message for message in own if message["role"] == "assistant"]
        if turn >= len(turns):
            raise EnvironmentFault(
                f"the demonstration of example {row.get('example_id')} has {len(turns)} turns, no more"
            )
        return turns[turn]
