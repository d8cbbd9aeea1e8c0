"""An adapter taken out and one merged: other programs load both, with the logprobs that were trained."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.trainer.conftest import ALONE

from mettle.errors import UserError
from mettle.storage.weights import read_canary
from mettle.trainer.config import LoraConfig
from mettle.trainer.loading import load_policy
from mettle.trainer.merging import write_adapter, write_merged
from mettle.trainer.publish import compute_canary


@pytest.fixture
def published(make_run, train_here):
    """A run of one step of adapters."""
    run_dir = make_run(shipped=1, max_steps=1, lora=LoraConfig(rank=4, alpha=8))
    train_here(run_dir)
    return run_dir


def logprobs(model, canary):
    rows = [row[:n].astype(np.int64) for row, n in zip(canary.token_ids, canary.lengths, strict=True)]
    return compute_canary(load_policy(model, ALONE, dtype=torch.float32), rows, ALONE).logprobs


def test_a_merged_model_has_the_logprobs_of_the_adapter(published, tmp_path):
    folder = write_merged(published.model, published.version(1), tmp_path / "merged")
    canary = read_canary(published.version(1))
    np.testing.assert_allclose(logprobs(folder, canary), canary.logprobs, atol=2e-5)
    assert {path.name for path in folder.iterdir()} == {path.name for path in published.model.iterdir()}
    before = load_file(published.model / "model.safetensors")
    changed = {name for name, t in load_file(folder / "model.safetensors").items() if not torch.equal(t, before[name])}
    assert changed
    assert all("_proj" in name for name in changed)


def test_an_adapter_is_taken_out_and_names_its_base(published, tmp_path):
    folder = write_adapter(published.version(1), tmp_path / "out", base=published.model)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(published.model.resolve())
    assert write_merged(published.model, folder, tmp_path / "merged").exists()


def test_an_adapter_of_another_base_is_refused(published, make_run, tmp_path):
    other = make_run("other", shipped=0)
    data = bytearray((other.model / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (other.model / "model.safetensors").write_bytes(data)
    with pytest.raises(UserError, match=r"is of another base than .*: their digests differ"):
        write_merged(other.model, published.version(1), tmp_path / "merged")
    with pytest.raises(UserError, match="is not a model directory"):
        write_merged(tmp_path, published.version(1), tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
