"""The files in `configs/`: each is what its first lines say, and can be run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mettle.envs import load_environment
from mettle.runs.launch import load_run_config
from mettle.runs.plan import plan
from mettle.trainer.policy import write_policy
from mettle.trainer.presets import PolicyConfig

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = sorted(path for path in (ROOT / "configs").rglob("*.toml") if path.name != "endpoints.toml")
ON_TWO_CORES = ("arithmetic", "code", "lora", "number-guess", "reverse-text", "self-play", "tool-use", "turn-credit")


def files_of(example: Path) -> list[Path]:
    """The files that it is run with: those of the last command in its first lines that names it, or itself alone."""
    said = [match[1] for match in re.finditer(r"mettle rl run ((?:\S+\.toml ?)+)", example.read_text())]
    own = str(example.relative_to(ROOT))
    with_it = [line.split() for line in said if own in line.split()]
    return [ROOT / name for name in with_it[-1]] if with_it else [example]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """For the configs that name a model directory which only their readers have."""
    return write_policy(tmp_path_factory.mktemp("own") / "model", PolicyConfig(num_layers=1))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_it_is_a_run_of_environments_that_take_its_arguments(example, model):
    files = files_of(example)
    has_path = any(re.search(r"^path = ", path.read_text(), re.MULTILINE) for path in files)
    config = load_run_config(files, ["--model.path", str(model)] if has_path else []).config
    specs = [*config.orchestrator.envs, *config.orchestrator.eval.envs]
    assert specs
    for spec in specs:
        if not spec.args.get("source"):  # else its rows are fetched
            load_environment(spec.id, **spec.args)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_its_first_lines_say_what_it_is_and_how_it_is_run(example):
    first = example.read_text().split("\n\n")[0]
    assert all(line.startswith("#") for line in first.splitlines())
    assert re.search(r"mettle rl (run|plan) configs/|docs/", first)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ON_TWO_CORES)
def test_it_can_be_planned(name):
    found = plan(load_run_config(files_of(ROOT / "configs" / f"{name}.toml")))
    assert found["step_s"] > 0
    assert found["memory_bytes"] < 8e9
