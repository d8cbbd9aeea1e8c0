"""What a config asks of the model's network is told by the headers of its files, as the trainer tells it."""

import json

import pytest

from mettle.errors import UserError
from mettle.inference.engine.families import FAMILIES
from mettle.runs import network as network_files
from mettle.runs.config import RunConfig
from mettle.runs.network import check_network
from mettle.storage.headers import shapes_in
from mettle.trainer.adapter import places

ATTENTION = [f"self_attn.{name}_proj" for name in "qkvo"]
MLP = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]


@pytest.fixture
def model(tmp_path):
    """A model's folder without weights: two layers of these modules, each expert of a mixture by itself."""

    def make(model_type="qwen3", modules=(*ATTENTION, *MLP), *, is_tied=False, more=(), **settings):
        shapes = {"model.embed_tokens.weight": [10, 8], "model.norm.weight": [8]}
        shapes |= {f"model.layers.{layer}.{module}.weight": [8, 8] for layer in (0, 1) for module in modules}
        shapes |= dict(more)
        header = json.dumps({name: {"dtype": "F32", "shape": shape} for name, shape in shapes.items()}).encode()
        (tmp_path / "model-00001.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        about = {"model_type": model_type, "tie_word_embeddings": is_tied, **settings}
        (tmp_path / "config.json").write_text(json.dumps(about))
        return tmp_path

    return make


def check(path, lora=None, *, inference=None, **trainer):
    ranks = trainer.get("expert_parallel", 1)
    model = {} if path is None else {"path": path}
    check_network(
        RunConfig.model_validate(
            {
                "model": {**model, **({} if lora is None else {"lora": lora})},
                "orchestrator": {"envs": [{"id": "reverse-text"}]},
                "trainer": trainer,
                "inference": inference or {},
                "deployment": {"num_trainer_ranks": ranks},
            }
        )
    )


EXPERTS = [f"mlp.experts.{number}.{name}" for number in range(4) for name in ("gate_proj", "up_proj", "down_proj")]
STACKED = {
    f"model.layers.{layer}.mlp.experts.{name}": shape
    for layer in (0, 1)
    for name, shape in {"gate_up_proj": [4, 16, 8], "down_proj": [4, 8, 8]}.items()
}


@pytest.mark.parametrize("is_preset", [False, True])
def test_a_target_that_names_nothing_is_told_the_nearest(model, is_preset):
    path = None if is_preset else model()
    check(path, {"target_modules": ["q_proj", "mlp.down_proj", "model.layers.1.self_attn.v_proj"]})
    check(path, {})
    with pytest.raises(UserError, match=r"is called 'q_porj'; did you mean 'q_proj'\? there are down_proj, gate_proj"):
        check(path, {"target_modules": ["v_proj", "q_porj"]})
    with pytest.raises(UserError, match="no linear module of this model is called 'embed_tokens'"):
        check(path, {"target_modules": ["embed_tokens"]})


def test_an_output_head_that_is_tied_leaves_nothing_to_train(model):
    check(model(), {"target_modules": ["lm_head"]})
    for path in (model(is_tied=True), None):
        for lora in ({"target_modules": ["lm_head"]}, {"attention": False, "mlp": False, "unembed": True}):
            with pytest.raises(UserError, match="its output head is tied to the input embedding and left alone"):
                check(path, lora)


def test_experts_are_shared_where_there_are_some_and_they_can_be(model):
    for path in (model(), None):
        with pytest.raises(UserError, match="is for mixtures of experts, and this model is dense: set it to 1"):
            check(path, expert_parallel=2)
    for path in (
        lambda: model("qwen3_moe", [*ATTENTION, *EXPERTS]),
        lambda: model("qwen3_moe", ATTENTION, more=STACKED),
    ):
        check(path(), expert_parallel=2)
        check(path(), {"target_modules": ["experts.up_proj", "experts.gate_proj"]})
        with pytest.raises(UserError, match="expert_parallel 3 does not divide this model's 4 experts a layer"):
            check(path(), expert_parallel=3)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_headers_name_every_module_that_a_network_has(family, tmp_path):
    """Else what is refused by them could be trained."""
    transformers = pytest.importorskip("transformers")
    about = transformers.AutoConfig.for_model(
        family, hidden_size=16, intermediate_size=16, moe_intermediate_size=8, num_hidden_layers=2, vocab_size=16,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts=2, num_experts_per_tok=1, pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    network = transformers.AutoModelForCausalLM.from_config(about)
    network.save_pretrained(tmp_path)
    named = {*network_files._modules(shapes_in(tmp_path)), network_files.HEAD}
    assert set(places(network)) <= named
    assert network_files._nums_experts(shapes_in(tmp_path)) == ([2, 2] if FAMILIES[family].has_experts else [])
    check(tmp_path, {"target_modules": ["q_proj"]})
    if about.tie_word_embeddings:
        with pytest.raises(UserError, match="is tied"):
            check(tmp_path, {"target_modules": ["lm_head"]})


def test_what_the_files_do_not_tell_is_left_to_the_trainer(model, tmp_path):
    other = model("gpt2", ["attn.c_attn", "mlp.c_fc"])
    check(other, {"target_modules": ["q_proj"]}, expert_parallel=2)
    (tmp_path / "model-00001.safetensors").unlink()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    check(tmp_path, {"target_modules": ["q_porj"]}, expert_parallel=2)


def test_sequences_are_no_longer_than_the_model_has_positions(model):
    path = model(max_position_embeddings=64)
    check(path, inference={"max_model_len": 64})
    check(None, inference={"max_model_len": 1024})
    check(model(), inference={"max_model_len": 10**6})
    for here, wanted, there in ((model(max_position_embeddings=64), 65, 64), (None, 1025, 1024)):
        with pytest.raises(
            UserError, match=f"max_model_len is {wanted}, and the model has {there} positions: lower it"
        ):
            check(here, inference={"max_model_len": wanted})


def test_experts_are_recorded_where_there_are_some(model):
    check(model("qwen3_moe", [*ATTENTION, *EXPERTS]), inference={"record_experts": True})
    check(model("another", [*ATTENTION]), inference={"record_experts": True})
    for path in (model(), None):
        with pytest.raises(UserError, match="record_experts is for mixtures of experts, and this model is dense"):
            check(path, inference={"record_experts": True})


def test_a_torn_description_is_named(model):
    path = model()
    (path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json cannot be read"):
        check(path, {})
