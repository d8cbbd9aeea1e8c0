"""Mathematical answers, verified symbolically and never on the event loop.

Parts: `MathRubric`. An answer that is a plain integer is compared on the spot; anything else goes to warm worker
processes that all math rubrics share. Invariants: a verification that takes too long, or a reference that cannot be
read, leaves the rollout without a reward; only an answer that was found wrong, or none at all, is a 0.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from typing import Any

from mettle.envs.parsers.answers import extract_boxed_answer
from mettle.envs.parsers.parser import Parser
from mettle.envs.parsers.think_parser import MaybeThinkParser
from mettle.envs.rubrics.processes import shared_processes
from mettle.envs.rubrics.rubric import RewardFunc, Rubric
from mettle.envs.rubrics.values import Overrun
from mettle.errors import JudgeError, UserError

VERIFY = "mettle.envs.rubrics.math_verification:verify"
MAX_MEMORY_BYTES = 4 << 30
_INTEGER = re.compile(r"[+-]?[0-9]{1,40}")


class MathRubric(Rubric):
    """Adds `correct_answer`: 1 when the boxed answer means the same as the row's `answer`.

    `timeout_seconds` is CPU time of one verification. `max_workers` processes at most, within the machine's cores.
    """

    def __init__(
        self,
        funcs: Sequence[RewardFunc] | None = None,
        weights: Sequence[float] | None = None,
        parser: Parser | None = None,
        max_workers: int = 8,
        timeout_seconds: float = 5,
        max_verify_chars: int = 50_000,
        **kwargs: Any,
    ) -> None:
        super().__init__(funcs, weights, parser or MaybeThinkParser(_strictly_boxed), **kwargs)
        self.timeout_seconds = timeout_seconds
        self.max_workers = max_workers
        self.max_verify_chars = max_verify_chars
        self.add_reward_func(self.correct_answer)

    async def correct_answer(self, parser: Parser, completion: Any, answer: str, **_: Any) -> float:
        """1 when the parsed answer equals the reference, 0 when it does not or when there is none."""
        said = parser.parse_answer(completion)
        said = "" if said is None else str(said)
        reference = str(answer).strip()
        if not reference:
            raise JudgeError("the row has no answer to compare with")
        if not said.strip() or len(said) > self.max_verify_chars:
            return 0.0
        return float(await self.verify(reference, said.strip()))

    async def verify(self, reference: str, said: str) -> bool:
        """Whether `said` means the same as `reference`.

        Raises: JudgeError when that takes longer than `timeout_seconds`, or cannot be found out.
        """
        if _INTEGER.fullmatch(reference) and _INTEGER.fullmatch(said):
            return int(reference) == int(said)
        require_math_verify()
        processes = shared_processes("math", self.max_workers, max_memory_bytes=MAX_MEMORY_BYTES)
        try:
            return bool(
                await processes.call(VERIFY, {"reference": reference, "answer": said}, timeout_s=self.timeout_seconds)
            )
        except Overrun as error:
            raise JudgeError(f"no verdict on {said[:80]!r} within {self.timeout_seconds} s") from error


def require_math_verify() -> None:
    """Raises: UserError when the package is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise UserError("comparing mathematical answers needs math-verify; pip install 'mettle-lab[math]'")


def _strictly_boxed(text: str) -> str:
    return extract_boxed_answer(text, strict=True)
