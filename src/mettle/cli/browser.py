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
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM") in ("dumb", "unknown"):
        return False
    if find_spec("textual") is None:
        click.echo("note: pip install 'mettle[tui]' opens this in a browser of evaluations; --plain is quiet", err=True)
        return False
    if path is None and rollout is not None:
        return False
    from mettle.tui.app import browse

    browse(path, rollout=rollout)
    return True
