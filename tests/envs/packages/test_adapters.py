"""Classes of adapter packages: found by name, imported when used, and named where they are not here."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import mettle.envs as vf
from mettle.envs.legacy.unavailable import ADAPTERS
from mettle.envs.packages import adapters
from mettle.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
HEAVY = "gymnasium reasoning_gym textarena mcp aiohttp"


def run(code: str) -> str:
    """What a new interpreter prints, with nothing of this checkout installed but its source."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env={"PYTHONPATH": str(ROOT / "src")}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_each_name_of_verifiers_is_offered_by_the_adapter_in_its_folder():
    declared = {}
    for manifest in ROOT.glob("adapters/*/pyproject.toml"):
        points = tomllib.loads(manifest.read_text())["project"]["entry-points"]["mettle.adapters"]
        declared |= dict.fromkeys(points, manifest.parent.name)
    assert declared == ADAPTERS
    assert set(vf._ADAPTERS) == set(ADAPTERS)


def test_finding_imports_no_adapter_and_using_one_imports_only_its_own():
    seen = run(
        "import sys, mettle.envs as vf\n"
        "from mettle.envs.packages.adapters import find_adapters\n"
        "assert 'GymEnv' in dir(vf) and 'GymEnv' in find_adapters()\n"
        "print(sorted(name for name in sys.modules if name.startswith('mettle_')))\n"
        "assert vf.GymEnv.__name__ == 'GymEnv' and vf.GymEnv is vf.GymEnv\n"
        f"print(sorted({{name for name in sys.modules if name.startswith('mettle_')}} | set('{HEAVY}'.split()) & set(sys.modules)))"
    )
    assert seen.splitlines() == ["[]", "['mettle_gym', 'mettle_gym.env']"]


def test_historical_paths_lead_to_the_adapters():
    assert run(
        "from mettle.envs.legacy.aliases import install_verifiers_alias\n"
        "install_verifiers_alias()\n"
        "from verifiers.envs.experimental.harbor_env.mcp import HarborMCPHealthcheck\n"
        "from verifiers.envs.textarena_env import TextArenaEnv\n"
        "import verifiers as vf\n"
        "print(HarborMCPHealthcheck.__module__, TextArenaEnv is vf.TextArenaEnv)"
    ) == "mettle_harbor.servers True"  # fmt: skip


def test_an_adapter_that_is_not_here_can_be_imported_and_says_what_to_install(monkeypatch):
    monkeypatch.setattr(adapters, "find_adapters", dict)
    named = vf._from_elsewhere("MCPEnv")
    with pytest.raises(
        UserError, match=r"MCPEnv .* is in an adapter, which is not installed: pip install .*adapters/mcp$"
    ):
        named(mcp_servers=[])
    with pytest.raises(AttributeError, match="no 'MazeEnv'"):
        _ = vf.MazeEnv


def test_somebody_elses_package_is_an_adapter_too(monkeypatch, tmp_path):
    (tmp_path / "mazes_of_a_test.py").write_text("class MazeEnv:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(adapters, "find_adapters", lambda: {"MazeEnv": "mazes_of_a_test:MazeEnv"})
    assert vf._from_elsewhere("MazeEnv").__module__ == "mazes_of_a_test"
