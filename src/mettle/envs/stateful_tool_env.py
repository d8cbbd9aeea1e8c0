"""Tools that need something of the rollout's state, which the model must not see or choose."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from mettle.envs.state import State
from mettle.envs.tool_env import ToolEnv, ToolFunction
from mettle.envs.tool_schema import tool_of
from mettle.records.messages import Messages


class StatefulToolEnv(ToolEnv):
    """A `ToolEnv` in which `update_tool_args` fills the arguments that are hidden from the model."""

    def add_tool(self, tool: ToolFunction, args_to_skip: Sequence[str] = ()) -> None:
        """One more tool; the parameters in `args_to_skip` are left out of its schema."""
        self._register(tool, tool_of(tool, frozenset(args_to_skip)))

    @abstractmethod
    def update_tool_args(
        self, tool_name: str, tool_args: dict[str, Any], messages: Messages, state: State, **kwargs: Any
    ) -> dict[str, Any]:
        """The arguments with what the state adds."""

    async def prepare_tool_args(
        self, tool_name: str, tool_args: dict[str, Any], messages: Messages, state: State
    ) -> dict[str, Any]:
        """The arguments with what the state adds."""
        updated: Any = self.update_tool_args(tool_name, tool_args, messages, state)
        filled: dict[str, Any] = await updated if hasattr(updated, "__await__") else updated
        return filled
