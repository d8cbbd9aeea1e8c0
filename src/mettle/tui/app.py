"""The program: themes, clipboard, help, and the way from one screen to the next.

Parts: `EvaluationBrowser`, `browse`. Invariant: leaving the last screen asks for nothing and loses nothing; nothing
here writes to an evaluation.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from textual.app import App
from textual.binding import Binding, BindingType
from textual.screen import Screen

from mettle.evals.reader import evaluation_folder
from mettle.tui.catalog import Catalog
from mettle.tui.opened import OpenRun
from mettle.tui.screens.choices import EnvironmentsScreen, ModelsScreen
from mettle.tui.screens.compare import CompareScreen
from mettle.tui.screens.help import HelpScreen
from mettle.tui.screens.rollout import RolloutScreen
from mettle.tui.screens.run import RunScreen
from mettle.tui.screens.runs import RunsScreen
from mettle.tui.screens.task import TaskScreen
from mettle.tui.text import sendable
from mettle.tui.theme import DARK, LIGHT, first_theme
from mettle.wording import compact, one_line

CLIPBOARD_CHARS = 1_000_000
"""Terminals drop a longer text without a word."""


def browse(path: Path | None = None, *, root: Path | None = None, rollout: int | None = None) -> None:
    """Open the browser: on everything that is saved under `root`, on one evaluation, or on one of its rollouts.

    Raises: UserError when `path` holds no evaluation.
    """
    browser = EvaluationBrowser(root or Path(), path and evaluation_folder(path), rollout)
    browser.run()
    if browser.fault is not None:
        raise browser.fault


class EvaluationBrowser(App[None]):
    """The evaluation browser."""

    TITLE = "Mettle"
    ENABLE_COMMAND_PALETTE = False
    CSS_PATH = "browser.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("ctrl+t", "toggle_theme", "Light or dark", show=False),
    ]

    def __init__(self, root: Path, path: Path | None = None, rollout: int | None = None) -> None:
        super().__init__()
        self.catalog = Catalog(root)
        self._path, self._rollout = path, rollout

    def on_mount(self) -> None:
        """Begin with all evaluations, with the one that was asked for on top of them."""
        self.register_theme(DARK)
        self.register_theme(LIGHT)
        self.theme = first_theme(os.environ)
        self.push_screen(EnvironmentsScreen())
        if self._path is not None:
            self.push_screen(RunScreen(self._path, rollout=self._rollout))

    def open_models(self, env_id: str) -> None:
        """Show the models that were evaluated on an environment."""
        self.push_screen(ModelsScreen(env_id))

    def open_runs(self, env_id: str, model: str) -> None:
        """Show the evaluations of a model on an environment."""
        self.push_screen(RunsScreen(env_id, model))

    def open_run(self, path: Path) -> None:
        """Show one evaluation."""
        self.push_screen(RunScreen(path))

    def open_comparison(self, before: Path, after: Path) -> None:
        """Show what changed between two evaluations."""
        self.push_screen(CompareScreen(before, after))

    def open_rollout(
        self, run: OpenRun, index: int, order: Callable[[], Sequence[int]], on_left: Callable[[int], Any]
    ) -> None:
        """Show a rollout, and those before and after it in `order`."""
        self.push_screen(RolloutScreen(run, index, order, on_left=on_left))

    def open_task(self, run: OpenRun, index: int) -> None:
        """Show all rollouts of the task that rollout `index` is of."""
        self.push_screen(TaskScreen(run, index))

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """The colours of ours that Textual's themes do not have."""
        return {"muted": DARK.variables["muted"]}

    @property
    def fault(self) -> Exception | None:
        """What ended the browser, where it was a mistake of ours."""
        return self._exception

    def _fatal_error(self) -> None:
        # Textual would print a traceback with the values of all variables: texts of models, which may hold escapes.
        self._close_messages_no_wait()

    def leave(self, screen: Screen[None]) -> None:
        """Go back from a screen; from the first one, end."""
        if isinstance(screen, EnvironmentsScreen):
            self.exit()
        elif screen is self.screen:
            self.pop_screen()

    def copy(self, text: str, what: str, source: str) -> None:
        """Put a text into the terminal's clipboard, or into a file where it is too long for that."""
        text = sendable(text)
        if len(text) <= CLIPBOARD_CHARS:
            self.copy_to_clipboard(text)
            self.notify(f"copied {what}, {compact(len(text))} characters", markup=False, timeout=2)
            return
        target = Path(f"{re.sub('[^A-Za-z0-9_-]+', '-', source).strip('-')}.txt")
        try:
            target.write_text(text, encoding="utf-8")
        except OSError as error:
            self.refuse(f"{what} is too long for a clipboard, and {target} cannot be written: {error.strerror}")
            return
        self.notify(f"{what} is too long for a clipboard; wrote {target}", markup=False)

    def refuse(self, why: str) -> None:
        """Say what went wrong."""
        self.notify(one_line(why, 400), severity="error", markup=False)

    def action_toggle_theme(self) -> None:
        """Change between light and dark."""
        self.theme = LIGHT.name if self.current_theme.dark else DARK.name

    def action_help(self) -> None:
        """Say what the keys of this screen do."""
        if not isinstance(self.screen, HelpScreen):
            self.push_screen(HelpScreen(self.screen.active_bindings))
