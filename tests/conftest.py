"""What every test can rely on."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

# Other work on the same cores makes an example slow, which says nothing of the code.
settings.register_profile("mettle", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("mettle")


def pytest_configure() -> None:
    """A shell that starts the tests in the background has them ignore Ctrl-C, and a child inherits that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
