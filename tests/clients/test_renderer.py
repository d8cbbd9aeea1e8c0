"""The renderer on a byte tokenizer: nothing sampled is re-tokenized, and a rewriting template is found out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mettle.clients.chat_template import plain_message, plain_tool
from mettle.clients.renderer import Renderer
from mettle.errors import UserError

SPECIALS = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<think>", "</think>"]
END, USER, ASSISTANT, THINK, UNTHINK = 257, 259, 260, 262, 263

APPEND_ONLY = (
    "{%- for m in messages -%}<|{{ m.role }}|>"
    "{%- if m.role == 'system' and tools %}{% for t in tools %}{{ t.function | tojson }}\n{% endfor %}{% endif -%}"
    "{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif -%}{{ m.content }}"
    "{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor -%}<|end|>"
    "{%- endfor -%}{%- if add_generation_prompt %}<|assistant|>{% endif -%}"
)
# Thoughts are shown only after the last user turn.
DROPS_EARLIER_THOUGHTS = (
    "{%- set ns = namespace(last=-1) -%}"
    "{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}"
    "{%- for m in messages -%}<|{{ m.role }}|>"
    "{%- if m.reasoning_content and loop.index0 > ns.last %}<think>{{ m.reasoning_content }}</think>{% endif -%}"
    "{{ m.content }}<|end|>{{ '\\n' }}{%- endfor -%}{%- if add_generation_prompt %}<|assistant|>{% endif -%}"
)
DROPS_ALL_THOUGHTS = (
    "{%- for m in messages -%}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}<|end|>{%- endfor -%}"
    "{%- if add_generation_prompt %}<|assistant|>{% endif -%}"
)


def byte_tokenizer() -> Tokenizer:
    """256 bytes whose id is their value, then the special tokens."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    vocab = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return tokenizer


def write_tokenizer(folder: Path, template: str | None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "pad_token": "<|pad|>"}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return Renderer.from_directory(write_tokenizer(tmp_path_factory.mktemp("append"), APPEND_ONLY))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def test_bytes_are_their_own_ids_and_specials_follow(renderer: Renderer) -> None:
    assert renderer.vocab_size == 264
    assert renderer.encode("ab \x00\xe9") == [97, 98, 32, 0, 0xC3, 0xA9]
    assert renderer.render([user("hi")]) == [USER, 104, 105, END, ASSISTANT]
    assert renderer.stop_token_ids == (END,)


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
def test_text_without_special_tokens_survives_a_round_trip(renderer: Renderer, text: str) -> None:
    if not any(special in text for special in SPECIALS):
        assert renderer.decode(renderer.encode(text)) == text


def test_extension_keeps_the_sampled_ids_and_equals_a_fresh_rendering(renderer: Renderer) -> None:
    first = [user("one")]
    sampled = [*renderer.encode("two"), END]
    said = [*first, assistant("two")]
    now = [*said, user("three")]
    extended = renderer.extend([*renderer.render(first), *sampled], said, now)
    assert extended == renderer.render(now)


def test_extension_keeps_ids_that_the_tokenizer_would_not_give(renderer: Renderer) -> None:
    # A lone byte decodes to U+FFFD; re-tokenizing that text would give three other ids.
    first = [user("one")]
    context = [*renderer.render(first), 0xFF, END]
    turn = renderer.parse([0xFF, END])
    said = [*first, assistant(turn.content)]
    extended = renderer.extend(context, said, [*said, user("x")])
    assert extended == [*context, USER, 120, END, ASSISTANT]


def test_a_cut_off_completion_gets_the_end_that_the_template_writes(renderer: Renderer) -> None:
    first = [user("one")]
    context = [*renderer.render(first), 97]
    said = [*first, assistant("a")]
    assert renderer.extend(context, said, [*said, user("x")]) == [*context, END, USER, 120, END, ASSISTANT]


def test_the_assistant_turn_may_be_left_out_of_the_context_messages(renderer: Renderer) -> None:
    first = [user("one")]
    context = [*renderer.render(first), 97, END]
    now = [*first, assistant("a"), user("x")]
    assert renderer.extend(context, first, now) == renderer.render(now)


def test_an_append_only_template_keeps_thoughts(renderer: Renderer) -> None:
    first = [user("q")]
    sampled = [THINK, 104, 109, UNTHINK, 97, END]
    turn = renderer.parse(sampled)
    assert (turn.reasoning_content, turn.content) == ("hm", "a")
    said = [*first, assistant(turn.content, reasoning_content=turn.reasoning_content)]
    now = [*said, user("x")]
    assert renderer.extend([*renderer.render(first), *sampled], said, now) == renderer.render(now)


@pytest.mark.parametrize("template", [DROPS_EARLIER_THOUGHTS, DROPS_ALL_THOUGHTS])
def test_a_template_that_drops_thoughts_is_found_out(tmp_path: Path, template: str) -> None:
    rewriting = Renderer.from_directory(write_tokenizer(tmp_path, template))
    first = [user("q")]
    context = [*rewriting.render(first), THINK, 104, 109, UNTHINK, 97, END]
    said = [*first, assistant("a", reasoning_content="hm")]
    assert rewriting.extend(context, said, [*said, user("x")]) is None


def test_the_same_template_extends_where_it_keeps_the_thought(tmp_path: Path) -> None:
    rewriting = Renderer.from_directory(write_tokenizer(tmp_path, DROPS_EARLIER_THOUGHTS))
    first = [user("q")]
    context = [*rewriting.render(first), THINK, 104, UNTHINK, 97, END]
    said = [*first, assistant("a", reasoning_content="h")]
    now = [*said, {"role": "tool", "content": "42"}]
    assert rewriting.extend(context, said, now) == rewriting.render(now)


def test_a_changed_earlier_turn_is_found_out(renderer: Renderer) -> None:
    context = [*renderer.render([user("q")]), 97, END]
    said = [user("q"), assistant("a")]
    assert renderer.extend(context, said, [user("Q"), assistant("a"), user("x")]) is None


def test_tool_calls_are_read_and_written_back(renderer: Renderer) -> None:
    tools = [{"name": "add", "description": "sum", "parameters": {"type": "object"}}]
    ids = [*renderer.encode('ok<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'), END]
    turn = renderer.parse(ids, tools)
    assert turn.content == "ok"
    assert [(call.name, json.loads(call.arguments)) for call in turn.tool_calls] == [("add", {"a": 1})]
    call = turn.tool_calls[0]
    messages = [
        user("q"),
        assistant("ok", tool_calls=[{"id": call.id, "name": call.name, "arguments": call.arguments}]),
    ]
    text = renderer.decode(renderer.render(messages, tools, add_generation_prompt=False), skip_special_tokens=False)
    assert text.endswith('ok<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|end|>')


def test_a_broken_tool_call_stays_in_the_content(renderer: Renderer) -> None:
    text = '<tool_call>{"name": "add", "arguments": {</tool_call>'
    turn = renderer.parse(renderer.encode(text), [{"name": "add"}])
    assert (turn.content, turn.tool_calls) == (text, ())


def test_without_tools_nothing_is_taken_for_a_call(renderer: Renderer) -> None:
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert renderer.parse(renderer.encode(text)).content == text


def test_a_thought_cut_off_has_no_content(renderer: Renderer) -> None:
    turn = renderer.parse([THINK, 104, 109])
    assert (turn.content, turn.reasoning_content) == ("", "hm")


def test_messages_of_both_tool_call_shapes_become_the_templates_shape() -> None:
    nested = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    flat = {"id": "1", "name": "f", "arguments": "{}"}
    for call in (nested, flat):
        plain = plain_message({"role": "assistant", "content": None, "tool_calls": [call]})
        assert plain["content"] == ""
        assert plain["tool_calls"] == [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}]
    tool = {"name": "f", "description": "d", "parameters": {}}
    assert plain_tool(tool) == plain_tool({"type": "function", "function": tool})


def test_content_parts_are_joined_and_images_refused() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert plain_message({"role": "user", "content": parts})["content"] == "ab"
    with pytest.raises(UserError, match="image_url"):
        plain_message({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]})


def test_the_bytes_of_a_part_of_a_character_are_exact(renderer: Renderer) -> None:
    assert [renderer.token_bytes(i) for i in (0x41, 0xC3, 0x00, 0xAD)] == [[0x41], [0xC3], [0x00], [0xAD]]
    assert renderer.token_bytes(END) == list(b"<|end|>")


def test_missing_files_are_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        Renderer.from_directory(tmp_path)
    base = Renderer.from_directory(write_tokenizer(tmp_path / "base", None))
    assert not base.has_chat_template
    with pytest.raises(UserError, match="no chat template"):
        base.render([user("q")])


def test_a_template_that_refuses_says_why(tmp_path: Path) -> None:
    picky = Renderer.from_directory(write_tokenizer(tmp_path, "{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(UserError, match="roles must alternate"):
        picky.render([user("q")])


def test_the_renderer_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, mettle.clients.renderer; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
