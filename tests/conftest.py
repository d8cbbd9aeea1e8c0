"""What every test can rely on."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """A shell that starts the tests in the background has them ignore Ctrl-C, and a child inherits that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
