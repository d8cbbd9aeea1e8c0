"""Episodes: the model acts, the environment answers with an observation and a reward, until it is over.

Parts: `EpisodeEnv`, `EpisodicSumRubric`, `SeedRows` (rows that are made when they are read). Invariants: every action
reaches the environment, the last one that the limits allow too; after the end the model is not asked again; a
trajectory step has the reward of its own action.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from mettle.envs.decorators import stop
from mettle.envs.multiturn_env import MultiTurnEnv
from mettle.envs.rubrics.rubric import Rubric
from mettle.envs.state import State
from mettle.errors import EnvironmentFault
from mettle.records.messages import Messages, Response, messages_from


def sum_step_rewards(state: State) -> float:
    """What the environment gave over the whole episode."""
    return state.total_step_reward()


class EpisodicSumRubric(Rubric):
    """The reward of an episode is the sum over its steps."""

    def __init__(self, weight: float = 1.0, **kwargs: Any) -> None:
        super().__init__(funcs=[sum_step_rewards], weights=[weight], **kwargs)


class SeedRows:
    """Rows `make(number)` for each of `numbers`, made when they are read."""

    def __init__(self, numbers: range, make: Callable[[int], dict[str, Any]]) -> None:
        self._numbers = numbers
        self._make = make

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._make(self._numbers[index])


def split_seeds(
    num_train: int, num_eval: int, first: int, make: Callable[[int], dict[str, Any]]
) -> dict[str, Callable[[], SeedRows] | None]:
    """`dataset` and `eval_dataset`: consecutive numbers from `first`, first those for training."""
    middle = first + num_train

    def rows(start: int, num: int) -> Callable[[], SeedRows] | None:
        return (lambda: SeedRows(range(start, start + num), make)) if num > 0 else None

    return {"dataset": rows(first, num_train), "eval_dataset": rows(middle, num_eval)}


class EpisodeEnv(MultiTurnEnv):
    """A kind of environment defines `act`. What a row's `answer` says (a seed, a secret) is not to be imitated."""

    def demonstrate(self, messages: Messages, row: Mapping[str, Any]) -> Any:
        """Nothing is demonstrated unless a subclass or the argument `demonstrate` does."""
        raise EnvironmentFault(f"{type(self).__name__} demonstrates nothing; give it demonstrate(messages, row)")

    @abstractmethod
    async def act(self, messages: Messages, state: State) -> tuple[Any, bool]:
        """Carry out the model's last message: what the environment says, and whether it was its last word."""

    async def env_response(self, messages: Messages, state: State, **kwargs: Any) -> Messages:
        """The environment's answer. Its last word ends the rollout."""
        said, is_over = await self.act(messages, state)
        answer = messages_from(said)
        if is_over:
            state["episode_done"] = True
            state["final_env_response"] = answer
        return answer

    async def add_model_response(self, state: State, prompt_messages: Messages, response: Response) -> None:
        """Make a step of a model call. Where the limits allow no further one, carry out its action now."""
        await super().add_model_response(state, prompt_messages, response)
        if not (await self.max_turns_reached(state) or await self.max_total_completion_tokens_reached(state)):
            return
        last = state["trajectory"][-1]
        num_known = len(last["prompt"]) + len(last["completion"])
        conversation = await self.get_prompt_messages(state)
        if state.get("final_env_response") is None:
            state["final_env_response"] = conversation[num_known:]

    @stop(priority=50)
    async def is_done(self, state: State) -> bool:
        """The episode is over."""
        return bool(state.get("episode_done", False))

    @stop(priority=40)
    async def max_turns_reached(self, state: State) -> bool:
        """All turns are used up."""
        return 0 < self.max_turns <= len(state["trajectory"])

    @stop(priority=40)
    async def max_total_completion_tokens_reached(self, state: State) -> bool:
        """All tokens are used up."""
        return bool(0 < self.max_total_completion_tokens <= state["usage"]["output_tokens"])
