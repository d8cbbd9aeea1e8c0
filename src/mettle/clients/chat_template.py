"""A model's chat template: conversations to text, with the names and filters that Hugging Face templates expect.

Templates come with models, so they run in Jinja's immutable sandbox. Messages and tools are brought into the one shape
that templates know (`tool_calls[].function.arguments` as an object, `tools[].function`), whatever shape they came in.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mettle.errors import UserError


class ChatTemplate:
    """A compiled template with the special tokens that it may name (`bos_token`, `eos_token`, ...)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise UserError(f"the chat template does not compile: {error}") from error
        self.source = source
        self._special_tokens = dict(special_tokens or {})

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """The text of a conversation.

        Raises: UserError when the template refuses the conversation (two system turns, say).
        """
        try:
            return self._template.render(
                **self._special_tokens,
                **template_kwargs,
                messages=[plain_message(message) for message in messages],
                tools=[plain_tool(tool) for tool in tools] if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except TemplateError as error:
            raise UserError(f"the chat template refused the conversation: {error}") from error


def plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates know it: text content, tool calls with parsed arguments, nothing that is None."""
    plain = {key: value for key, value in message.items() if value is not None}
    plain["content"] = _text(message.get("content"))
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call) for call in plain["tool_calls"]]
    else:
        plain.pop("tool_calls", None)
    return plain


def plain_tool(tool: Any) -> dict[str, Any]:
    """A tool as `{"type": "function", "function": {name, description, parameters}}`, from that shape or a flat one."""
    inner = tool.get("function") if isinstance(tool, Mapping) else None
    function = dict(inner) if isinstance(inner, Mapping) else {}
    for key in ("name", "description", "parameters", "strict"):
        value = function.get(key, _field(tool, key))
        if value is not None:
            function[key] = value
    return {"type": "function", "function": function}


def _plain_call(call: Any) -> dict[str, Any]:
    inner = _field(call, "function")
    source = inner if inner is not None else call
    arguments = _field(source, "arguments")
    if isinstance(arguments, str):
        arguments = _object_or_text(arguments)
    plain: dict[str, Any] = {"type": "function", "function": {"name": _field(source, "name"), "arguments": arguments}}
    if (call_id := _field(call, "id")) is not None:
        plain["id"] = call_id
    return plain


def _object_or_text(arguments: str) -> Any:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _field(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, Mapping) else getattr(value, key, None)


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Iterable):
        raise UserError(f"a message's content is {type(content).__name__}; text or a list of text parts is expected")
    return "".join(_part_text(part) for part in content)


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if _field(part, "type") in ("text", "input_text") and isinstance(_field(part, "text"), str):
        return str(_field(part, "text"))
    raise UserError(f"a message has a part of type {_field(part, 'type')!r}; this model reads text only")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for SFT masks; the text is the same."""

    tags = {"generation"}  # noqa: RUF012  (Jinja reads this attribute as a class variable)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
