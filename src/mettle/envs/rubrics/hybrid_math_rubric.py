"""Mathematics first, and a judge model for what mathematics cannot settle.

Parts: `HybridMathRubric`. Invariants: the judge is asked only about an answer that was not found equal; its metric is
there for every rollout, 0 where it was not asked; the reward is 1 when either says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from mettle.envs.parsers.parser import Parser
from mettle.envs.parsers.think_parser import MaybeThinkParser
from mettle.envs.rubrics.judge_prompt import DEFAULT_JUDGE_PROMPT
from mettle.envs.rubrics.judge_rubric import JudgeRubric
from mettle.envs.rubrics.math_rubric import MathRubric, _strictly_boxed
from mettle.envs.state import State
from mettle.errors import JudgeError

_VERDICT = re.compile(r"\\boxed\{\s*([A-C])\s*\}|\b(yes|no|correct|incorrect)\b", re.IGNORECASE)
_LETTER = re.compile(r"([A-C])\s*\.?", re.IGNORECASE)


class HybridMathRubric(JudgeRubric):
    """Metrics `math_verify_score` and `judge_score`, and the reward `correct_answer`, 1 when one of them is 1."""

    DEFAULT_JUDGE_PARSER: Parser | None = None
    DEFAULT_JUDGE_MODEL = "gpt-5-nano"
    DEFAULT_JUDGE_CLIENT: Any = None
    DEFAULT_JUDGE_PROMPT = DEFAULT_JUDGE_PROMPT
    DEFAULT_JUDGE_SAMPLING_ARGS: Mapping[str, Any] = MappingProxyType({})
    DEFAULT_USE_JUDGE_FALLBACK = False

    def __init__(
        self,
        parser: Parser | None = DEFAULT_JUDGE_PARSER,
        use_judge_fallback: bool = DEFAULT_USE_JUDGE_FALLBACK,
        judge_client: Any = DEFAULT_JUDGE_CLIENT,
        judge_model: str = DEFAULT_JUDGE_MODEL,
        judge_prompt: str = DEFAULT_JUDGE_PROMPT,
        judge_sampling_args: Mapping[str, Any] | None = None,
        timeout_seconds: float = 5,
        max_workers: int = 50,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            parser=parser or MaybeThinkParser(_strictly_boxed),
            judge_client=judge_client,
            judge_model=judge_model,
            judge_prompt=judge_prompt,
            judge_sampling_args=judge_sampling_args,
            **kwargs,
        )
        self.use_judge_fallback = use_judge_fallback
        self.math = MathRubric(parser=self.parser, timeout_seconds=timeout_seconds, max_workers=max_workers)
        self.add_metric(self.math_verify_score)
        self.add_metric(self.judge_score)
        self.add_reward_func(self.correct_answer)

    async def math_verify_score(self, completion: Any, answer: str, state: State, **_: Any) -> float:
        """1 when the boxed answer is mathematically equal to the reference."""
        score = await self._verified(completion, answer, state)
        if isinstance(score, JudgeError):
            raise score
        return score

    async def judge_score(self, prompt: Any, completion: Any, answer: str, state: State, **_: Any) -> float:
        """1 when the judge, asked only where mathematics did not agree, says that the answer is right."""
        verified = await self._verified(completion, answer, state)
        if verified == 1.0 or not self.use_judge_fallback or not self._response(completion).strip():
            return 0.0
        return verdict_of(await self.judge(prompt, completion, answer, state))

    async def correct_answer(self, prompt: Any, completion: Any, answer: str, state: State, **_: Any) -> float:
        """1 when mathematics or the judge says so."""
        verified = await self._verified(completion, answer, state)
        if self.use_judge_fallback and verified != 1.0:
            return await self.judge_score(prompt, completion, answer, state)
        if isinstance(verified, JudgeError):
            raise verified
        return verified

    async def _verified(self, completion: Any, answer: str, state: State) -> float | JudgeError:
        """The mathematical verdict, found once per rollout; a failure to find one is what the judge is there for."""
        known = state.get("math_verified")
        if known is None:
            try:
                known = await self.math.correct_answer(self.parser, completion, answer)
            except JudgeError as error:
                known = error
            state["math_verified"] = known
        return known if isinstance(known, JudgeError) else float(known)


def verdict_of(said: str) -> float:
    """A judge's answer as a score: the last yes, no, `\\boxed{A}` (right), `\\boxed{B}` or `\\boxed{C}` in it.

    A letter that stands alone is as good as a boxed one.

    Raises: JudgeError when there is none.
    """
    alone = _LETTER.fullmatch(said.strip())
    found = [(alone[1], "")] if alone else _VERDICT.findall(said)
    if not found:
        raise JudgeError(f"the judge said {said[:80]!r}, which is no verdict")
    letter, word = found[-1]
    return float(letter.upper() == "A" if letter else word.lower() in ("yes", "correct"))
