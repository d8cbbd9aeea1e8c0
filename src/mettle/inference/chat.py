"""`POST /v1/chat/completions`: messages rendered by the model's own template, the answer read back into a turn.

Thoughts arrive as `reasoning_content`, Hermes tool calls as `tool_calls`. `return_token_ids` adds the exact ids of
prompt and completion and each token's policy version, so that an ordinary chat client can serve training as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mettle.clients.dialects import chat as dialect
from mettle.clients.renderer import Renderer
from mettle.clients.tool_parser import THINK_OPEN, parse_tool_calls, parse_turn
from mettle.inference.bodies import ChatBody, StreamOptions
from mettle.inference.chunks import Choices, ChunkMaker, stream, usage
from mettle.inference.engine.protocol import Choice, GenerationRequest, TokenEvent, TokenLogprob
from mettle.inference.service import ModelChoice, ModelService, service_of
from mettle.inference.text import TurnPart, TurnSplitter, cut_at_stop
from mettle.web.bodies import read_model
from mettle.web.problems import HttpError, json_response


async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    service = service_of(request)
    body = await read_model(request, ChatBody)
    chosen = service.find_model(body.model)
    asked = rendered(service, body, chosen)
    if body.stream:
        return await stream(request, _ChatChunks(service, asked, body), "messages")
    generation = await service.generate(asked, "messages")
    answer = dialect.completion(
        f"chatcmpl-{generation.request_id}",
        int(service.clock()),
        service.name_of(asked),
        [_choice(service.renderer, body, choice) for choice in generation.choices],
        usage(generation),
    )
    if body.return_token_ids:
        answer["prompt_token_ids"] = list(asked.prompt_ids)
    return json_response(answer)


def rendered(service: ModelService, body: ChatBody, chosen: ModelChoice) -> GenerationRequest:
    """What the engine is asked. Raises: HttpError, UserError of the chat template."""
    if body.top_logprobs and not body.logprobs:
        raise HttpError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    return GenerationRequest(
        request_id=service.new_id(),
        prompt_ids=service.renderer.render(body.messages, body.tools, **(body.chat_template_kwargs or {})),
        params=body.params(body.max_completion_tokens or body.max_tokens),
        n=body.n or 1,
        top_logprobs=body.top_logprobs or 0,
        has_token_events=bool(body.stream),
        adapter=chosen.adapter,
        adapter_version=chosen.version,
    )


def _choice(renderer: Renderer, body: ChatBody, choice: Choice) -> dict[str, Any]:
    text = cut_at_stop(renderer.visible_text(choice.token_ids), choice.stop)
    turn = parse_turn(text, has_tools=body.has_tools)
    calls = [call._asdict() for call in turn.tool_calls]
    message = dialect.said(turn.content or (None if calls else ""), None, calls)
    if turn.reasoning_content is not None:
        message["reasoning_content"] = turn.reasoning_content
    answer: dict[str, Any] = {
        "index": choice.index,
        "message": message,
        "logprobs": None,
        "finish_reason": "tool_calls" if calls else choice.finish_reason,
    }
    if body.logprobs:
        answer["logprobs"] = _logprobs(renderer, choice.token_ids, choice.logprobs, choice.top_logprobs)
    if body.return_token_ids:
        answer |= {"token_ids": choice.token_ids, "versions": choice.versions}
        if choice.replica:
            answer["replica"] = choice.replica
    return answer


def _logprobs(
    renderer: Renderer, token_ids: Sequence[int], logprobs: Sequence[float], top: Sequence[Sequence[TokenLogprob]]
) -> dict[str, Any]:
    """`logprobs` of a choice, or of a part of one."""
    content = []
    for position, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True)):
        alternatives = top[position] if position < len(top) else []
        entry = _logprob(renderer, token_id, logprob)
        entry["top_logprobs"] = [_logprob(renderer, other.token_id, other.logprob) for other in alternatives]
        content.append(entry)
    return {"content": content, "refusal": None}


def _logprob(renderer: Renderer, token_id: int, logprob: float) -> dict[str, Any]:
    text = renderer.token_text(token_id)
    return {"token": text, "logprob": finite(logprob), "bytes": renderer.token_bytes(token_id)}


def finite(logprob: float) -> float:
    """JSON has no infinity; a token outside the support gets a number that no real one has."""
    return logprob if logprob > -9999.0 else -9999.0


class _ChatChunks(ChunkMaker):
    """Chunks of a conversation's next turn: who speaks, what each token adds to it, and how it ended."""

    def __init__(self, service: ModelService, asked: GenerationRequest, body: ChatBody) -> None:
        super().__init__(service, asked, body.stream_options or StreamOptions())
        self._body = body
        is_thinking = service.renderer.visible_text(asked.prompt_ids[-16:]).rstrip().endswith(THINK_OPEN)
        self._turns = [TurnSplitter(has_tools=body.has_tools, is_thinking=is_thinking) for _ in range(asked.n)]

    def chunk(self, choices: Choices, used: Mapping[str, int] | None = None) -> dict[str, Any]:
        answer_id = f"chatcmpl-{self.asked.request_id}"
        return dialect.completion_chunk(answer_id, self.created, self.service.name_of(self.asked), choices, used)

    def begin(self) -> Iterator[Mapping[str, Any]]:
        """The chunks that say who speaks."""
        for index in range(self.asked.n):
            yield self.piece(_delta(index, {"role": "assistant", "content": ""}))

    def of_token(self, event: TokenEvent) -> Iterator[Choices]:
        """What a token adds to its turn."""
        if event.token_id is None:
            return
        more: dict[str, Any] = {}
        parts = self._turns[event.choice].add(self.texts[event.choice].add(event.token_id))
        if self._body.logprobs:
            more["logprobs"] = _logprobs(self.service.renderer, [event.token_id], [event.logprob], [event.top_logprobs])
        if self._body.return_token_ids:
            more |= {"token_ids": [event.token_id], "versions": [event.version]}
        if parts or more:
            yield _delta(event.choice, _texts(parts), more)

    def of_end(self, index: int, reason: str, stop: str | None) -> Iterator[Choices]:
        """What was held back, the tool calls, and the reason."""
        turn = self._turns[index]
        parts = turn.add(self.texts[index].finish(stop))
        parts += turn.finish()
        content, calls = parse_tool_calls(turn.tail)
        if content:
            parts.append(TurnPart("content", content))
        delta = _texts(parts)
        if calls:
            delta["tool_calls"] = dialect.call_deltas(dialect.nested_call(call._asdict()) for call in calls)
        if delta:
            yield _delta(index, delta)
        yield _delta(index, {}, {"finish_reason": "tool_calls" if calls else reason})


def _delta(index: int, delta: dict[str, Any], more: dict[str, Any] | None = None) -> Choices:
    return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **(more or {})}]


def _texts(parts: list[TurnPart]) -> dict[str, Any]:
    delta: dict[str, Any] = {}
    for part in parts:
        key = "reasoning_content" if part.kind == "reasoning" else "content"
        delta[key] = delta.get(key, "") + part.text
    return delta


ROUTES = [("POST", "/v1/chat/completions", chat_completions)]
