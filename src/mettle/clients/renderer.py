"""Conversations to token ids and back, without transformers or torch: `tokenizers` and the model's own chat template.

What was sampled is what is trained, so a later turn never re-tokenizes an earlier one: `extend` appends the ids of the
new messages to the exact ids of the context, and says None when the template would show an earlier turn differently
(Qwen3 and DeepSeek-R1 drop the thoughts of earlier turns). Then the caller renders anew and starts a new branch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from mettle.clients.byte_level import is_byte_level, word_bytes
from mettle.clients.chat_template import ChatTemplate
from mettle.clients.tool_parser import THINK_CLOSE, THINK_OPEN, TOOL_CLOSE, TOOL_OPEN, ParsedTurn, parse_turn
from mettle.errors import UserError

PROBE = "Seven red foxes, 42 grey geese: who was first?"
"""What two tokenizers are told apart by. Plain letters, so that no token is part of a character."""
_MARKS = (THINK_OPEN, THINK_CLOSE, TOOL_OPEN, TOOL_CLOSE)
_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
_INCOMPLETE = "\ufffd"


class Renderer:
    """A tokenizer and a chat template. `stop_token_ids` end a turn, the first of them being the usual one."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, stop_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self.stop_token_ids = tuple(stop_token_ids)
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self._is_byte_level = is_byte_level(tokenizer)
        marks = {token_id for mark in _MARKS if (token_id := tokenizer.token_to_id(mark)) is not None}
        added = tokenizer.get_added_tokens_decoder()
        special = {token_id for token_id, token in added.items() if token.special}
        self._dropped_ids = frozenset((special - marks) | set(stop_token_ids))

    @classmethod
    def from_directory(cls, path: str | Path) -> Renderer:
        """Read `tokenizer.json`, the chat template and the stop tokens of a Hugging Face model directory.

        Raises: UserError when there is no tokenizer, or a file of it cannot be read.
        """
        folder = Path(path)
        source = folder / "tokenizer.json"
        if not source.is_file():
            raise UserError(f"{folder} has no tokenizer.json; give a model directory in Hugging Face layout")
        try:
            tokenizer = Tokenizer.from_file(str(source))
        except Exception as error:  # the Rust side raises plain Exception
            raise UserError(f"{source} is not a tokenizer: {error}") from error
        tokenizer.no_padding()
        tokenizer.no_truncation()
        config = _read_json(folder / "tokenizer_config.json")
        special_tokens = _special_tokens({**_read_json(folder / "special_tokens_map.json"), **config})
        text = _template_source(folder, config)
        template = ChatTemplate(text, special_tokens) if text is not None else None
        return cls(tokenizer, template, _stop_ids(folder, tokenizer, special_tokens))

    @property
    def has_chat_template(self) -> bool:
        """False for a base model, which can complete text but not chat."""
        return self._template is not None

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Ids of a text; `add_special_tokens` puts what the model wants around it (a leading bos, say)."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids, without special tokens unless asked for."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        """One token as text, special tokens included; an incomplete character shows as U+FFFD."""
        return self.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> list[int] | None:
        """The exact bytes of one token; None when they cannot be told (part of a character, other than byte-level)."""
        text = self.token_text(token_id)
        if _INCOMPLETE not in text:
            return list(text.encode())
        word = self._tokenizer.id_to_token(token_id) if self._is_byte_level else None
        return list(word_bytes(word, byte_level=True)) if word else None

    def visible_text(self, completion_ids: Sequence[int]) -> str:
        """A completion's text with the marks of thoughts and tool calls, but no end-of-turn or role tokens."""
        kept = [token_id for token_id in completion_ids if token_id not in self._dropped_ids]
        return self.decode(kept, skip_special_tokens=False)

    def render_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """The conversation as the template writes it."""
        if self._template is None:
            raise UserError("this model has no chat template; use completions, or add a chat_template.jinja to it")
        return self._template.render(messages, tools, add_generation_prompt=add_generation_prompt, **template_kwargs)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[int]:
        """Ids of a conversation, ready for the assistant's turn unless `add_generation_prompt` is off."""
        text = self.render_text(messages, tools, add_generation_prompt=add_generation_prompt, **template_kwargs)
        return self.encode(text)

    def extend(
        self,
        context_ids: Sequence[int],
        context_messages: Sequence[Mapping[str, Any]],
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        **template_kwargs: Any,
    ) -> list[int] | None:
        """The context's ids followed by what the new messages and the generation prompt add, or None.

        `context_ids` are the previous prompt and the completion as sampled; `context_messages` the conversation up to
        and with the assistant's turn that the completion is (left out, it is taken from `messages`); `messages` the
        whole conversation now. A completion cut off before its end token gets the end that the template writes.
        None means that the template rewrote something that is in the context.
        """
        if _role(context_messages) != "assistant":
            context_messages = messages[: len(context_messages) + 1]
        if _role(context_messages) != "assistant" or len(messages) < len(context_messages):
            return None
        before = self.render_text(context_messages, tools, add_generation_prompt=False, **template_kwargs)
        after = self.render_text(messages, tools, **template_kwargs)
        if not after.startswith(before) or self._has_other_marks(context_ids, before):
            return None
        return self._append_after_turn(context_ids, before, after)

    def _append_after_turn(self, context_ids: Sequence[int], before: str, after: str) -> list[int] | None:
        # Tokenizing from the end token on, and not from the middle of a text, gives the ids of the whole conversation.
        ends = [(before.rfind(text), i, text) for i in self.stop_token_ids if (text := self._tokenizer.id_to_token(i))]
        position, stop_id, stop_text = max(ends, default=(-1, -1, ""))
        if position < 0 or before[position + len(stop_text) :].strip():
            return None  # the template does not end this turn with a token that the model knows as an end
        added = self.encode(after[position:])
        if not added or added[0] != stop_id:
            return None
        is_closed = bool(context_ids) and context_ids[-1] == stop_id
        return [*context_ids, *(added[1:] if is_closed else added)]

    def _has_other_marks(self, context_ids: Sequence[int], before: str) -> bool:
        # A template that drops every thought, not only those of earlier turns, passes the prefix test; the marks tell.
        seen = self.decode(context_ids, skip_special_tokens=False)
        return any(seen.count(mark) != before.count(mark) for mark in (THINK_OPEN, THINK_CLOSE))

    def parse(self, completion_ids: Sequence[int], tools: Sequence[Any] | None = None) -> ParsedTurn:
        """The thought, the tool calls (when the request had tools) and the content of a completion."""
        return parse_turn(self.visible_text(completion_ids), has_tools=bool(tools))


def _role(messages: Sequence[Mapping[str, Any]]) -> str:
    return str(messages[-1].get("role")) if messages else ""


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds {type(value).__name__}; a JSON object is expected")
    return value


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):  # several named templates; "default" is the one for chat
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    return source if isinstance(source, str) else None


def _stop_ids(folder: Path, tokenizer: Tokenizer, special_tokens: Mapping[str, str]) -> list[int]:
    ids = _ids(_read_json(folder / "generation_config.json").get("eos_token_id"))
    if (eos := special_tokens.get("eos_token")) is not None and (eos_id := tokenizer.token_to_id(eos)) is not None:
        ids.append(eos_id)
    if not ids:
        ids = _ids(_read_json(folder / "config.json").get("eos_token_id"))
    return list(dict.fromkeys(ids))


def _ids(value: Any) -> list[int]:
    values: Iterable[Any] = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool)]
