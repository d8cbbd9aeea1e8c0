"""Whether there is a terminal to browse in, and starting the browser there."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import click


def open_browser(path: Path | None, rollout: int | None) -> bool:
    """Open the evaluation browser, and say whether there was one to open.

    A terminal without Textual gets one line that says how to have the browser.
    """
    if not is_terminal() or (path is None and rollout is not None):
        return False
    if find_spec("textual") is None:
        click.echo(
            "note: pip install 'mettle-lab[tui]' opens this in a browser; --plain leaves this note out", err=True
        )
        return False
    from mettle.evals.places import is_collection
    from mettle.tui import app

    if path is not None and is_collection(path):
        app.browse(root=path)
    else:
        app.browse(path, rollout=rollout)
    return True


def is_terminal() -> bool:
    """Whether somebody sees what is drawn, and can press keys."""
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown", None)
