"""The examples in the guide run as they stand, and reward what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import mettle.envs as vf

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "write-an-environment.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)


def load(example):
    names: dict = {}
    exec(compile(EXAMPLES[example], str(GUIDE), "exec"), names)  # the guide's own code is what is tested
    return names["load_environment"]()


@pytest.mark.parametrize(
    ("example", "said", "reward"),
    [
        (0, ["<answer>4</answer>"], 1.1),
        (0, ["<answer>5</answer>"], 0.1),
        (0, ["4"], 0.0),
        (1, ["3", "2", "1", "0", "-"], 1.0),
        (1, ["3", "x", "2", "x", "x", "x", "x", "x"], 0.5),
        (2, [{"tool_calls": [{"id": "c", "name": "multiply", "arguments": '{"a": 12, "b": 13}'}]}, "156"], 1.0),
        (2, ["155"], 0.0),
    ],
)
async def test_the_examples_run_and_reward_what_they_say(scripted, example, said, reward):
    env = load(example)
    turns = iter(said)
    state = await env.run_rollout(env.get_dataset()[0], scripted(lambda _: next(turns)), "m")
    assert state["error"] is None
    assert state["reward"] == pytest.approx(reward)


def test_every_name_that_the_guide_uses_is_there():
    for name in re.findall(r"\bvf\.([A-Za-z]\w*)", GUIDE.read_text(encoding="utf-8")):
        assert hasattr(vf, name), name
