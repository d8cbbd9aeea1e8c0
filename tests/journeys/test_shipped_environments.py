"""Every environment in the repository: it loads by name, its gold answers score best, and its package is whole."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path

import pytest

import mettle.envs as vf
from mettle.envs.demonstrations import Demonstrator
from mettle.sandbox import SandboxConfig, probe

FOLDER = Path(__file__).resolve().parents[2] / "environments"
PACKAGES = sorted(path.parent.name for path in FOLDER.glob("*/pyproject.toml"))


CHANCE = {"kuhn_poker"}
"""Zero-sum games, in which good play is no certain win, and nonsense costs."""


ISOLATED = {"agent_task", "code_judge", "shell_task"}
"""They run code, which a host that cannot isolate it refuses."""
MACHINES = {"agent_task", "shell_task"}
"""Each of their rollouts takes a machine or two; their own tests try every family."""
CAN_ISOLATE = probe(SandboxConfig()).is_at_least("ns")


class Nonsense(vf.Client):
    """Says nothing of use."""

    async def get_response(self, prompt, model, sampling_args=None, tools=None, **_):
        message = vf.ResponseMessage(content="?", finish_reason="stop", is_truncated=False)
        return vf.Response(id="", created=0, model=model, usage=None, message=message)


@cache
def loaded(package: str) -> vf.Environment:
    """The environment, for the test that plays in it and those that look at it; some take seconds to make their rows."""
    return vf.load_environment(package.replace("_", "-"))


def test_there_are_environments():
    assert {"arithmetic", "number_guess", "reverse_text", "science_choice"} <= set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
async def test_what_is_demonstrated_is_rewarded_and_nonsense_is_not(package):
    if package in ISOLATED and not CAN_ISOLATE:
        pytest.skip("this host cannot isolate code")
    env = loaded(package)
    for row in list(env.get_eval_dataset(n=3 if package in MACHINES else 10)):
        gold = await env.run_rollout(row, Demonstrator(env), "gold")
        nonsense = await env.run_rollout(row, Nonsense(), "nonsense")
        assert gold["error"] is None
        if package in CHANCE:
            assert nonsense["reward"] == -1.0
            assert gold["reward"] > -1.0
        else:
            assert gold["reward"] >= 1.0
            assert nonsense["reward"] == 0.0
    await env.teardown()


@pytest.mark.parametrize("package", PACKAGES)
def test_rows_are_the_same_every_time(package):
    first, second = loaded(package), vf.load_environment(package.replace("_", "-"))
    assert first.get_dataset().to_list() == second.get_dataset().to_list()
    assert first.get_eval_dataset().to_list() == second.get_eval_dataset().to_list()
    assert len(first.get_dataset()) >= 1000


@pytest.mark.parametrize("package", PACKAGES)
def test_the_package_is_whole(package):
    home = FOLDER / package
    project = tomllib.loads((home / "pyproject.toml").read_text())["project"]
    assert project["name"] == package.replace("_", "-")
    assert project["entry-points"]["mettle.envs"] == {project["name"]: f"{package}:load_environment"}
    assert all(name.partition("[")[0] == "mettle-lab" for name in project["dependencies"])
    assert (home / "tests" / f"test_{package}.py").is_file()
    readme = (home / "README.md").read_text()
    assert "reward" in readme
    for function in {*loaded(package).rubric.get_reward_func_names()} - {"num_turns"}:
        assert f"`{function}`" in readme


@pytest.mark.parametrize("package", PACKAGES)
def test_its_quality_card_is_of_this_version_and_passes(package):
    version = tomllib.loads((FOLDER / package / "pyproject.toml").read_text())["project"]["version"]
    card = (FOLDER / package / "QUALITY.md").read_text()
    assert card.startswith(f"# Quality of {package.replace('_', '-')} {version}\n\nResult: pass\n")
