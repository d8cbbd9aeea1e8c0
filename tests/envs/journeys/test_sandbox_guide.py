"""The examples in the how-to of sandboxes run as they stand, and give what they say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import mettle.envs as vf
from mettle.sandbox import SandboxConfig, probe

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "use-sandboxes.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)

pytestmark = pytest.mark.skipif(
    not probe(SandboxConfig()).is_at_least("ns"), reason="this host cannot isolate code; environments refuse it, too"
)


def load(example: int) -> dict:
    names: dict = {}
    exec(compile(EXAMPLES[example], str(GUIDE), "exec"), names)
    return names


def call(tool: str, **arguments: str) -> dict:
    return {"tool_calls": [{"id": "c", "name": tool, "arguments": json.dumps(arguments)}]}


@pytest.mark.parametrize(
    ("example", "said", "reward"),
    [
        (1, [call("bash", command="seq 2 99 | factor | awk 'NF == 2' | wc -l > answer.txt"), "done"], 1.0),
        (1, [call("bash", command="echo 24 > answer.txt"), "done"], 0.0),
        (1, ["25"], 0.0),
        (2, [call("python", code="n = 2**100"), call("python", code="sum(map(int, str(n)))"), "It is 115."], 1.0),
    ],
)
async def test_the_environments_reward_what_they_say(scripted, example, said, reward):
    env = load(example)["load_environment"]()
    turns = iter(said)
    state = await env.run_rollout(env.get_dataset()[0], scripted(lambda _: next(turns)), "m")
    await env.teardown()
    assert state["error"] is None
    assert state["reward"] == reward


async def test_the_programs_print_what_they_say():
    assert await load(0)["main"]() == ["passed", "wrong"]
    assert await load(3)["main"]() == "Linux\n"
    assert await load(4)["main"]() == "42\nmain.py\n"
    assert await load(5)["main"]() == "example.com:443 is not in network.allow"


def test_every_name_that_the_guide_uses_is_there():
    for name in re.findall(r"\bvf\.([A-Za-z]\w*)", GUIDE.read_text(encoding="utf-8")):
        assert hasattr(vf, name), name
