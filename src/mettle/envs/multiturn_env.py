"""Conversations of several turns: the model speaks, the environment answers, until a stop condition fires.

Parts: `MultiTurnEnv`. A kind of environment defines `env_response`, and `setup_state` where it needs more state.
Invariants: stop conditions are asked before each model call; a step stores the messages it saw and only the tokens that
it added; an error ends its own rollout with `state["error"]`, attributed to the boundary that it crossed.
"""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, final

from mettle.envs.decorators import cleanup, stop
from mettle.envs.environment import Environment
from mettle.envs.errors import EnvironmentFault, attributed
from mettle.envs.legacy.parts import rollout_call_of_parts
from mettle.envs.legacy.responses import as_response
from mettle.envs.state import State, TrajectoryStep
from mettle.envs.timing import TimeSpan
from mettle.errors import OverlongError
from mettle.records.messages import Messages, Response, ResponseTokens, messages_from


class MultiTurnEnv(Environment):
    """At most `max_turns` model calls (-1: no limit), within `timeout_seconds` for the whole rollout."""

    def __init__(self, max_turns: int = -1, timeout_seconds: float | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.max_turns = max_turns
        self.timeout_seconds = timeout_seconds

    async def setup_state(self, state: State) -> State | None:
        """Prepare a rollout; may return another state."""
        return state

    @abstractmethod
    async def env_response(self, messages: Messages, state: State, **kwargs: Any) -> Any:
        """The environment's messages after the model's turn. Setting `state["final_env_response"]` ends the rollout."""

    @stop(priority=100)
    async def has_error(self, state: State) -> bool:
        """Something failed."""
        return state.get("error") is not None

    @stop
    async def prompt_too_long(self, state: State) -> bool:
        """The conversation no longer fits the model's context."""
        return bool(state.get("prompt_too_long", False))

    @stop
    async def max_turns_reached(self, state: State) -> bool:
        """All turns are used up."""
        return 0 < self.max_turns <= len(state["trajectory"])

    @stop
    async def max_total_completion_tokens_reached(self, state: State) -> bool:
        """All tokens are used up."""
        return bool(0 < self.max_total_completion_tokens <= state["usage"]["output_tokens"])

    @stop
    async def has_final_env_response(self, state: State) -> bool:
        """The environment has said its last word."""
        return state.get("final_env_response") is not None

    async def get_prompt_messages(self, state: State) -> Messages:
        """What the model sees next: the prompt, then always the conversation so far and the environment's answer."""
        if not state["trajectory"]:
            prompt: Messages = state["prompt"]
            return prompt
        last = state["trajectory"][-1]
        conversation = [*last["prompt"], *last["completion"]]
        span = TimeSpan(time.time())
        try:
            said = await self.env_response(conversation, state)
        finally:
            span.end = time.time()
            state["timing"].env.spans.append(span)
        if isinstance(said, tuple):
            said, changed = said
            if changed is not state:
                state.update(changed)
        return [*conversation, *messages_from(said)]

    async def add_trajectory_step(self, state: State, trajectory_step: TrajectoryStep) -> None:
        """Keep a step. Override to add rewards or extras."""
        state["trajectory"].append(trajectory_step)

    async def add_model_response(self, state: State, prompt_messages: Messages, response: Response) -> None:
        """Make a step of a model call."""
        message = response.message
        tokens = message.tokens
        if isinstance(tokens, ResponseTokens):
            if self.max_seq_len is not None:
                tokens.cut(self.max_seq_len)
            last = state["trajectory"][-1]["tokens"] if state["trajectory"] else None
            if isinstance(last, ResponseTokens):
                tokens.follow(last)
        is_cut = isinstance(tokens, ResponseTokens) and tokens.was_cut
        step = TrajectoryStep(
            prompt=prompt_messages,
            completion=[message.to_assistant()],
            response=response,
            tokens=tokens,
            reward=None,
            advantage=None,
            is_truncated=bool(message.is_truncated) or is_cut,
            trajectory_id=state["trajectory_id"],
            extras={},
        )
        _count(state, response)
        await self.add_trajectory_step(state, step)

    @rollout_call_of_parts
    async def rollout(
        self, input: Mapping[str, Any], client: Any, model: str, sampling_args: Mapping[str, Any] | None = None
    ) -> State:
        """One rollout: setup, then turns until something stops it, then cleanup."""
        state = await self.init_state(input, client, model, sampling_args)
        try:
            if self.timeout_seconds is None:
                state = await self._run(state)
            else:
                state = await self._run_within(state, self.timeout_seconds)
        finally:
            state["timing"].generation.end = time.time()
            await self.clean_up(state)
        return state

    async def _run_within(self, state: State, timeout_seconds: float) -> State:
        try:
            async with asyncio.timeout(timeout_seconds) as limit:
                return await self._run(state)
        except TimeoutError:
            if not limit.expired():
                raise
        state["timed_out"] = True
        state.stop("timeout_reached")
        return state

    async def _run(self, state: State) -> State:
        timing = state["timing"]
        timing.setup.start = timing.generation.start = time.time()
        try:
            changed = await self.setup_state(state)
            if changed is not None and changed is not state:
                state.update(changed)
        except Exception as error:
            state["error"] = attributed(error, EnvironmentFault, "setup_state")
        timing.setup.end = time.time()
        while not await self._is_over(state):
            await self._take_turn(state)
        return state

    async def _is_over(self, state: State) -> bool:
        try:
            done = await self.is_completed(state)
        except Exception as error:
            state["error"] = state.get("error") or attributed(error, EnvironmentFault, "stop condition")
            state.stop("has_error")
            done = True
        if done:
            state["is_completed"] = True
            state["is_truncated"] = state["is_truncated"] or any(step["is_truncated"] for step in state["trajectory"])
        return bool(done)

    async def _take_turn(self, state: State) -> None:
        try:
            prompt = await self.get_prompt_messages(state)
        except OverlongError:
            state["prompt_too_long"] = state["is_truncated"] = True
            return
        except Exception as error:
            state["error"] = attributed(error, EnvironmentFault, "env_response")
            return
        if state.get("final_env_response") is not None:
            return
        span = TimeSpan(time.time())
        try:
            response = as_response(await self.get_model_response(state, prompt))
            span.end = time.time()
            await self.add_model_response(state, prompt, response)
        except OverlongError:
            state["prompt_too_long"] = state["is_truncated"] = True
        except Exception as error:
            state["error"] = attributed(error, EnvironmentFault, "turn")
        finally:
            span.end = span.end or time.time()
            state["timing"].model.spans.append(span)

    @final
    @cleanup(priority=100)
    async def render_state(self, state: State) -> None:
        """Set `completion`: everything that came after the prompt."""
        if not state["trajectory"]:
            state["completion"] = messages_from(state.get("final_env_response"))
            return
        last = state["trajectory"][-1]
        conversation = [*last["prompt"], *last["completion"]]
        state["completion"] = [
            *conversation[len(state["prompt"]) :],
            *messages_from(state.get("final_env_response") or None),
        ]


def _count(state: State, response: Response) -> None:
    usage = response.usage
    if usage is not None:
        counted = state["usage"]
        counted["input_tokens"] += usage.prompt_tokens or 0
        counted["output_tokens"] += usage.completion_tokens or 0
