"""A page about environments of a folder: what each is, and what was measured of it.

Parts: `catalogue_markdown`. What an environment is comes from loading it; what its demonstrations and a refusal earn
comes from its quality card (`mettle env check NAME --write`). Invariant: no rollout is run here.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from mettle.envs.cli_agent_env import CliAgentEnv
from mettle.envs.environment import Environment
from mettle.envs.multiturn_env import MultiTurnEnv
from mettle.envs.packages.loading import load_environment
from mettle.envs.rubrics.code_rubric import CodeRubric
from mettle.envs.sandbox_mixin import SandboxMixin
from mettle.envs.singleturn_env import SingleTurnEnv

CARD = "QUALITY.md"
NEEDS = re.compile(r"mettle-lab\[(\w+)\]|pip install \./adapters/(\w+)")
"""How a README names an extra, or an adapter."""
INTRODUCTION = """# Shipped environments

What each is comes from loading it with its defaults; what was earned comes from its quality card, which
`mettle env check NAME --write` makes: `shown` is the mean reward of the environment's own demonstrations, `refused`
that of "I'm sorry, but I can't help with that." (`sorry` is a guess in a word game). A reward is a sum of functions
with weights; metrics that do not count are in the README, as are the arguments. Extras and adapters are those that
the README names; some are for options only.

| environment | what | turns | tools | sandbox | extras | reward | shown | refused | quality |
|---|---|---|---|---|---|---|---|---|---|
"""


def catalogue_markdown(folder: Path, note: str, link: str) -> str:
    """The page about the packages in `folder`, which it reaches by `link`."""
    packages = sorted(path.parent for path in folder.glob("*/pyproject.toml"))
    return f"{note}\n\n{INTRODUCTION}" + "".join(f"{_row(package, link)}\n" for package in packages)


def _row(package: Path, link: str) -> str:
    project = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    readme = (package / "README.md").read_text(encoding="utf-8")
    card = package / CARD
    text = card.read_text(encoding="utf-8") if card.is_file() else ""
    env = load_environment(project["name"])
    cells = [
        f"[`{project['name']}`]({link}/{package.name}/README.md)",
        project["description"].rstrip("."),
        _turns(env),
        _tools(env),
        _sandbox(env),
        ", ".join(sorted({"".join(found) for found in NEEDS.findall(readme)})) or "-",
        _reward(env),
        _earned(text, "gold"),
        _earned(text, "refusal"),
        f"[card]({link}/{package.name}/{CARD})" if text else "-",
    ]
    return f"| {' | '.join(cells)} |"


def _turns(env: Environment) -> str:
    if isinstance(env, SingleTurnEnv) or not isinstance(env, MultiTurnEnv):
        return "1"
    most = env.max_turns
    return "1" if most == 1 else f"up to {most}" if most > 0 else "until it ends"


def _tools(env: Environment) -> str:
    if isinstance(env, CliAgentEnv):
        return "the agent's own"
    return ", ".join(f"`{tool['name']}`" for tool in env.tool_defs or ()) or "-"


def _sandbox(env: Environment) -> str:
    if isinstance(env, SandboxMixin):
        return "a machine"
    rubrics = [env.rubric, *getattr(env.rubric, "rubrics", ())]
    return "judges code" if any(isinstance(rubric, CodeRubric) for rubric in rubrics) else "-"


def _reward(env: Environment) -> str:
    pairs = zip(env.rubric.get_reward_func_names(), env.rubric.get_reward_weights(), strict=True)
    counted = [(name, weight) for name, weight in pairs if weight]
    return " + ".join(f"`{name}`" if weight == 1 else f"{weight:g} `{name}`" for name, weight in counted)


def _earned(card: str, answer: str) -> str:
    found = re.search(rf"^\| {answer} \| \d+ \| (\S+) \|", card, re.MULTILINE)
    return found[1] if found else "-"
