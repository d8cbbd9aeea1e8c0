"""Counting tool calls, as a rubric of its own: `ToolRubric`, which environments of verifiers before 0.1.9 make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mettle.envs.parsers.parser import Parser
from mettle.envs.rubrics.rubric import RewardFunc
from mettle.envs.tool_env import ToolMonitorRubric, total_tool_calls


class ToolRubric(ToolMonitorRubric):
    """The given functions, and the metrics `total_tool_calls` and `<tool>_calls`, which weigh 0."""

    def __init__(
        self,
        tools: Sequence[Callable[..., Any]] | None = None,
        funcs: Sequence[RewardFunc] | None = None,
        weights: Sequence[float] | None = None,
        parser: Parser | None = None,
        **kwargs: Any,
    ) -> None:
        self.tools = list(tools or ())
        super().__init__([tool.__name__ for tool in self.tools], funcs=funcs, weights=weights, parser=parser, **kwargs)

    async def total_tool_calls(self, completion: Any, **_: Any) -> float:
        """How many calls a completion has; for environments that give it to a rubric of theirs."""
        return total_tool_calls(completion)
