"""The examples of the page on rewards run as they stand."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import mettle.envs as vf

GUIDE = Path(__file__).resolve().parents[4] / "docs" / "how-to" / "reward-a-rollout.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)


def run(example: int) -> dict:
    names: dict = {}
    exec(compile(EXAMPLES[example], str(GUIDE), "exec"), names)  # the guide's own code is what is tested
    return names


async def test_the_first_example_rewards_and_measures(scripted):
    env = run(0)["load_environment"]()
    state = await env.run_rollout(env.get_dataset()[0], scripted("<answer> 4 </answer>"), "m")
    assert (state["reward"], state["metrics"]) == (1.0, {"correct": 1.0, "brief": 1.0, "num_turns": 1.0})


@pytest.mark.parametrize(("said", "reward"), [("x = 1", 1.0), ("x = ", 0.0)])
async def test_the_second_example_runs_in_a_process(finished, said, reward, tmp_path, monkeypatch):
    (tmp_path / "guide_parses.py").write_text(EXAMPLES[1])
    monkeypatch.syspath_prepend(str(tmp_path))
    module = ModuleType("guide_parses")
    monkeypatch.setitem(sys.modules, "guide_parses", module)
    exec(compile(EXAMPLES[1], "guide_parses.py", "exec"), module.__dict__)
    state = finished("", said)
    await vf.Rubric([module.parses]).score_rollout(state)
    assert (state["error"], state["reward"]) == (None, reward)


async def test_the_third_example_asks_a_judge(scripted, finished):
    rubric = run(2)["rubric"]
    client = scripted("Yes")
    rubric._judge._client = client
    state = finished("4", "four", [vf.UserMessage(content="2+2?")])
    await rubric.score_rollout(state)
    assert state["reward"] == 1.0
    assert "2+2?" in client.calls[0]["prompt"][0]["content"]


def test_every_name_that_the_guide_uses_is_there():
    for name in re.findall(r"\bvf\.([A-Za-z]\w*)", GUIDE.read_text(encoding="utf-8")):
        assert hasattr(vf, name), name
