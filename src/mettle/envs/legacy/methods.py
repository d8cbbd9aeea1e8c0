"""Methods that environments and rubrics had in earlier releases, for authors who call or override them.

Parts: `OlderEnvironmentMethods`, `OlderRubricMethods`, whose methods `Environment` and `Rubric` are given when they are
defined. Invariant: each is a few lines over what the library does today, and the library itself calls none of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from mettle.envs.author_records import RolloutScores
from mettle.envs.legacy.asynchrony import maybe_call_with_named_args
from mettle.envs.legacy.parts import score_call_of_parts
from mettle.envs.rows import Rows, format_row
from mettle.records.messages import Messages, messages_from


class OlderEnvironmentMethods:
    """What `Environment` had from 0.1.2 to 0.1.10."""

    def get_reward_funcs(self) -> list[Callable[..., Any]]:
        """The reward functions."""
        owner: Any = self
        funcs: list[Callable[..., Any]] = owner.rubric.get_reward_funcs()
        return funcs

    def get_reward_weights(self) -> list[float]:
        """Their weights."""
        owner: Any = self
        weights: list[float] = owner.rubric.get_reward_weights()
        return weights

    def format_prompt(
        self, prompt_str: str, system_prompt: str | None = None, few_shot: Sequence[Any] | None = None
    ) -> Messages:
        """A question as messages."""
        system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        return messages_from([*system, *(few_shot or []), {"role": "user", "content": prompt_str}])

    def format_dataset(
        self,
        dataset: Any,
        system_prompt: str | None = None,
        few_shot: Sequence[Any] | None = None,
        question_key: str = "question",
        answer_key: str = "answer",
        **_: Any,
    ) -> Rows:
        """Rows with a prompt made of the question."""
        made = []
        for index, source in enumerate(dataset):
            row = dict(source)
            if question_key in row:
                row["question"] = row[question_key]
            if answer_key in row:
                row["answer"] = row[answer_key]
            made.append(format_row(row, index, system_prompt, few_shot))
        return Rows.from_list(made)

    def set_interleaved_rollouts(self, interleaved_rollouts: bool) -> None:
        """Sampled tokens are always reused from turn to turn; there is nothing to set."""


class OlderRubricMethods:
    """What `Rubric` had from 0.1.2 to 0.1.7."""

    class_objects: dict[str, Any]
    score_rollout: Callable[..., Awaitable[Any]]

    async def call_reward_func(
        self,
        func: Callable[..., Any],
        prompt: Any,
        completion: Any,
        answer: str,
        state: Any,
        task: Any = "default",
        info: Any = None,
        **kwargs: Any,
    ) -> float:
        """The score of one function for one rollout."""
        given = {
            "prompt": prompt,
            "completion": completion,
            "answer": answer,
            "state": state,
            "task": task,
            "info": info or {},
        }
        return float(await maybe_call_with_named_args(func, **{**given, **self.class_objects, **kwargs}))

    async def score_rollouts(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        answers: Sequence[Any],
        states: Sequence[Any],
        tasks: Sequence[Any],
        infos: Sequence[Any],
        **_: Any,
    ) -> RolloutScores:
        """The scores of several rollouts, one after the other."""
        parts = zip(prompts, completions, answers, states, tasks, infos, strict=True)
        score_rollout = score_call_of_parts(type(self).score_rollout)
        scores = [await score_rollout(self, *each) for each in parts]
        names = scores[0]["metrics"] if scores else {}
        return RolloutScores(
            reward=[score["reward"] for score in scores],
            metrics={name: [score["metrics"][name] for score in scores] for name in names},
        )
