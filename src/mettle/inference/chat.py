"""`POST /v1/chat/completions`: messages rendered by the model's own template, the answer read back into a turn.

Thoughts arrive as `reasoning_content`, Hermes tool calls as `tool_calls`. `return_token_ids` adds the exact ids of
prompt and completion and each token's policy version, so that an ordinary chat client can serve training as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aiohttp import web

from mettle.clients.tool_parser import THINK_OPEN, ParsedToolCall, parse_tool_calls, parse_turn
from mettle.inference.api_errors import bad_request, json_response
from mettle.inference.chunks import ChunkWriter, stream
from mettle.inference.engine.protocol import Choice, GenerationRequest, TokenEvent
from mettle.inference.openai_fields import chat_logprobs, token_fields, usage
from mettle.inference.request_body import MAX_TOP_LOGPROBS, Body, read_body
from mettle.inference.service import SERVICE, Service
from mettle.inference.text import Part, TurnSplitter, cut_at_stop


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat request that was read and rendered."""

    generation: GenerationRequest
    has_tools: bool
    has_logprobs: bool
    has_token_ids: bool
    has_usage: bool
    is_stream: bool


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    service = request.app[SERVICE]
    body = await read_body(request)
    service.check_model(body.get("model"))
    chat = read_chat(service, body)
    if chat.is_stream:
        return await stream(
            request, service, chat.generation, "messages", lambda response: _ChatWriter(service, chat, response)
        )
    generation = await service.generate(chat.generation, "messages")
    answer: dict[str, Any] = {
        "id": f"chatcmpl-{generation.request_id}",
        "object": "chat.completion",
        "created": int(service.clock()),
        "model": service.model_name,
        "choices": [_choice(service, chat, choice) for choice in generation.choices],
        "usage": usage(generation.num_prompt_tokens, [generation]),
    }
    if chat.has_token_ids:
        answer["prompt_token_ids"] = list(chat.generation.prompt_ids)
    return json_response(answer)


def read_chat(service: Service, body: Body) -> ChatRequest:
    """Check every field and render the prompt.

    Raises: ApiError naming the field at fault.
    """
    messages = body.objects("messages")
    if not messages:
        raise bad_request("messages must be a list of at least one message", "messages")
    for number, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise bad_request(f"message {number} has no role", "messages")
    tools = body.objects("tools")
    has_tools = _check_tool_choice(body, bool(tools))
    _check_response_format(body)
    template_kwargs = body.get("chat_template_kwargs") or {}
    if not isinstance(template_kwargs, dict) or {"messages", "tools", "add_generation_prompt"} & set(template_kwargs):
        raise bad_request(
            "chat_template_kwargs must be an object of the template's own settings", "chat_template_kwargs"
        )
    has_logprobs = body.boolean("logprobs")
    top_logprobs = body.integer("top_logprobs", 0, low=0, high=MAX_TOP_LOGPROBS) or 0
    if top_logprobs and not has_logprobs:
        raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
    is_stream = body.boolean("stream")
    max_tokens = body.integer("max_completion_tokens", low=1) or body.integer("max_tokens", low=1)
    return ChatRequest(
        GenerationRequest(
            request_id=service.new_id(),
            prompt_ids=service.renderer.render(messages, tools, **template_kwargs),
            params=body.sampling(max_tokens),
            n=body.integer("n", low=1) or 1,
            top_logprobs=top_logprobs,
            has_token_events=is_stream,
        ),
        has_tools=has_tools,
        has_logprobs=has_logprobs,
        has_token_ids=body.boolean("return_token_ids"),
        has_usage=body.wants_usage(),
        is_stream=is_stream,
    )


def _check_tool_choice(body: Body, has_tools: bool) -> bool:
    """Whether tool calls are to be read from the answer."""
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise bad_request(f"tool_choice {choice!r} is not supported; use 'auto' or 'none'", "tool_choice")
    return has_tools and choice != "none"


def _check_response_format(body: Body) -> None:
    wanted = body.get("response_format")
    if wanted is not None and (not isinstance(wanted, dict) or wanted.get("type") != "text"):
        raise bad_request("response_format other than {'type': 'text'} is not supported", "response_format")


def _choice(service: Service, chat: ChatRequest, choice: Choice) -> dict[str, Any]:
    text = cut_at_stop(service.renderer.visible_text(choice.token_ids), choice.stop)
    turn = parse_turn(text, has_tools=chat.has_tools)
    message: dict[str, Any] = {"role": "assistant", "content": turn.content, "refusal": None}
    if turn.reasoning_content is not None:
        message["reasoning_content"] = turn.reasoning_content
    if turn.tool_calls:
        message["content"] = turn.content or None
        message["tool_calls"] = [_tool_call(call) for call in turn.tool_calls]
    answer: dict[str, Any] = {
        "index": choice.index,
        "message": message,
        "logprobs": None,
        "finish_reason": "tool_calls" if turn.tool_calls else choice.finish_reason,
    }
    if chat.has_logprobs:
        answer["logprobs"] = chat_logprobs(service.renderer, choice.token_ids, choice.logprobs, choice.top_logprobs)
    if chat.has_token_ids:
        answer |= token_fields(choice)
    return answer


def _tool_call(call: ParsedToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class _ChatWriter(ChunkWriter):
    """Chunks of a conversation's next turn: who speaks, what each token adds to it, and how it ended."""

    ID_PREFIX = "chatcmpl"
    OBJECT = "chat.completion.chunk"

    def __init__(self, service: Service, chat: ChatRequest, response: web.StreamResponse) -> None:
        super().__init__(service, chat.generation, response, has_usage=chat.has_usage)
        self._chat = chat
        is_thinking = service.renderer.visible_text(self.asked.prompt_ids[-16:]).rstrip().endswith(THINK_OPEN)
        self._turns = [TurnSplitter(has_tools=chat.has_tools, is_thinking=is_thinking) for _ in range(self.asked.n)]

    async def begin(self) -> None:
        """The chunks that say who speaks."""
        for index in range(self.asked.n):
            await self._send_delta(index, {"role": "assistant", "content": ""})

    async def write_token(self, event: TokenEvent) -> None:
        """What a token adds to its turn."""
        more: dict[str, Any] = {}
        parts: list[Part] = []
        if event.token_id is not None:
            parts = self._turns[event.choice].add(self.texts[event.choice].add(event.token_id))
            if self._chat.has_logprobs:
                more["logprobs"] = chat_logprobs(
                    self.service.renderer, [event.token_id], [event.logprob], [event.top_logprobs]
                )
            if self._chat.has_token_ids:
                more |= {"token_ids": [event.token_id], "versions": [event.version]}
        if parts or more:
            await self._send_delta(event.choice, _delta(parts), more)

    async def write_end(self, index: int, reason: str, stop: str | None) -> None:
        """What was held back, the tool calls, and the reason."""
        turn = self._turns[index]
        parts = turn.add(self.texts[index].finish(stop))
        parts += turn.finish()
        content, calls = parse_tool_calls(turn.tail)
        if content:
            parts.append(Part("content", content))
        delta = _delta(parts)
        if calls:
            delta["tool_calls"] = [{"index": i, **_tool_call(call)} for i, call in enumerate(calls)]
        if delta:
            await self._send_delta(index, delta)
        await self._send_delta(index, {}, {"finish_reason": "tool_calls" if calls else reason})

    async def _send_delta(self, index: int, delta: dict[str, Any], more: dict[str, Any] | None = None) -> None:
        await self.send([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **(more or {})}])


def _delta(parts: list[Part]) -> dict[str, Any]:
    delta: dict[str, Any] = {}
    for part in parts:
        key = "reasoning_content" if part.kind == "reasoning" else "content"
        delta[key] = delta.get(key, "") + part.text
    return delta


ROUTES = [web.post("/v1/chat/completions", chat_completions)]
