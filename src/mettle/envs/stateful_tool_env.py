"""Tools that need something of the rollout's state, which the model must not see or choose."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from mettle.envs.errors import EnvironmentFault, attributed
from mettle.envs.state import State
from mettle.envs.tool_env import ToolEnv, ToolFunction
from mettle.envs.tool_schema import tool_of
from mettle.records.messages import Messages


class StatefulToolEnv(ToolEnv):
    """A `ToolEnv` in which `update_tool_args` fills the arguments that are hidden from the model.

    `skipped_args` has the hidden parameters of each tool; what a model gives for one is left out before.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.skipped_args: dict[str, list[str]] = {}
        super().__init__(*args, **kwargs)

    def add_tool(self, tool: ToolFunction, args_to_skip: Sequence[str] = ()) -> None:
        """One more tool; the parameters in `args_to_skip` are left out of its schema."""
        described = tool_of(tool, frozenset(args_to_skip))
        self._register(tool, described)
        self.skipped_args[described["name"]] = list(args_to_skip)

    def remove_tool(self, tool: ToolFunction) -> None:
        """One tool less."""
        super().remove_tool(tool)
        self.skipped_args = {name: args for name, args in self.skipped_args.items() if name in self.tool_map}

    @abstractmethod
    def update_tool_args(
        self, tool_name: str, tool_args: dict[str, Any], messages: Messages, state: State, **kwargs: Any
    ) -> dict[str, Any]:
        """The arguments with what the state adds. What it raises is the rollout's error."""

    async def prepare_tool_args(
        self, tool_name: str, tool_args: dict[str, Any], messages: Messages, state: State
    ) -> dict[str, Any]:
        """The arguments with what the state adds.

        Raises: RolloutError when that fails, unless it is for a tool that the model made up.
        """
        hidden = self.skipped_args.get(tool_name, ())
        chosen = {name: value for name, value in tool_args.items() if name not in hidden}
        try:
            updated: Any = self.update_tool_args(tool_name, chosen, messages, state)
            filled: dict[str, Any] = await updated if hasattr(updated, "__await__") else updated
        except Exception as error:
            if tool_name not in self.tool_map:
                return tool_args
            raise attributed(error, EnvironmentFault, f"update_tool_args of {tool_name}") from error
        return filled
