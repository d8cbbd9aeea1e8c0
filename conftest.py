"""What every test can rely on, those of environments and adapters included."""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from mettle.clients.base import Client
from mettle.envs.packages.adapters import put_shipped_on_path
from mettle.records.messages import Response, ResponseMessage, ResponseTokens, Usage

# Other work on the same cores makes an example slow, which says nothing of the code.
settings.register_profile("mettle", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("mettle")
put_shipped_on_path()  # the tests of an adapter import it, installed or not


def pytest_configure() -> None:
    """A shell that starts the tests in the background has them ignore Ctrl-C, and a child inherits that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long go first: they are spread by file, and a long one at the end would keep one busy."""
    costs: defaultdict[Path, float] = defaultdict(float)
    for item in items:
        costs[item.path] += _processor_s(item)
    items.sort(key=lambda item: -costs[item.path])


def _processor_s(item: pytest.Item) -> float:
    """About what a test takes, by its markers: whole runs, several processes, much to compute, or none of these."""
    is_slow, is_e2e = item.get_closest_marker("slow"), item.get_closest_marker("e2e")
    if is_slow and is_e2e:
        return 15.0
    return 8.0 if is_slow else 3.0 if is_e2e else 0.1


class Scripted(Client):
    """A model that answers with `say(prompt)`: text, a dict of message fields, or an exception to raise."""

    base_url = "http://scripted/v1"

    def __init__(self, say: Callable[[Any], Any] | str) -> None:
        self.say = say if callable(say) else lambda _: say
        self.calls: list[dict[str, Any]] = []

    async def get_response(self, prompt, model, sampling_args=None, tools=None, **extra):
        self.calls.append({"prompt": list(prompt), "sampling_args": sampling_args, "tools": tools, **extra})
        said = self.say(prompt)
        if isinstance(said, BaseException):
            raise said
        fields = {"content": said} if isinstance(said, str) else dict(said)
        fields = {"finish_reason": "stop", "is_truncated": False, "content": None, **fields}
        usage = Usage(prompt_tokens=10, completion_tokens=3, total_tokens=13)
        return Response(id="r", created=0, model=model, usage=usage, message=ResponseMessage(**fields))


@pytest.fixture
def scripted() -> type[Scripted]:
    return Scripted


@pytest.fixture
def tokens() -> type[ResponseTokens]:
    return ResponseTokens
