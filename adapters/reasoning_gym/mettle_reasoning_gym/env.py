"""Tasks that reasoning-gym generates, scored by its own verifiers.

Parts: `ReasoningGymEnv`. A row's `answer` is the index of its task in the generated dataset, as text. Invariants: a
task is generated when its row is read; the same seed makes the same tasks in any order; no verifier evaluates what the
model said (`safe_answers`); an answer that a verifier cannot read scores as no answer at all.
"""

from __future__ import annotations

import difflib
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from mettle.envs.episode_calls import EpisodeCalls, Pace
from mettle.envs.episodes import split_seeds
from mettle.envs.guests import guest, imported
from mettle.envs.parsers.parser import Parser
from mettle.envs.parsers.xml_parser import XMLParser
from mettle.envs.rubrics.rubric import Rubric
from mettle.envs.singleturn_env import SingleTurnEnv
from mettle.errors import EnvironmentFault, UserError
from mettle.records.messages import Messages
from mettle_reasoning_gym.safe_answers import (
    EVALUATING,
    MAX_ANSWER_CHARS,
    PARSING,
    is_plain_formula,
    use_literals,
)

MAX_REMEMBERED = 4096
DEFAULT_PROMPT = "reasoning-gym's default"
"""Stands for `reasoning_gym.utils.SYSTEM_PROMPTS["default"]`, read when it is first needed."""


class ReasoningGymEnv(SingleTurnEnv):
    """Tasks of one family (`gym="leg_counting"`) or a weighted mix: a list of names or `{name, weight, config}`."""

    _system_prompt: str | None

    def __init__(
        self,
        gym: str | Sequence[str | Mapping[str, Any]],
        num_train_examples: int = 1000,
        num_eval_examples: int = 100,
        system_prompt: str | None = DEFAULT_PROMPT,
        parser: Parser | None = None,
        seed: int = 0,
        config: Mapping[str, Any] | None = None,
        score_timeout_s: float = 10.0,
        **kwargs: Any,
    ) -> None:
        self.gym = gym
        self._specs = _specs_of(gym, config)
        self.num_train_examples = num_train_examples
        self.num_eval_examples = num_eval_examples
        self.seed = seed
        self.score_timeout_s = score_timeout_s
        self._pace = Pace()
        self._generated: Any = None
        self._lock = threading.Lock()
        self._entry = lru_cache(MAX_REMEMBERED)(self._generate)
        parser = parser or XMLParser(["answer"])
        rubric = Rubric(parser=parser)
        rubric.add_reward_func(self.check_answer_reward_func)
        rubric.add_reward_func(parser.get_format_reward_func(), weight=0.0)
        splits: dict[str, Any] = {**split_seeds(num_train_examples, num_eval_examples, 0, self._row)}
        super().__init__(**{**splits, "rubric": rubric, **kwargs}, system_prompt=system_prompt, parser=parser)

    @property
    def system_prompt(self) -> str | None:
        """What the model is told first."""
        if self._system_prompt == DEFAULT_PROMPT:
            self._system_prompt = str(_library("reasoning_gym.utils").SYSTEM_PROMPTS["default"])
        return self._system_prompt

    @system_prompt.setter
    def system_prompt(self, text: str | None) -> None:
        self._system_prompt = text

    # Tasks

    @property
    def rg_dataset(self) -> Any:
        """reasoning-gym's own dataset, made when it is first needed."""
        with self._lock:
            if self._generated is None:
                total = self.num_train_examples + self.num_eval_examples
                self._generated = self.build_rg_dataset(self.gym, total, self.seed)
            return self._generated

    def build_rg_dataset(self, gym: Any, total_examples: int = 1000, seed: int = 0) -> Any:
        """A dataset of one family, or a composite one.

        Raises: UserError for a family that there is not and for a setting that it refuses.
        """
        library = _library("reasoning_gym")
        known = _library("reasoning_gym.factory").DATASETS
        for spec in self._specs:
            if spec["name"] not in known:
                near = difflib.get_close_matches(spec["name"], known, 3)
                raise UserError(
                    f"reasoning-gym has no family {spec['name']!r}; "
                    + (f"nearest are {', '.join(near)}" if near else f"it has {len(known)}, such as leg_counting")
                )
        try:
            if isinstance(gym, str):
                made = library.create_dataset(gym, size=total_examples, seed=seed, **self._specs[0]["config"])
            else:
                specs = [_library("reasoning_gym.composite").DatasetSpec(**spec) for spec in self._specs]
                made = library.create_dataset("composite", datasets=specs, size=total_examples, seed=seed)
        except (AssertionError, TypeError, ValueError) as error:
            raise UserError(f"reasoning-gym refused the settings of {_names(self._specs)}: {error}") from error
        return made

    def _generate(self, index: int) -> dict[str, Any]:
        with guest(f"generating task {index} of {_names(self._specs)}"):
            entry: dict[str, Any] = self.rg_dataset[index]
            return entry

    def _row(self, index: int) -> dict[str, Any]:
        entry = self._entry(index)
        family = entry.get("metadata", {}).get("source_dataset") or self._specs[0]["name"]
        return {"question": entry["question"], "answer": str(index), "info": {"source_dataset": family}}

    # Scores

    async def check_answer_reward_func(self, completion: Messages, answer: str, **kwargs: Any) -> float:
        """What the family's verifier says of the answer given."""
        given = self.parser.parse_answer(completion)
        calls = EpisodeCalls(self._pace, self.score_timeout_s if self._may_be_slow else None)
        try:
            return float(await calls(self.score, int(answer), given))
        finally:
            await calls.close(lambda: None)

    def score(self, index: int, given: Any) -> float:
        """The score of an answer to the task `index`; None is no answer."""
        entry = self._entry(index)
        dataset = self.rg_dataset
        parts = getattr(dataset, "datasets", None)
        verifier = parts[entry["metadata"]["source_dataset"]] if parts else dataset
        family = _module_name(verifier)
        if family in EVALUATING:
            use_literals(verifier)
        readable = self._readable(family, given)
        if readable is not None:
            try:
                return float(verifier.score_answer(readable, entry))
            except Exception as error:
                self.logger.debug("a verifier could not read an answer", exc_info=error)
        return float(verifier.score_answer(None, entry))

    def demonstrate(self, messages: Messages, row: Mapping[str, Any]) -> str:
        """The family's own answer, in the format asked for."""
        known = self._entry(int(row["answer"]))["answer"]
        if known is None:
            raise EnvironmentFault(f"{row['info']['source_dataset']} has verifiers but no answers to demonstrate")
        if isinstance(self.parser, XMLParser):
            return self.parser.format(**{self.parser.answer_field: str(known)})
        return str(known)

    @staticmethod
    def _readable(family: str, given: Any) -> str | None:
        if given is None:
            return None
        text = str(given).strip()
        if len(text) > MAX_ANSWER_CHARS or (family in PARSING and not is_plain_formula(text)):
            return None
        return text

    @property
    def _may_be_slow(self) -> bool:
        return any(spec["name"] in PARSING for spec in self._specs)


def _specs_of(gym: Any, config: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """`{name, weight, config}` for each family."""
    given = [{"name": gym, "config": dict(config or {})}] if isinstance(gym, str) else gym
    if not isinstance(given, Sequence) or not given:
        raise UserError(f"gym is the name of a family or a list of them, not {gym!r}")
    if config is not None and not isinstance(gym, str):
        raise UserError("config is for one family; give each family of a list a config of its own")
    specs: list[dict[str, Any]] = []
    for spec in given:
        fields: Any = {"name": spec} if isinstance(spec, str) else spec
        unknown = set(fields) - {"name", "weight", "config"} if isinstance(fields, Mapping) else {"?"}
        if unknown or "name" not in fields:
            raise UserError(f"a family is a name or {{name, weight, config}}, not {spec!r}")
        specs.append({"weight": 1.0, **fields, "config": dict(fields.get("config") or {})})
    return specs


def _names(specs: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(str(spec["name"]) for spec in specs)


def _module_name(dataset: Any) -> str:
    return type(dataset).__module__.rpartition(".")[2]


def _library(module: str) -> Any:
    return imported(module, adapter="reasoning_gym", needed_by="ReasoningGymEnv")
