"""Chromium, where it is installed, for tests of pages.

Parts: `needs_browser` (the mark), `playwright` (its library), `chromium` (a browser for the length of a block).
Invariant: what a page is waited for has minutes, where the library's own 5 and 30 s are short on a busy host.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

CHROMIUM: Final = Path("/usr/bin/chromium")
WAIT_MS: Final = 200_000
needs_browser: Final = pytest.mark.skipif(not CHROMIUM.exists(), reason=f"there is no browser at {CHROMIUM}")


def playwright() -> Any:
    """The library; the test, or the file, is skipped without it."""
    found = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found.expect.set_options(timeout=WAIT_MS)
    return found


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser. Make pages by its `new_context`."""
    with playwright().sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=str(CHROMIUM), args=["--no-sandbox", "--disable-gpu"], timeout=WAIT_MS
        )
        make = browser.new_context

        def new_context(**options: Any) -> Any:
            context = make(**options)
            context.set_default_timeout(WAIT_MS)
            return context

        browser.new_context = new_context
        yield browser
        browser.close()
