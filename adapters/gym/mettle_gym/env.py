"""Gym environments: `reset(seed)` and `step(action)`, by gymnasium or by the interface that came before it.

Parts: `GymEnv`. A row is a seed; its question is the first observation. Invariants: constructing one resets nothing; a
rollout's prompt is the observation of its own episode; what the environment raises is that rollout's error; an episode
is closed whatever became of it.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from mettle.envs.decorators import cleanup, teardown
from mettle.envs.episode_calls import EpisodeCalls, Pace
from mettle.envs.episodes import EpisodeEnv, EpisodicSumRubric, split_seeds
from mettle.envs.guests import guest, imported
from mettle.envs.parsers.parser import Parser
from mettle.envs.rubrics.rubric import Rubric
from mettle.envs.state import State
from mettle.errors import EnvironmentFault, UserError
from mettle.records.messages import Messages, UserMessage, message_from

MAX_REMEMBERED = 4096
WHOLE_NUMBER = re.compile(r"-?\d+")


class GymEnv(EpisodeEnv):
    """Episodes of `env_cls(**env_kwargs)`, a class, a function or the id of a registered gymnasium environment.

    `action_parser` makes an action of the model's text; when it raises, the episode ends, or goes on with the error as
    the observation where `retry_bad_actions`. Without one, an environment with discrete actions takes the last whole
    number, any other the text. `step_timeout_s` limits each call of the environment.
    """

    def __init__(
        self,
        env_cls: Callable[..., Any] | str,
        env_kwargs: Mapping[str, Any] | None = None,
        action_parser: Callable[[str], Any] | None = None,
        obs_to_text: Callable[[Any], Any] | None = None,
        num_train_episodes: int = 1000,
        num_eval_episodes: int = 20,
        max_episode_steps: int | None = None,
        seed: int = 0,
        system_prompt: str | None = None,
        few_shot: Sequence[Any] | None = None,
        parser: Parser | None = None,
        rubric: Rubric | None = None,
        message_type: str = "chat",
        retry_bad_actions: bool = False,
        step_timeout_s: float | None = None,
        **kwargs: Any,
    ) -> None:
        if not callable(env_cls) and not isinstance(env_cls, str):
            raise UserError(f"env_cls is a class or the id of a gymnasium environment, not {env_cls!r}")
        self.env_cls = env_cls
        self.env_kwargs = dict(env_kwargs or {})
        self.action_parser = action_parser
        self.obs_to_text_fn = obs_to_text
        self.num_train_episodes = num_train_episodes
        self.num_eval_episodes = num_eval_episodes
        self.seed = seed
        self.retry_bad_actions = retry_bad_actions
        self.step_timeout_s = step_timeout_s
        self._pace = Pace()
        self._probe: Any = None
        self._probe_lock = threading.Lock()
        self._first_text = lru_cache(MAX_REMEMBERED)(self._look_at)
        splits: dict[str, Any] = {**split_seeds(num_train_episodes, num_eval_episodes, seed, self._row)}
        super().__init__(
            **{**splits, **kwargs},
            max_turns=max_episode_steps or 1000,
            system_prompt=system_prompt,
            few_shot=few_shot,
            parser=parser,
            rubric=rubric or EpisodicSumRubric(parser=parser),
            message_type=message_type,
        )

    # Rows

    def _row(self, seed: int) -> dict[str, Any]:
        return {"question": self._first_text(seed), "answer": str(seed)}

    def _look_at(self, seed: int) -> Any:
        with self._probe_lock, guest(f"{self._name}.reset(seed={seed})"):
            if self._probe is None:
                self._probe = self.make_env()
            return self.obs_to_text(reset(self._probe, seed))

    def make_env(self) -> Any:
        """A new environment."""
        if callable(self.env_cls):
            return self.env_cls(**self.env_kwargs)
        gymnasium = imported("gymnasium", adapter="gym", needed_by="GymEnv")
        return gymnasium.make(self.env_cls, **self.env_kwargs)

    def obs_to_text(self, obs: Any) -> Any:
        """An observation as the model sees it: text, or a list of content parts."""
        return self.obs_to_text_fn(obs) if self.obs_to_text_fn is not None else str(obs)

    def wrap_response(self, text: Any) -> Messages:
        """What the environment says, as messages."""
        return [UserMessage(content=text)]

    # One episode

    async def setup_state(self, state: State) -> State | None:
        """Begin the episode of the row's seed."""
        episode = _Episode(EpisodeCalls(self._pace, self.step_timeout_s))
        state["gym_episode"] = episode
        state["gym_done"] = False
        seed = _seed_of(state)
        with guest(f"{self._name}.reset(seed={seed})"):
            text = await episode.calls(self._begin, episode, seed)
        state["gym_env"] = episode.env
        prompt = [message_from(message) for message in state["prompt"]]
        if prompt and prompt[-1]["role"] == "user":
            state["prompt"] = [*prompt[:-1], UserMessage(content=text)]
        return state

    def _begin(self, episode: _Episode, seed: int) -> Any:
        episode.env = self.make_env()
        return self.obs_to_text(reset(episode.env, seed))

    async def act(self, messages: Messages, state: State) -> tuple[Any, bool]:
        """Step the environment with the action in the model's last message."""
        if "gym_episode" not in state:  # a subclass has a setup_state of its own
            await GymEnv.setup_state(self, state)
        step = state["trajectory"][-1]
        episode: _Episode = state["gym_episode"]
        try:
            action = self._action(self._action_text(messages), episode.env)
        except Exception as error:
            step["reward"] = 0.0
            state["gym_done"] = not self.retry_bad_actions
            return self.wrap_response(f"Action Parsing Error: {error}"), state["gym_done"]
        with guest(f"{self._name}.step({str(action)[:80]})"):
            obs, reward, is_over, info, text = await episode.calls(self._step, episode.env, action)
        step["reward"] = reward
        step["extras"]["gym_info"] = info
        state["gym_done"] = is_over
        state["gym_observation"] = obs
        return self.wrap_response(text), is_over

    def _action_text(self, messages: Messages) -> str:
        text = self.parser.parse_answer(messages)
        return messages[-1].text if text is None else str(text)

    def _action(self, text: str, env: Any) -> Any:
        if self.action_parser is not None:
            return self.action_parser(text)
        if type(getattr(env, "action_space", None)).__name__ != "Discrete":
            return text
        numbers = WHOLE_NUMBER.findall(text)
        if not numbers:
            raise ValueError("there is no number in the action; actions are whole numbers")
        if not env.action_space.contains(action := int(numbers[-1])):
            raise ValueError(f"{action} is no action; actions are in {env.action_space}")
        return action

    def _step(self, env: Any, action: Any) -> tuple[Any, float, bool, Any, Any]:
        stepped = env.step(action)
        if not isinstance(stepped, tuple | list) or len(stepped) not in (4, 5):
            size = f" of {len(stepped)}" if isinstance(stepped, tuple | list) else ""
            raise TypeError(f"step returned a {type(stepped).__name__}{size}; it returns 4 or 5 values")
        obs, reward, *ends, info = stepped
        return obs, float(reward), any(bool(end) for end in ends), info, self.obs_to_text(obs)

    @cleanup
    async def cleanup_env(self, state: State) -> None:
        """Close the episode's environment."""
        episode: _Episode | None = state.pop("gym_episode", None)
        state.pop("gym_env", None)
        if episode is not None:
            await episode.calls.close(episode.close)

    @teardown
    async def teardown_env(self) -> None:
        """Close the environment that rows are read with."""
        with self._probe_lock:
            _close(self._probe)
            self._probe = None

    @property
    def _name(self) -> str:
        return self.env_cls if isinstance(self.env_cls, str) else getattr(self.env_cls, "__name__", "environment")


class _Episode:
    """One environment and the calls that are made of it."""

    def __init__(self, calls: EpisodeCalls) -> None:
        self.calls = calls
        self.env: Any = None

    def close(self) -> None:
        _close(self.env)
        self.env = None


def reset(env: Any, seed: int) -> Any:
    """The first observation of the episode `seed`, from either interface."""
    parameters = inspect.signature(env.reset).parameters.values()
    if any(p.name == "seed" or p.kind is p.VAR_KEYWORD for p in parameters):
        first = env.reset(seed=seed)
    else:
        if hasattr(env, "seed"):
            env.seed(seed)
        first = env.reset()
    is_pair = isinstance(first, tuple) and len(first) == 2 and isinstance(first[1], Mapping)
    return first[0] if is_pair else first


def _close(env: Any) -> None:
    close = getattr(env, "close", None)
    if callable(close):
        close()


def _seed_of(state: State) -> int:
    try:
        return int(state["answer"])
    except (TypeError, ValueError) as error:
        raise EnvironmentFault(f"the answer of a GymEnv row is its seed, not {state['answer']!r}") from error
