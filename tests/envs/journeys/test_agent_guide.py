"""The guide to agent programs: its example runs as it stands, and what it names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import mettle.envs as vf

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "train-an-agent-program.md"
AGENT = Path(__file__).resolve().parents[1] / "agents" / "tool_agent.py"
TEXT = GUIDE.read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize(("said", "reward"), [("42", 1.0), ("41", 0.0)])
async def test_the_example_runs_and_rewards_what_the_agent_wrote(scripted, said, reward):
    names: dict = {}
    exec(compile(EXAMPLES[0], str(GUIDE), "exec"), names)  # the guide's own code is what is tested
    env = names["load_environment"]()
    state = await env.run_rollout(env.get_dataset()[0], scripted(said), "m")
    await env.teardown()
    assert state["error"] is None, state["agent_stderr"]
    assert (state["reward"], len(state["trajectory"])) == (reward, 2)


async def test_the_subclass_of_the_guide_counts_the_agents_files(scripted):
    names: dict = {}
    exec(compile(EXAMPLES[1], str(GUIDE), "exec"), names)
    env = names["Counted"](
        "python3 /data/agent.py && touch a b",
        dataset=[{"question": "q"}],
        rubric=vf.Rubric([lambda state: state["num_files"]]),
        files={"/data/agent.py": AGENT.read_bytes()},
    )
    state = await env.run_rollout(env.get_dataset()[0], scripted("x"), "m")
    await env.teardown()
    assert state["reward"] == 3.0


def test_every_name_that_the_guide_uses_is_there():
    for name in re.findall(r"\bvf\.([A-Za-z]\w*)", TEXT):
        assert hasattr(vf, name), name
