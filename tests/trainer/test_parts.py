"""What a rank reads of a model's files is its part of what transformers makes of them."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.trainer.test_grid import case, train_on_ranks
from transformers import AutoConfig, AutoModelForCausalLM

from mettle.trainer.parts import (
    CannotCut,
    ModelFiles,
    bare_network,
    fill_part,
    read_parts,
    restore_buffers,
    sources_of,
)


def read_alone(folder):
    """The whole of a network, piece by piece."""
    network, checkpoint = bare_network(folder, torch.float32), ModelFiles(folder)
    sources = sources_of(network, checkpoint)
    restore_buffers(network, torch.device("cpu"))
    network._apply(lambda tensor: torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor)
    network.tie_weights()
    read_parts({**dict(network.named_parameters()), **dict(network.named_buffers())}, sources, checkpoint)
    return network


@pytest.mark.parametrize("kind", ["tied", "apart", "mixture", "several files"])
def test_piece_by_piece_it_is_what_transformers_reads(kind, mini_model, mixture, tmp_path):
    folder = {"tied": mini_model, "mixture": mixture}.get(kind, tmp_path / "model")
    if kind == "apart":
        config = AutoConfig.from_pretrained(mini_model)
        config.tie_word_embeddings = False
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    whole = AutoModelForCausalLM.from_pretrained(mixture if kind == "several files" else folder, dtype=torch.float32)
    if kind == "several files":
        whole.save_pretrained(folder, max_shard_size="20KB")
        assert len(list(folder.glob("*.safetensors"))) > 2
    network = read_alone(folder)
    own, expected = ({**dict(n.named_parameters()), **dict(n.named_buffers())} for n in (network, whole))
    assert own.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in own.items())
    is_tied = network.get_input_embeddings().weight is network.get_output_embeddings().weight
    assert is_tied == (kind != "apart")


def test_a_part_of_stacked_experts_is_read_from_those_that_it_has(mixture):
    checkpoint = ModelFiles(mixture)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    pieces = sources_of(bare_network(mixture, torch.float32), checkpoint)[name]
    whole = dict(read_alone(mixture).named_parameters())[name].detach()
    for experts in (slice(0, 2), slice(2, 4), slice(3, 4)):
        part = torch.full_like(whole[experts], float("nan"))
        rooms = [piece for piece in pieces if experts.start <= piece.at < experts.stop]
        fill_part(part, [piece._replace(at=piece.at - experts.start) for piece in rooms], checkpoint)
        assert torch.equal(part, whole[experts])


def test_what_cannot_be_cut_says_so_before_anything_is_read(mini_model, mixture, tmp_path):
    with pytest.raises(CannotCut, match="No such file"):
        ModelFiles(tmp_path)
    weights = load_file(mini_model / "model.safetensors")
    for change, says in (
        (lambda found: found.pop("model.norm.weight"), "no tensor is model.norm.weight"),
        (lambda found: found.update({"model.norm.weight": torch.ones(3)}), r"\(3,\) in the files and \(32,\)"),
    ):
        folder = shutil.copytree(mini_model, tmp_path / says[:5])
        changed = dict(weights)
        change(changed)
        save_file(changed, folder / "model.safetensors")
        with pytest.raises(CannotCut, match=says):
            sources_of(bare_network(folder, torch.float32), ModelFiles(folder))
    folder = shutil.copytree(mixture, tmp_path / "mixture")
    weights = load_file(mixture / "model.safetensors")
    del weights["model.layers.0.mlp.experts.3.up_proj.weight"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CannotCut, match="some is missing"):
        sources_of(bare_network(folder, torch.float32), ModelFiles(folder))


@pytest.mark.e2e
@pytest.mark.slow
def test_three_ranks_have_read_what_the_files_say(tmp_path, mini_model, mixture):
    """Uneven parts: 3 ranks. What they publish of it is the files, to the bit."""
    cases = [case(folder, last=0) for folder in (mini_model, mixture)]
    for folder, (_, state) in zip((mini_model, mixture), train_on_ranks(tmp_path / "three", cases, 3), strict=True):
        del state["canary"]
        written = load_file(folder / "model.safetensors")
        assert state.keys() == written.keys()
        assert all(torch.equal(tensor, written[name]) for name, tensor in state.items())
