"""What is read of a model's folder comes out again under the same names, for each family."""

import pytest
import torch
from safetensors.torch import load_file
from tests.trainer.conftest import ALONE
from tests.trainer.test_model import MODELS
from transformers import AutoConfig, AutoModelForCausalLM

from mettle.errors import UserError
from mettle.trainer.loading import full_state, load_policy


@pytest.mark.parametrize("name", sorted(MODELS))
def test_published_names_are_those_of_the_model_on_disk(name, tmp_path):
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **MODELS[name])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    on_disk = load_file(tmp_path / "model.safetensors")
    published = full_state(load_policy(tmp_path, ALONE, dtype=torch.float32))
    assert published.keys() == on_disk.keys()
    assert all(torch.equal(published[key], on_disk[key]) for key in on_disk)


def test_a_folder_without_a_model_is_the_persons_mistake(tmp_path):
    with pytest.raises(UserError, match="is not a model directory"):
        load_policy(tmp_path, ALONE, dtype=torch.float32)
