"""What `rl init` writes loads and names the model; what cannot be trained is refused."""

import json
import shutil
from pathlib import Path

import pytest
from tests.trainer.conftest import MINI

from mettle.errors import UserError
from mettle.runs.first_config import write_first_config
from mettle.runs.launch import load_run_config
from mettle.trainer.policy import write_policy


@pytest.fixture
def mixture(model, tmp_path):
    folder = tmp_path / "mixture"
    shutil.copytree(model, folder)
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | {"num_experts": 4}))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_policy(tmp_path_factory.mktemp("own") / "mine", MINI)


@pytest.mark.parametrize("is_full", [False, True])
def test_what_is_written_loads(model, tmp_path, is_full):
    path = write_first_config("reverse-text", model, tmp_path / "own.toml", is_full=is_full)
    config = load_run_config([path]).config
    assert config.model.path == model.resolve()
    assert (config.trainer.lora is None) == is_full
    assert config.trainer.optim.lr == (1e-6 if is_full else 1e-4)
    assert config.trainer.dtype == "float32", "its files are"
    assert config.orchestrator.sampling.max_tokens == 512
    assert config.inference.max_model_len == 1024
    with pytest.raises(UserError, match="is there already"):
        write_first_config("reverse-text", model, path)


def test_what_cannot_be_trained_is_refused(model, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(model, bare)
    (bare / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="lacks a chat template"):
        write_first_config("reverse-text", bare, tmp_path / "a.toml")
    (bare / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"holds no \.safetensors file"):
        write_first_config("reverse-text", bare, tmp_path / "a.toml")
    with pytest.raises(UserError, match="is no model directory"):
        write_first_config("reverse-text", tmp_path, tmp_path / "a.toml")
    with pytest.raises(UserError, match="no-such-env"):
        write_first_config("no-such-env", model, tmp_path / "a.toml")
    assert list(tmp_path.glob("*.toml")) == []
    short = tmp_path / "short"
    shutil.copytree(model, short)
    (short / "config.json").write_text(
        json.dumps(json.loads((model / "config.json").read_text()) | {"dtype": "bfloat16"})
    )
    text = write_first_config("reverse-text", short, tmp_path / "b.toml").read_text()
    assert 'dtype = "bfloat16"' in text or "this processor has no bfloat16" in text


def test_a_mixture_gets_adapters_on_its_attention(mixture, tmp_path):
    config = load_run_config([write_first_config("reverse-text", mixture, tmp_path / "own.toml")]).config
    assert config.trainer.lora is not None
    assert not config.trainer.lora.mlp


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[2] / "configs").glob("own-*.toml")), ids=lambda p: p.stem
)
def test_the_examples_load_with_a_model_in_their_place(model, path):
    text = path.read_text()
    assert "# Run: " in text, "each says what of it was run"
    config = load_run_config([path], ["--model.path", str(model)]).config
    assert config.trainer.lora is not None
