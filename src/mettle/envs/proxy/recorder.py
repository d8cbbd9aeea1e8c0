"""Calls of one rollout to trajectory steps, within the environment's limits.

Parts: `AgentHarness` (what is asked of the environment), `Recorder`. Invariants: the run's own sampling arguments win
over the agent's, because a sample must be drawn as the trainer believes it was; a stop condition is asked before each
call, and once one fires every further call is refused; a failed model call ends the rollout with its error, whereas a
call that the agent got wrong, or that no longer fits the context, is the agent's to react to.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Literal, Protocol

from mettle.envs.errors import EnvironmentFault, ModelError, attributed
from mettle.envs.proxy.calls import AgentCall
from mettle.envs.proxy.memory import Memory
from mettle.envs.proxy.sessions import AgentSession, refused_over
from mettle.envs.state import State
from mettle.envs.timing import TimeSpan
from mettle.errors import OverlongError, RolloutError
from mettle.processes.clock import steady_time
from mettle.records.messages import Messages, Response, ResponseTokens, Tool
from mettle.web.problems import HttpError

logger = logging.getLogger(__name__)

AgentSampling = Literal["ignore", "limits", "all"]
AGENT_SAMPLING: tuple[AgentSampling, ...] = ("ignore", "limits", "all")
LIMIT_KEYS = ("max_tokens", "max_completion_tokens")


class AgentHarness(Protocol):
    """What is asked of an environment whose turns come from an agent."""

    max_turns: int
    max_total_completion_tokens: int
    agent_sampling: AgentSampling

    async def is_completed(self, state: State) -> bool: ...
    async def normalize_intercepted_messages(self, intercepted_messages: Any) -> Messages: ...
    async def get_model_response(
        self,
        state: State,
        prompt: Messages,
        *,
        tool_defs: list[Tool] | None = None,
        sampling_args: Mapping[str, Any] | None = None,
    ) -> Response: ...
    async def add_model_response(self, state: State, prompt_messages: Messages, response: Response) -> None: ...


class Recorder:
    """Answers the calls of one rollout and keeps them in its state."""

    def __init__(self, harness: AgentHarness, state: State) -> None:
        self.session: AgentSession | None = None
        self.ended = asyncio.Event()
        self.is_context_full = False
        self.num_refused_over = 0
        self._harness = harness
        self._state = state
        self._memory = Memory()
        self._steps: dict[int, Any] = {}
        self._ignored: set[str] = set()

    async def answer(self, call: AgentCall) -> Response:
        """Sample an answer to a call, if the rollout still has room for one."""
        await self._admit()
        state = self._state
        call.messages = self._memory.recognise(await self._harness.normalize_intercepted_messages(call.messages))
        span = TimeSpan(steady_time())
        try:
            tools, arguments = self._request(call)
            response = await self._harness.get_model_response(
                state, call.messages, tool_defs=tools, sampling_args=arguments
            )
        except OverlongError as error:
            self.is_context_full = True
            message = f"prompt is too long: {error}"
            raise HttpError(400, message, code="context_length_exceeded") from error
        except Exception as error:
            raise self._failed(attributed(error, ModelError, "model call")) from error
        finally:
            span.end = steady_time()
            state["timing"].model.spans.append(span)
        self.is_context_full = False
        return response

    async def keep(self, call: AgentCall, response: Response) -> None:
        """Make a step of an answer that is about to be handed over."""
        trajectory = self._state["trajectory"]
        num_before = len(trajectory)
        before = self._memory.step_before(call.messages)
        try:
            await self._harness.add_model_response(self._state, call.messages, response)
        except Exception as error:
            raise self._failed(attributed(error, EnvironmentFault, "add_model_response")) from error
        step = trajectory[-1] if len(trajectory) > num_before else None
        said = response.message.to_assistant()
        if step is not None:
            said = step["completion"][0]
            step["extras"].update(tool_defs=self._tools(call) or None, dialect=call.dialect.NAME)
            self._steps[id(response)] = step
            _follow(step["tokens"], before)
        self._memory.remember(call.messages, said, step)

    def drop(self, call: AgentCall, response: Response) -> None:
        """Take back a step whose answer never arrived."""
        step = self._steps.pop(id(response), None)
        trajectory = self._state["trajectory"]
        self._state["trajectory"][:] = [kept for kept in trajectory if kept is not step]

    def count_tokens(self, call: AgentCall) -> int | None:
        """Tokens of the prompt, where the client renders prompts itself."""
        render = getattr(self._state["client"], "prompt_ids", None)
        if render is None:
            return None
        try:
            ids, _ = render(self._memory.recognise(call.messages), self._tools(call) or None, self._state)
        except Exception as error:
            raise HttpError(400, f"the prompt cannot be rendered: {error}") from error
        return len(ids)

    async def _admit(self) -> None:
        """Let a call in, or refuse it because the rollout has had what it may have."""
        state = self._state
        try:
            is_over = await self._harness.is_completed(state)
        except Exception as error:
            raise self._failed(attributed(error, EnvironmentFault, "stop condition")) from error
        num_others = self.session.num_open - 1 if self.session is not None else 0
        if is_over:
            self.ended.set()
            raise self._over(str(state.get("stop_condition") or "stopped"))
        if 0 < self._harness.max_turns <= len(state["trajectory"]) + num_others:
            raise self._over("max_turns_reached")

    def _over(self, reason: str) -> HttpError:
        self.num_refused_over += 1
        return refused_over(reason)

    def _failed(self, error: RolloutError) -> HttpError:
        self._state["error"] = self._state.get("error") or error
        self.ended.set()
        return HttpError(502, f"the model call failed: {error}", code=type(error).__name__)

    def _tools(self, call: AgentCall) -> list[Tool]:
        is_off = call.forwarded.get("tool_choice") == "none" and "tool_choice" not in self._forwardable()
        return [] if is_off else call.tools

    def _forwardable(self) -> frozenset[str]:
        fields: frozenset[str] = getattr(self._state["client"], "FORWARDED", frozenset())
        return fields

    def _request(self, call: AgentCall) -> tuple[list[Tool], dict[str, Any]]:
        """The tools that the model is offered, and the sampling arguments that it is sampled with."""
        own: dict[str, Any] = {key: value for key, value in self._state["sampling_args"].items() if value is not None}
        mode = self._harness.agent_sampling
        asked = {} if mode == "ignore" else dict(call.sampling)
        limit = asked.pop("max_tokens", None)
        arguments = {**(asked if mode == "all" else {key: asked[key] for key in asked if key == "stop"}), **own}
        limits = [value for value in (limit, self._tokens_left()) if value is not None]
        if limits:
            key = next((key for key in LIMIT_KEYS if key in arguments), LIMIT_KEYS[0])
            arguments[key] = min([*limits, *([arguments[key]] if key in arguments else [])])
        forwardable = self._forwardable()
        arguments.update({key: value for key, value in call.forwarded.items() if key in forwardable})
        self._note_ignored(set(call.forwarded) - forwardable)
        return self._tools(call), arguments

    def _tokens_left(self) -> int | None:
        budget = self._harness.max_total_completion_tokens
        return max(1, budget - self._state["usage"]["output_tokens"]) if budget > 0 else None

    def _note_ignored(self, names: set[str]) -> None:
        for name in sorted(names - self._ignored):
            logger.info("the agent's %s cannot be passed on to this endpoint", name)
        self._ignored |= names
        if self._ignored:
            self._state["agent_fields_ignored"] = sorted(self._ignored)


def _follow(tokens: Any, before: Any) -> None:
    """Let a step's ids share those of the step that it continues, which need not be the latest one."""
    earlier = before["tokens"] if before is not None else None
    if not isinstance(tokens, ResponseTokens) or not isinstance(earlier, ResponseTokens):
        return
    if tokens.previous is not earlier and not earlier.was_cut:
        tokens.follow(earlier)
