"""The model directory that Mettle makes: loads everywhere, ids are bytes, the template only ever appends."""

import hashlib
import itertools
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from mettle.errors import UserError
from mettle.trainer.policy import write_policy
from mettle.trainer.presets import PolicyConfig, preset

TOOLS = [{"type": "function", "function": {"name": "add", "description": "a+b", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_policy(tmp_path_factory.mktemp("policy") / "model", preset("tiny"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def test_the_tiny_preset_has_the_published_number_of_parameters(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert sum(p.numel() for p in model.parameters()) == 357_984
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (257, 256)


def test_the_same_config_gives_the_same_bytes(folder, tmp_path):
    before = torch.random.get_rng_state()
    again = write_policy(tmp_path / "again", preset("tiny"))
    other = write_policy(tmp_path / "other", PolicyConfig(seed=1))
    digests = [hashlib.sha256((f / "model.safetensors").read_bytes()).hexdigest() for f in (folder, again, other)]
    assert digests[0] == digests[1] != digests[2]
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_model_is_the_one_that_transformers_would_make(folder, tmp_path):
    """Config and weights, so that a seed gives what it gave when transformers made it."""
    config = AutoConfig.from_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs = AutoModelForCausalLM.from_config(config)
    ours = load_file(folder / "model.safetensors")
    expected = {name: parameter for name, parameter in theirs.named_parameters() if name != "lm_head.weight"}
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in ours)
    config.save_pretrained(tmp_path)
    written, saved = (json.loads((at / "config.json").read_text()) for at in (folder, tmp_path))
    del saved["transformers_version"]
    assert written == saved


@settings(max_examples=50, deadline=None)
@given(text=st.text())
def test_ids_are_the_bytes_of_the_text(folder, text):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    plain = text.replace("<", "(")
    ids = tokenizer.encode(plain).ids
    assert ids == list(plain.encode())
    assert tokenizer.decode(ids) == plain


def test_special_tokens_have_their_ids_and_are_skipped_by_decode(folder, tokenizer):
    names = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<think>", "</think>"]
    assert tokenizer.convert_tokens_to_ids(names) == list(range(256, 264))
    assert len(tokenizer) == 264
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (257, 256)
    assert (
        Tokenizer.from_file(str(folder / "tokenizer.json")).decode([260, 262, 97, 263, 98, 257]) == "<think>a</think>b"
    )


def test_one_turn_renders_to_role_content_end(tokenizer):
    messages = [{"role": "user", "content": "reverse abc"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == [259, *b"reverse abc", 257, 260]


def test_the_template_only_appends(tokenizer):
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "1+1?"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "use the tool",
            "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": "caf\u00e9 <1>"}}}],
        },
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "2", "reasoning_content": "done"},
        {"role": "user", "content": "thanks"},
    ]
    texts = [
        tokenizer.apply_chat_template(messages[:count], tools=TOOLS, tokenize=False)
        for count in range(1, len(messages) + 1)
    ]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert "<|assistant|><think>use the tool</think><tool_call>" in texts[2]
    assert '<tool_call>{"name": "add", "arguments": {"a": "caf\u00e9 <1>"}}</tool_call><|end|>' in texts[2]
    assert texts[3].endswith("<|tool|>2<|end|>")
    assert texts[0].count('{"name": "add"') == 1


def test_tools_without_a_system_message_get_a_system_turn(tokenizer):
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tools=TOOLS, tokenize=False)
    assert text.startswith("<|system|>Tools")
    assert text.endswith("<|end|><|user|>hi<|end|>")


def test_flat_tool_calls_render_like_nested_ones(tokenizer):
    nested = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]}
    flat = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "name": "f", "arguments": '{"a": 1}'}]}
    texts = [tokenizer.apply_chat_template([message], tokenize=False) for message in (nested, flat)]
    assert texts[0] == texts[1] == '<|assistant|><tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call><|end|>'


def test_an_unknown_preset_names_those_there_are():
    with pytest.raises(UserError, match="there are small, tiny"):
        preset("huge")
