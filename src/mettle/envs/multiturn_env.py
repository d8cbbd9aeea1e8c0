"""Conversations of several turns: the model speaks, the environment answers, until a stop condition fires.

Parts: `MultiTurnEnv`, `MultiTurnMonitorRubric` (the metric `num_turns`). A kind of environment defines `env_response`,
and `setup_state` where it needs more state.
Invariants: stop conditions are asked before each model call; a step stores the messages it saw and only the tokens that
it added; an error ends its own rollout with `state["error"]`, attributed to the boundary that it crossed.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, final

from mettle.envs.context import ContextPolicy
from mettle.envs.decorators import cleanup, stop
from mettle.envs.environment import Environment
from mettle.envs.errors import EnvironmentFault, attributed
from mettle.envs.limits import NO_LIMIT, within
from mettle.envs.pacing import pacer
from mettle.envs.rubrics.rubric import Rubric
from mettle.envs.state import State, TrajectoryStep
from mettle.envs.timing import TimeSpan
from mettle.errors import OverlongError
from mettle.processes.clock import steady_time
from mettle.records.messages import Messages, Response, ResponseTokens, messages_from


class MultiTurnMonitorRubric(Rubric):
    """The metric `num_turns`."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_metric(num_turns)


def num_turns(state: State) -> float:
    """How often the model was called."""
    return float(len(state["trajectory"]))


class MultiTurnEnv(Environment):
    """At most `max_turns` model calls (-1: no limit), within `timeout_seconds` for the whole rollout.

    A rollout that runs out of `timeout_seconds` keeps its turns and is scored; one whose setup takes longer than
    `setup_timeout_seconds`, or whose turn (the environment's answer and the model's) takes longer than
    `turn_timeout_seconds`, has failed. A turn samples at most `max_turn_completion_tokens`. `context` decides what of a
    long conversation the model sees. None, everywhere: no limit.
    """

    def __init__(
        self,
        max_turns: int = -1,
        timeout_seconds: float | None = None,
        *,
        setup_timeout_seconds: float | None = None,
        turn_timeout_seconds: float | None = None,
        max_turn_completion_tokens: int | None = None,
        context: ContextPolicy | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.max_turns = max_turns
        self.timeout_seconds = timeout_seconds
        self.setup_timeout_seconds = setup_timeout_seconds
        self.turn_timeout_seconds = turn_timeout_seconds
        self.max_turn_completion_tokens = max_turn_completion_tokens
        self.context = context
        self.add_rubric(MultiTurnMonitorRubric())

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
        return bool(0 < self.max_total_completion_tokens <= self._usage_tracker(state).usage["output_tokens"])

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
        span = TimeSpan(steady_time())
        try:
            said = await self.env_response(conversation, state)
        finally:
            span.end = steady_time()
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
        self.increment_state_usage_from_response(state, response)
        await self.add_trajectory_step(state, step)

    async def rollout(
        self, input: Mapping[str, Any], client: Any, model: str, sampling_args: Mapping[str, Any] | None = None
    ) -> State:
        """One rollout: setup, then turns until something stops it, then cleanup."""
        state = await self.init_state(input, client, model, sampling_args)
        try:
            async with asyncio.timeout(self.timeout_seconds) as limit:
                await self._set_up(state)
                while not await self._is_over(state):
                    await self._take_turn(state)
        except TimeoutError:
            if not limit.expired():
                raise
            await self.mark_timed_out(state)
        finally:
            state["timing"].generation.end = steady_time()
            await self.clean_up(state)
        return state

    async def mark_timed_out(self, state: State) -> None:
        """The rollout has used up its time; what it has said so far counts."""
        state["timed_out"] = True
        state.stop("timeout_reached")

    async def _set_up(self, state: State) -> None:
        timing = state["timing"]
        timing.setup.start = timing.generation.start = steady_time()
        limit_s = self.setup_timeout_seconds
        try:
            async with within(limit_s, "setup_state") if limit_s is not None else NO_LIMIT:
                changed = await self.setup_state(state)
            if changed is not None and changed is not state:
                state.update(changed)
        except Exception as error:
            state["error"] = attributed(error, EnvironmentFault, "setup_state")
        timing.setup.end = steady_time()

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
        """One turn. Whatever it raises is the rollout's error, or the end of its context."""
        stage, limit_s = "env_response", self.turn_timeout_seconds
        try:
            async with within(limit_s, f"turn {len(state['trajectory']) + 1}") if limit_s is not None else NO_LIMIT:
                prompt = await self.get_prompt_messages(state)
                if state.get("final_env_response") is not None:
                    return
                stage = "turn"
                history = None
                if self.context is not None:
                    prompt, history = self._fitted(self.context, prompt, state)
                span = TimeSpan(steady_time())
                try:
                    response = await self.get_model_response(state, prompt)
                finally:
                    span.end = steady_time()
                    state["timing"].model.spans.append(span)
                if (pace := pacer()).is_spent:
                    await pace.turn()
                await self.add_model_response(state, prompt, response)
                if history is not None:
                    state["history"] = history
        except OverlongError:
            state["prompt_too_long"] = state["is_truncated"] = True
        except Exception as error:
            state["error"] = attributed(error, EnvironmentFault, stage)

    def _fitted(self, policy: ContextPolicy, prompt: Messages, state: State) -> tuple[Messages, Messages | None]:
        """What the model sees of `prompt`, and the whole conversation where that is more."""
        history: Messages | None = state.get("history")
        if history is not None:
            last = state["trajectory"][-1]
            num_known = len(last["prompt"]) + len(last["completion"])
            history = [*history, *last["completion"], *prompt[num_known:]]
        seen = policy.fit(prompt, state)
        return seen, prompt if history is None and seen is not prompt else history

    @final
    @cleanup(priority=100)
    async def render_state(self, state: State) -> None:
        """Set `completion`: everything that came after the prompt, left out of the context or not."""
        await self.render_completion(state)

    async def render_completion(self, state: State) -> None:
        """The completion of the trajectory as it is."""
        if not state["trajectory"]:
            state["completion"] = messages_from(state.get("final_env_response"))
            return
        last = state["trajectory"][-1]
        conversation = [*(state.get("history") or last["prompt"]), *last["completion"]]
        state["completion"] = [
            *conversation[len(state["prompt"]) :],
            *messages_from(state.get("final_env_response") or None),
        ]
