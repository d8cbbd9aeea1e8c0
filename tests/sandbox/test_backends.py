"""Backends are found by name, listed without being imported, and a judge of each keeps the contract."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from pydantic import ValidationError

from mettle.errors import UserError
from mettle.sandbox import SandboxConfig, SandboxPool, backends, plugins
from mettle.sandbox.service.client.judge import RemoteJudge
from mettle.sandbox.testing import JudgeContract

ROOT = Path(__file__).parents[2]


@pytest.mark.usefixtures("_needs_isolation")
class TestIsolatedJudge(JudgeContract):
    @pytest.fixture
    def judge(self, pool: SandboxPool) -> SandboxPool:
        return pool


class TestUnsafeJudge(JudgeContract):
    @pytest.fixture
    def judge(self, unsafe_pool: SandboxPool) -> SandboxPool:
        return unsafe_pool


def test_our_own_backends_are_registered_like_those_of_others() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"][plugins.ENTRY_POINT_GROUP] == plugins.BUILT_IN


def test_listing_imports_no_backend() -> None:
    code = (
        "import sys; from mettle.sandbox.backends import backend_names; print(*backend_names());"
        "rooms = 'embedded', 'containers.pool', 'containers.docker.host', 'containers.kubernetes.host', 'service';"
        "assert not [n for n in sys.modules if n == 'aiohttp' or n.startswith(tuple('mettle.sandbox.' + r for r in rooms))]"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert {"zygote", "unsafe", "remote"} <= set(ran.stdout.split())


def test_an_unknown_backend_is_named_with_those_that_there_are() -> None:
    with pytest.raises(ValidationError, match=r"no sandbox backend 'zigote'; there are .*zygote"):
        SandboxConfig(backend="zigote")
    with pytest.raises(UserError, match="no sandbox backend 'zigote'"):
        backends.find_backend("zigote")


def test_a_backend_of_somebody_else_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("theirs", "mettle.sandbox.service.client:REMOTE", plugins.ENTRY_POINT_GROUP)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point] if group == "mettle.sandboxes" else [])
    assert "theirs" in backends.backend_names()
    config = SandboxConfig(backend="theirs")
    assert isinstance(backends.open_judge(config), RemoteJudge)
    with pytest.raises(UserError, match="open_judge"):
        SandboxPool(config)


def test_services_belong_to_the_remote_backend_and_to_no_other() -> None:
    with pytest.raises(ValidationError, match=r"sandbox\.urls"):
        SandboxConfig(backend="remote")
    with pytest.raises(ValidationError, match=r"sandbox\.urls"):
        SandboxConfig(urls=("http://127.0.0.1:1",))
