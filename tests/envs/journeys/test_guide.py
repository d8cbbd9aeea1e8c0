"""The examples in the guide run as they stand, and reward what they say."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

import mettle.envs as vf

HOW_TO = Path(__file__).resolve().parents[3] / "docs" / "how-to"
GUIDE, LIMITS = HOW_TO / "write-an-environment.md", HOW_TO / "limit-and-isolate-rollouts.md"


def examples_in(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


EXAMPLES = examples_in(GUIDE)


def load(example):
    names: dict = {}
    exec(compile(EXAMPLES[example], str(GUIDE), "exec"), names)  # the guide's own code is what is tested
    return names["load_environment"]()


@pytest.mark.parametrize(
    ("example", "said", "reward"),
    [
        (0, ["<answer>4</answer>"], 1.1),
        (0, ["<answer>5</answer>"], 0.1),
        (0, ["4"], 0.02),  # a fifth of the tenth for the form: the text stands, without its tag
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


@pytest.mark.parametrize("page", [GUIDE, LIMITS], ids=lambda page: page.stem)
def test_every_name_that_the_guide_uses_is_there(page):
    for name in re.findall(r"\bvf\.([A-Za-z]\w*)", page.read_text(encoding="utf-8")):
        assert hasattr(vf, name), name


async def test_the_window_of_the_guide_keeps_a_long_conversation_short(scripted):
    names: dict = {}
    exec(compile(examples_in(LIMITS)[0], str(LIMITS), "exec"), names)
    env = names["load_environment"]()
    call = {"tool_calls": [{"id": "c", "name": "look_up", "arguments": '{"word": "tree"}'}]}
    turns = iter([call] * 10 + ["done"])
    client = scripted(lambda _: next(turns))
    state = await env.run_rollout(env.get_dataset()[0], client, "m")
    assert (state["error"], state["reward"], len(state["completion"])) == (None, 1.0, 21)
    sizes = [sum(len(message.get("content") or "") for message in asked["prompt"]) for asked in client.calls]
    assert max(sizes) < 4 * 2800 * 2 < sum(len(message.content or "") for message in state["completion"])


def test_the_table_of_limits_names_arguments_that_there_are():
    for name in re.findall(r"^\| `(\w+)` \|", LIMITS.read_text(encoding="utf-8"), re.MULTILINE):
        assert hasattr(vf.ToolEnv(dataset=[{"question": "q"}]), name), name


def test_the_page_shows_the_figures_that_were_measured():
    root = HOW_TO.parents[1]
    spec = importlib.util.spec_from_file_location("envs_rollout", root / "benchmarks" / "envs_rollout.py")
    benchmark = importlib.util.module_from_spec(spec)
    sys.modules["envs_rollout"] = benchmark
    spec.loader.exec_module(benchmark)
    measured = json.loads((root / "benchmarks" / "results" / "envs_rollout.json").read_text())
    page = (root / "docs" / "explanation" / "environments.md").read_text(encoding="utf-8")
    assert benchmark.table(measured["cells"]) in page
