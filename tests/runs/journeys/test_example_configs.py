"""Every example of a run can be read, fits its own ranks, and says what has been run of it."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from mettle.runs.fit import check_fit
from mettle.runs.launch import load_run_config

FOLDER = Path(__file__).parents[3] / "configs"
RUNS = sorted(path for path in FOLDER.glob("*.toml") if "orchestrator" in tomllib.loads(path.read_text()))
OF_GPUS = [path for path in RUNS if tomllib.loads(path.read_text()).get("trainer", {}).get("device") == "cuda"]


@pytest.fixture
def named_model(tmp_path):
    """A folder that says it is a model; nobody reads more of it before a run is made."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return tmp_path


def loaded(path, model):
    tree = tomllib.loads(path.read_text())
    # What has no environment of its own is laid over a recipe, as its first lines say.
    files = [path] if "envs" in tree["orchestrator"] else [FOLDER / "reverse-text.toml", path]
    return load_run_config(files, ["--model.path", str(model)] if "path" in tree.get("model", {}) else []).config


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_an_example_is_a_config(path, named_model):
    config = loaded(path, named_model)
    check_fit(config)
    assert path.read_text().startswith("# "), "the first lines say what it is"


@pytest.mark.parametrize("path", OF_GPUS, ids=lambda path: path.stem)
def test_an_example_for_gpus_says_what_has_been_run(path, named_model):
    head = path.read_text().partition("\n\n")[0].splitlines()
    assert any(line.startswith("# Run: ") for line in head)
    config = loaded(path, named_model)
    assert config.inference.device == "cuda"
    assert config.inference.canary_tolerance >= 0.02, "two sides in bfloat16"
    if config.deployment.engine == "ray":
        assert config.deployment.ray.gpus_per_rank == 1
        assert config.deployment.ray.gpus_per_replica >= 1


def test_the_examples_take_the_gpus_that_they_name():
    trees = {path.stem: tomllib.loads(path.read_text()) for path in OF_GPUS}
    for name, number in (("qwen3-30b-a3b-8gpu", 8), ("qwen3-0.6b-2nodes", 4)):
        ray, replicas = trees[name]["deployment"]["ray"], trees[name]["inference"].get("replicas", 1)
        ranks = trees[name]["deployment"]["num_trainer_ranks"] * ray["gpus_per_rank"]
        assert ranks + replicas * ray["gpus_per_replica"] == number
    assert "deployment" not in trees["qwen3-0.6b-1gpu"]
