"""Models that are scripts: what they say is known, so what they earn can be checked.

Parts: `Policy` (what a script may be), `ScriptedClient`. A policy is a text said in every turn, a list of turns, or a
function of the conversation; a turn is text or the fields of an assistant message (`{"tool_calls": [...]}`).
Invariant: a script says its last turn again when it is asked for more, and ends its rollout with `EndlessRollout` when
it is asked for too many, so nothing runs for ever.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mettle.clients.base import Client
from mettle.envs.errors import ModelError
from mettle.records.messages import Response, ResponseMessage, Usage

Turn = str | Mapping[str, Any]
Policy = Turn | Sequence[Turn] | Callable[[Any], Any]

SCRIPT_KEY = "_script"
"""Where the row of a group's member says which of the scripts it follows."""
MAX_CALLS = 64


class EndlessRollout(ModelError):
    """The environment went on asking."""


class ScriptedClient(Client):
    """Answers each model call with what the policy says next; `policies` are those of a group's members."""

    def __init__(self, *policies: Policy) -> None:
        self.policies = policies
        self._num_calls = [0] * len(policies)

    async def get_response(
        self, prompt: Any, model: str, sampling_args: Any = None, tools: Any = None, **extra: Any
    ) -> Response:
        """What the policy says to `prompt`."""
        await asyncio.sleep(0)  # a rollout's time limit gets its turn even though nothing is waited for
        state = extra.get("state")
        source = state.get("input") if state is not None else None
        index = int((source or {}).get(SCRIPT_KEY, 0))
        fields = await self._fields(index, prompt)
        message = ResponseMessage(**{"content": None, "finish_reason": "stop", "is_truncated": False, **fields})
        usage = Usage(prompt_tokens=0, completion_tokens=0, total_tokens=0)
        return Response(id="scripted", created=0, model=model, usage=usage, message=message)

    async def _fields(self, index: int, prompt: Any) -> dict[str, Any]:
        policy, number = self.policies[index], self._num_calls[index]
        self._num_calls[index] += 1
        if number >= MAX_CALLS:
            raise EndlessRollout(f"no end within {MAX_CALLS} turns")
        said: Any = policy
        if callable(policy):
            said = policy(prompt)
            if asyncio.iscoroutine(said):
                said = await said
        elif isinstance(policy, Sequence) and not isinstance(policy, str):
            said = policy[min(number, len(policy) - 1)] if policy else ""
        return _message_fields(said, number)


def _message_fields(said: Any, number: int) -> dict[str, Any]:
    if isinstance(said, str):
        return {"content": said}
    fields = dict(said)
    fields.pop("role", None)
    calls = fields.get("tool_calls")
    if calls:
        fields["tool_calls"] = [_tool_call(call, f"call_{number}_{at}") for at, call in enumerate(calls)]
    return fields


def _tool_call(call: Any, call_id: str) -> Any:
    """A call may be given as `{"name": ..., "arguments": {...}}`."""
    if not isinstance(call, Mapping) or "function" in call:
        return call
    arguments = call.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": call.get("id") or call_id, "name": call["name"], "arguments": text}
