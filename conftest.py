"""What every test can rely on, those of environments and adapters included."""

from __future__ import annotations

import gc
import importlib
import os
import re
import shutil
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.configuration import set_hypothesis_home_dir

from mettle.clients.base import Client
from mettle.envs.packages.adapters import put_shipped_on_path
from mettle.records.messages import Response, ResponseMessage, ResponseTokens, Usage

# Other work on the same cores makes an example slow, which says nothing of the code.
settings.register_profile("mettle", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("mettle")
put_shipped_on_path()  # the tests of an adapter import it, installed or not


ROOT: Final = Path(__file__).resolve().parent
_OF_A_PERSON: Final = re.compile(
    re.escape(str(ROOT)) + r"/(?:(?:runs|outputs|hub|\.mettle)|environments/[^/]+/outputs)(?:/|$)"
)
"""What the commands write that a person tries in this checkout."""
_TOUCHES: Final = frozenset(
    {"open", "os.listdir", "os.scandir", "os.mkdir", "os.rename", "os.remove", "sqlite3.connect"}
)
_OF_A_RUN: Final = (
    "mettle.cli.main", "mettle.hub.server", "mettle.inference.process", "mettle.orchestrator.loop",
    "mettle.runs.launch", "mettle.trainer.initial", "mettle.trainer.process",
)  # fmt: skip
_ADDRESS: Final = re.compile(r"0x[0-9a-f]{6,}")
_is_testing = False
set_hypothesis_home_dir(ROOT / ".hypothesis")
# What is imported and collected stays: looking through its millions of objects for garbage, again and again, is half of
# what collecting costs, and a part of every test.
gc.disable()


def pytest_configure() -> None:
    """A shell that starts the tests in the background has them ignore Ctrl-C, and a child inherits that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Tests run in an empty folder: what `make quickstart` has left in the checkout must not decide how they end."""
    if session.config.pluginmanager.has_plugin("dsession"):
        return  # its workers run the tests, and have yet to start from here
    here, empty = Path.cwd(), Path(tempfile.mkdtemp(prefix="mettle-tests-"))
    empty.chmod(0o755)  # some of what is started is another user

    def leave() -> None:
        os.chdir(here)
        shutil.rmtree(empty, ignore_errors=True)

    os.chdir(empty)
    session.config.add_cleanup(leave)
    sys.addaudithook(_refuse_what_is_a_persons)


def pytest_collection_finish() -> None:
    """From here on garbage is looked for again, among what the tests make."""
    gc.freeze()
    gc.enable()


def _refuse_what_is_a_persons(event: str, args: tuple[Any, ...]) -> None:
    """Fail the test that reads or writes the runs and results of whoever works in this checkout."""
    if _is_testing and event in _TOUCHES and isinstance(args[0], str | os.PathLike):
        try:
            path = os.path.abspath(args[0])
        except OSError:
            return  # the current directory is gone
        if isinstance(path, str) and _OF_A_PERSON.match(path):
            pytest.fail(f"a test touches {path}, which is not the tests' ({event}); give it a folder of its own")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    """Only tests are watched: collecting them walks the whole tree."""
    global _is_testing
    _is_testing = True
    try:
        return (yield)
    finally:
        _is_testing = False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """A test that leaves something in the current directory would leave it in the checkout."""
    result = yield
    left = sorted(os.listdir())
    for name in left:
        shutil.rmtree(name) if os.path.isdir(name) else os.remove(name)
    if left:
        pytest.fail(f"the test left {', '.join(left)} in the current directory; let it write to tmp_path")
    return result


def pytest_make_parametrize_id(val: Any, argname: str) -> str | None:
    """Names of tests are the same in every process: all are lost when two workers of a run collect different ones.

    Bytes may hold what a clock or a chance has put there (the header of gzip does), and a text the address of an
    object, so these are counted and not shown.
    """
    if isinstance(val, bytes | bytearray) or (isinstance(val, str) and _ADDRESS.search(val)):
        return argname
    return None


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


@pytest.fixture(scope="module")
def forked() -> Iterator[None]:
    """Processes of ours begin with what this one has imported; `test_quickstart` starts those of a run for real."""
    from tests.forking import forked_processes

    for module in _OF_A_RUN:
        importlib.import_module(module)
    with forked_processes():
        yield


@pytest.fixture(scope="module")
def forked_commands() -> Iterator[None]:
    """The same for commands and the Hub only: what they start in turn has an interpreter, and a name, of its own."""
    from tests.forking import forked_processes

    importlib.import_module("mettle.cli.main")
    with forked_processes("mettle.cli", "mettle.hub"):
        yield


@pytest.fixture(scope="session")
def openai() -> ModuleType:
    """OpenAI's SDK, imported where it is used: every process that runs tests collects them all."""
    return importlib.import_module("openai")


@pytest.fixture(scope="session")
def anthropic() -> ModuleType:
    """Anthropic's SDK, imported where it is used."""
    return importlib.import_module("anthropic")


@pytest.fixture
def scripted() -> type[Scripted]:
    return Scripted


@pytest.fixture
def tokens() -> type[ResponseTokens]:
    return ResponseTokens
