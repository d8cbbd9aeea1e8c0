"""An environment: a dataset, how a rollout goes, and a rubric that scores it.

Parts: `Environment`, the base of all kinds. `rollout` is what a kind defines; `run_rollout` and `run_group` run and
score and never raise for a rollout's failure. Its rows are in `splits`, `generate` and `evaluate` in
`many_rollouts`, the scoring of what has ended in `scoring`.
Invariants: whatever escapes a rollout is that rollout's `state["error"]`, with `reward` None; what an environment's
class defines (stop conditions, handlers, signatures) is read once per environment.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from mettle.clients.answer_length import readable
from mettle.clients.dialects.chat import wire_tool
from mettle.clients.factory import client_from
from mettle.envs.decorators import marked_methods
from mettle.envs.definitions import defined
from mettle.envs.errors import (
    RETRIED_ERRORS,
    EnvironmentFault,
    ModelError,
    attributed,
)
from mettle.envs.limits import NO_LIMIT, bounded_sampling, within
from mettle.envs.loops import size_executor
from mettle.envs.many_rollouts import ManyRollouts
from mettle.envs.pacing import pacer
from mettle.envs.parsers.parser import Parser
from mettle.envs.rows import format_row
from mettle.envs.rubrics.correctness import correctness_weights
from mettle.envs.rubrics.rubric import Rubric, score_alone
from mettle.envs.rubrics.rubric_group import RubricGroup
from mettle.envs.rubrics.scoring import score_states
from mettle.envs.signatures import SignatureCache, call_by_name, is_awaitable
from mettle.envs.splits import SplitDatasets, Splits
from mettle.envs.state import State, UsageTracker, new_state
from mettle.errors import RolloutError
from mettle.records.messages import Messages, Response, Tool, tool_from
from mettle.web.backoff import Backoff

logger = logging.getLogger(__name__)

RETRY_BACKOFF = Backoff(first_s=1.0, max_s=60.0)


class Environment(SplitDatasets, ManyRollouts, ABC):
    """Base of all environments. Keyword arguments that it does not know become attributes."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        defined(cls, "environment")

    demonstrate: Callable[[Messages, Mapping[str, Any]], Any] | None = None
    """A policy that shows what is wanted, `(messages, row) -> text or assistant message`; see `demonstrations`."""

    max_turn_completion_tokens: int | None = None
    group_timeout_seconds: float | None = None
    """After this long whoever runs a group ends it, rewards and all; a reward function is given up before."""

    concurrency: int = 0

    def __init__(
        self,
        dataset: Any = None,
        eval_dataset: Any = None,
        system_prompt: str | None = None,
        few_shot: Sequence[Any] | None = None,
        parser: Parser | None = None,
        rubric: Rubric | None = None,
        sampling_args: Mapping[str, Any] | None = None,
        message_type: str = "chat",
        tool_defs: Sequence[Tool] | None = None,
        max_workers: int = 512,
        env_id: str | None = None,
        env_args: Mapping[str, Any] | None = None,
        map_kwargs: Mapping[str, Any] | None = None,
        max_seq_len: int | None = None,
        max_total_completion_tokens: int = -1,
        score_rollouts: bool = True,
        scoring_timeout_seconds: float | None = None,
        cleanup_timeout_seconds: float | None = None,
        pass_threshold: float = 0.5,
        pass_on: str | Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        if dataset is None and eval_dataset is None:
            raise ValueError("an environment needs a dataset or an eval_dataset")
        if message_type not in ("chat", "completion"):
            raise ValueError(f"message_type is 'chat' or 'completion', not {message_type!r}")
        self.logger = logging.getLogger(f"{__name__}.{type(self).__name__}")
        self.system_prompt = system_prompt
        self.few_shot = few_shot
        self.parser = parser or (rubric.parser if rubric is not None else Parser())
        self.rubric = rubric or Rubric(parser=self.parser)
        if parser is not None and type(self.parser) is not type(self.rubric.parser):
            self.logger.warning(
                "environment and rubric parse differently: %s and %s",
                type(self.parser).__name__,
                type(self.rubric.parser).__name__,
            )
        self.sampling_args: dict[str, Any] = {"n": 1, "extra_body": {}, **(sampling_args or {})}
        self.message_type = message_type
        given_tools = tool_defs or kwargs.pop("oai_tools", None) or []
        self.tool_defs: list[Tool] = [tool_from(tool) for tool in given_tools]
        self.max_workers = max_workers
        self.env_id = env_id or ""
        self.env_args = dict(env_args or {})
        self.env_version: str | None = None  # the version of its package, set by who loads it
        self.map_kwargs = dict(map_kwargs or {})
        self.max_seq_len = max_seq_len
        self.max_total_completion_tokens = max_total_completion_tokens
        self.score_rollouts = score_rollouts
        self.scoring_timeout_seconds = scoring_timeout_seconds
        self.cleanup_timeout_seconds = cleanup_timeout_seconds
        self.pass_threshold = pass_threshold
        self._pass_on = pass_on
        for name, value in kwargs.items():
            setattr(self, name, value)
        self._signatures = SignatureCache()
        self._handlers: dict[str, list[Callable[..., Any]]] = {}
        self._splits = Splits(dataset, eval_dataset, self._format_row)

    def _format_row(self, row: dict[str, Any], index: int) -> dict[str, Any]:
        return format_row(row, index, self.system_prompt, self.few_shot)

    @property
    def _title(self) -> str:
        return self.env_id or type(self).__name__

    @property
    def pass_on(self) -> dict[str, float] | None:
        """Weights of the metrics that are held against `pass_threshold`; None where it is the whole reward.

        Raises: UserError when it was set to a metric that there is not.
        """
        return correctness_weights(self.rubric, self._pass_on)

    @pass_on.setter
    def pass_on(self, names: str | Sequence[str] | None) -> None:
        self._pass_on = names

    @property
    def oai_tools(self) -> list[dict[str, Any]]:
        """The tools as chat completions wants them."""
        return [wire_tool(tool) for tool in self.tool_defs]

    @oai_tools.setter
    def oai_tools(self, tools: Sequence[Any] | None) -> None:
        self.tool_defs = [tool_from(tool) for tool in tools or []]

    # One rollout

    async def init_state(
        self, input: Mapping[str, Any], client: Any, model: str, sampling_args: Mapping[str, Any] | None = None
    ) -> State:
        """The state at the beginning of a rollout."""
        arguments = {**self.sampling_args, **(sampling_args or {})}
        return new_state(input, client, model, arguments, self.tool_defs)

    @abstractmethod
    async def rollout(
        self, input: Mapping[str, Any], client: Any, model: str, sampling_args: Mapping[str, Any] | None = None
    ) -> State:
        """Run one rollout of one row, without scoring it."""

    async def get_model_response(
        self,
        state: State,
        prompt: Messages,
        client: Any = None,
        model: str | None = None,
        tool_defs: list[Tool] | None = None,
        sampling_args: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> Response:
        """One model call on behalf of a rollout. What the client raises of its own is a `ModelError`."""
        client = client if client is not None else state["client"]
        tools = tool_defs if tool_defs is not None else state.get("tool_defs")
        arguments = sampling_args if sampling_args is not None else state["sampling_args"]
        if self.max_turn_completion_tokens is not None:
            arguments = bounded_sampling(arguments, self.max_turn_completion_tokens)
        try:
            response: Response = await client.get_response(
                prompt=prompt, model=model or state["model"], sampling_args=arguments, tools=tools or None, state=state
            )
        except RolloutError:
            raise
        except Exception as error:
            raise attributed(error, ModelError, "model call") from error
        return readable(response)

    async def is_completed(self, state: State, **_: Any) -> bool:
        """Ask the stop conditions in their order; the first that fires names the reason."""
        if state["is_completed"]:
            return True
        available = {"state": state, "env": self}
        for condition in self._marked("stop"):
            is_met = condition(**self._signatures(condition).pick(available))
            if await is_met if is_awaitable(is_met) else is_met:
                state["is_completed"] = True
                state["stop_condition"] = condition.__name__
                return True
        return False

    async def clean_up(self, state: State) -> None:
        """Run every `@vf.cleanup` method. One that raises is recorded and does not keep the others from running."""
        available = {"state": state, "env": self, "task": state.get("task"), "resources": None}
        limit_s = self.cleanup_timeout_seconds
        for handler in self._marked("cleanup"):
            try:
                async with within(limit_s, handler.__name__) if limit_s is not None else NO_LIMIT:
                    await call_by_name(handler, self._signatures(handler), available)
            except Exception as error:
                state["cleanup_error"] = f"{handler.__name__}: {type(error).__name__}: {error}"
                self.logger.warning("cleanup failed", exc_info=error)

    async def cleanup(self, state: State, task: Any = None, resources: Any = None) -> None:
        """`clean_up`, by the name that verifiers gives it."""
        await self.clean_up(state)

    async def teardown(self) -> None:
        """Run every `@vf.teardown` method of the environment and its rubric."""
        for handler in self._marked("teardown"):
            await call_by_name(handler, self._signatures(handler), {"env": self})
        await self.rubric.teardown()

    def _marked(self, mark: str) -> list[Callable[..., Any]]:
        if mark not in self._handlers:
            self._handlers[mark] = marked_methods(self, mark)
        return self._handlers[mark]

    # Usage

    def increment_state_usage(self, state: State, input_tokens: float = 0, output_tokens: float = 0) -> None:
        """Count tokens of a model call that is no turn of the rollout (a judge, a summary)."""
        self._usage_tracker(state).increment(input_tokens, output_tokens)

    def increment_state_usage_from_response(self, state: State, response: Any) -> None:
        """Count what a response says it used."""
        self._usage_tracker(state).increment_from_response(response)

    def get_state_usage(self, state: State) -> dict[str, float] | None:
        """The tokens counted so far; None when no call told any."""
        return self._usage_tracker(state).snapshot()

    @staticmethod
    def _usage_tracker(state: State) -> UsageTracker:
        tracker = state.get("usage_tracker")
        if not isinstance(tracker, UsageTracker):
            tracker = state["usage_tracker"] = UsageTracker()
            state["usage"] = tracker.usage
        return tracker

    # Rollouts with scores

    async def run_rollout(
        self,
        input: Mapping[str, Any],
        client: Any,
        model: str,
        sampling_args: Mapping[str, Any] | None = None,
        max_retries: int = 0,
        **_: Any,
    ) -> State:
        """Run and score one rollout. Its failure is in its state; nothing is raised."""
        ends_at = self._scored_by()
        if (pace := pacer()).is_spent:
            await pace.turn()
        state = await self._attempt(input, client_from(client), model, sampling_args, max_retries)
        await self._score([state], partial(score_alone, self.rubric, state), ends_at)
        return state

    async def run_group(
        self,
        group_inputs: Sequence[Mapping[str, Any]],
        client: Any,
        model: str,
        sampling_args: Mapping[str, Any] | None = None,
        max_retries: int = 0,
        **_: Any,
    ) -> list[State]:
        """Run the rollouts of one group side by side and score them together. Nothing is raised for one that fails."""
        ends_at = self._scored_by()
        if (pace := pacer()).is_spent:
            await pace.turn()
        client = client_from(client)
        make_group = getattr(client, "for_group", None)
        members = make_group(len(group_inputs)) if make_group else [client] * len(group_inputs)
        attempts = [
            self._attempt(row, member, model, sampling_args, max_retries)
            for row, member in zip(group_inputs, members, strict=True)
        ]
        states = [await attempts[0]] if len(attempts) == 1 else list(await asyncio.gather(*attempts))
        for state in states:
            state["client"] = client
        await self._score(states, partial(self.rubric.score_group, states), ends_at)
        return states

    async def _attempt(
        self, row: Mapping[str, Any], client: Any, model: str, sampling_args: Mapping[str, Any] | None, max_retries: int
    ) -> State:
        for attempt in range(max_retries + 1):
            try:
                state = await self.rollout(row, client, model, sampling_args)
            except Exception as error:
                state = await self._failed_state(row, client, model, sampling_args, error)
            if not isinstance(state.get("error"), RETRIED_ERRORS) or attempt == max_retries:
                break
            self.logger.info("rollout failed, trying again", extra={"error": str(state["error"])})
            await asyncio.sleep(RETRY_BACKOFF.wait_s(attempt))
        if (leave := getattr(client, "leave", None)) is not None:  # a group's client waits for who has not asked yet
            leave()
        return state

    async def _failed_state(
        self,
        row: Mapping[str, Any],
        client: Any,
        model: str,
        sampling_args: Mapping[str, Any] | None,
        error: Exception,
    ) -> State:
        try:
            state = await self.init_state(row, client, model, sampling_args)
        except Exception:
            state = new_state({"prompt": [], "example_id": row.get("example_id", 0)}, client, model, {}, [])
        state["error"] = attributed(error, EnvironmentFault, "rollout")
        state["is_completed"], state["stop_condition"], state["completion"] = True, "has_error", []
        return state

    def _scored_by(self) -> float | None:
        """When what begins now is to have been scored, as a time of the loop."""
        limit_s = self.group_timeout_seconds
        return None if limit_s is None else asyncio.get_running_loop().time() + limit_s

    async def _score(
        self, states: list[State], score: Callable[[], Coroutine[Any, Any, None]], ends_at: float | None
    ) -> None:
        if (pace := pacer()).is_spent:
            await pace.turn()
        chosen = score if self.score_rollouts else None
        limit_s = self.scoring_timeout_seconds
        await score_states(states, chosen, self.rubric.cleanup, timeout_s=limit_s, ends_at=ends_at)

    # Settings

    @property
    def requires_group_rollouts(self) -> bool:
        """True when a reward function must see a whole group."""
        return self.rubric.has_group_funcs()

    @property
    def has_independent_members(self) -> bool:
        """True when `run_group` does no more than `run_rollout` would do for each of its rows."""
        return type(self).run_group is Environment.run_group and not self.requires_group_rollouts

    @property
    def provides_advantages(self) -> bool:
        """True when the environment computes advantages itself."""
        return False

    def add_rubric(self, rubric: Rubric) -> None:
        """Score by this rubric too."""
        if isinstance(self.rubric, RubricGroup):
            self.rubric.rubrics.append(rubric)
        else:
            self.rubric = RubricGroup([self.rubric, rubric])

    def set_kwargs(self, **kwargs: Any) -> None:
        """Change settings, by `set_<name>` where there is one."""
        for name, value in kwargs.items():
            setter = getattr(self, f"set_{name}", None)
            if callable(setter):
                setter(value)
            else:
                setattr(self, name, value)

    def set_concurrency(self, concurrency: int) -> None:
        """Let as many blocking calls (`asyncio.to_thread`) run side by side, up to `max_workers`."""
        self.concurrency = concurrency
        size_executor(min(concurrency, self.max_workers))

    def set_max_seq_len(self, max_seq_len: int | None) -> None:
        """Cut trajectory steps at this many tokens, prompt included."""
        self.max_seq_len = max_seq_len

    def set_score_rollouts(self, score_rollouts: bool) -> None:
        """Score or do not."""
        self.score_rollouts = score_rollouts

    def set_max_total_completion_tokens(self, max_total_completion_tokens: int) -> None:
        """End a rollout once it has sampled this many tokens; -1 for no limit."""
        self.max_total_completion_tokens = max_total_completion_tokens


defined(Environment, "environment")
