"""OpenAI text completions (`POST /completions`), both directions, and the choice that chat completions share with them.

A prompt is bare text, so a conversation is the contents of its messages, joined as they are. Invariant: ids are read
only where the endpoint returned a logprob for each.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from mettle.clients.errors import InvalidModelResponseError, one_line
from mettle.records.messages import (
    Message,
    Response,
    ResponseMessage,
    ResponseTokens,
    ToolCall,
    Usage,
    content_text,
)


def request_body(
    model: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, fields: Mapping[str, Any]
) -> dict[str, Any]:
    """A call as JSON."""
    if tools:
        raise ValueError("text completions know no tools; use a chat endpoint for this environment")
    return {"model": model, "prompt": "".join(content_text(m.get("content")) for m in messages), **fields}


def read_response(raw: Mapping[str, Any], url: str) -> Response:
    """A text completion as a `Response`."""
    choice = first_choice(raw, url)
    if not isinstance(choice.get("text"), str):
        raise InvalidModelResponseError(f"POST {url}: a choice without text: {str(choice)[:300]}")
    return response_of_choice(raw, choice, choice["text"])


def first_choice(raw: Mapping[str, Any], url: str) -> Mapping[str, Any]:
    """The first choice of an answer.

    Raises: InvalidModelResponseError when there is none; its message is the endpoint's own where it gave one.
    """
    if raw.get("error") and not raw.get("choices"):
        said = raw["error"].get("message") if isinstance(raw["error"], Mapping) else raw["error"]
        raise InvalidModelResponseError(f"POST {url}: {one_line(str(said or raw['error']))}")
    choices = raw.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
        excerpt = json.dumps(raw, default=str)[:300]
        raise InvalidModelResponseError(f"POST {url}: an answer without choices: {excerpt}")
    return choices[0]


def response_of_choice(
    raw: Mapping[str, Any],
    choice: Mapping[str, Any],
    content: Any,
    reasoning_content: str | None = None,
    tool_calls: list[ToolCall] | None = None,
) -> Response:
    """A choice, whose text was read already, as a `Response`."""
    return Response(
        id=raw.get("id") or "",
        created=raw.get("created") or int(time.time()),
        model=raw.get("model") or "",
        usage=_usage(raw.get("usage")),
        message=ResponseMessage(
            content=content,
            reasoning_content=reasoning_content,
            tool_calls=tool_calls,
            finish_reason=choice.get("finish_reason"),
            is_truncated=choice.get("finish_reason") == "length",
            tokens=_tokens(raw, choice),
        ),
    )


def _usage(raw: Any) -> Usage | None:
    """The provider's token counts, flat; None when it gives none."""
    if not isinstance(raw, Mapping):
        return None
    prompt, completion = int(raw.get("prompt_tokens") or 0), int(raw.get("completion_tokens") or 0)
    prompt_details, completion_details = raw.get("prompt_tokens_details"), raw.get("completion_tokens_details")
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        cached_tokens=(prompt_details or {}).get("cached_tokens") or 0,
        reasoning_tokens=(completion_details or {}).get("reasoning_tokens") or 0,
        total_tokens=int(raw.get("total_tokens") or prompt + completion),
    )


def _tokens(raw: Mapping[str, Any], choice: Mapping[str, Any]) -> ResponseTokens | None:
    """The sampled ids of a choice, when the endpoint returned prompt ids, ids and their logprobs."""
    prompt_ids = raw.get("prompt_token_ids") or choice.get("prompt_token_ids")
    token_ids = choice.get("token_ids")
    logprobs = choice.get("logprobs")
    if prompt_ids is None or token_ids is None or not isinstance(logprobs, Mapping):
        return None
    entries = logprobs.get("content")
    values = [entry["logprob"] for entry in entries] if entries else logprobs.get("token_logprobs") or []
    if len(values) != len(token_ids):
        return None
    replica = str(choice.get("replica") or "")
    return ResponseTokens(prompt_ids, token_ids, values, choice.get("versions") or (), replica=replica)


# An answer that goes out


def completion(
    answer_id: str, created: int, model: str, choices: list[dict[str, Any]], usage: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A text completion, or a piece of one."""
    body: dict[str, Any] = {
        "id": answer_id,
        "object": "text_completion",
        "created": created,
        "model": model,
        "choices": choices,
    }
    return body if usage is None else {**body, "usage": usage}
