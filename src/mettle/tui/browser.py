"""What a screen asks of the program that it is part of.

Parts: `Browser`, which `app` is. Invariant: no screen knows another; it says what is to be opened, and the program
knows which screen shows that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from textual.screen import Screen

from mettle.tui.catalog import Catalog
from mettle.tui.opened import OpenRun


class Browser(Protocol):
    """The program, as its screens see it."""

    catalog: Catalog

    def open_models(self, env_id: str) -> None:
        """Show the models that were evaluated on an environment."""

    def open_runs(self, env_id: str, model: str) -> None:
        """Show the evaluations of a model on an environment."""

    def open_run(self, path: Path) -> None:
        """Show one evaluation."""

    def open_comparison(self, before: Path, after: Path) -> None:
        """Show what changed between two evaluations."""

    def open_rollout(
        self, run: OpenRun, index: int, order: Callable[[], Sequence[int]], on_left: Callable[[int], Any]
    ) -> None:
        """Show a rollout; `order` gives those that the keys go through, `on_left` is told where one stopped."""

    def open_task(self, run: OpenRun, index: int) -> None:
        """Show all rollouts of the task that rollout `index` is of."""

    def leave(self, screen: Screen[None]) -> None:
        """Go back from a screen; from the first one, end."""

    def copy(self, text: str, what: str, source: str) -> None:
        """Put a text into the terminal's clipboard, or into a file where it is too long for that."""

    def refuse(self, why: str) -> None:
        """Say what went wrong."""
