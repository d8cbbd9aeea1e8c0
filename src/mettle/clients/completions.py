"""OpenAI text completions: a prompt as bare text.

Invariant: as in `chat`, an answer is a `Response` or an error.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mettle.clients.base import Client, request_fields
from mettle.clients.chat import plain_answer, sdk_error, tokens_from, usage_from
from mettle.clients.errors import InvalidModelResponseError
from mettle.records.messages import Messages, Response, ResponseMessage, Tool, content_text

if TYPE_CHECKING:
    from mettle.clients.config import ClientConfig


class OpenAICompletionsClient(Client):
    """Text completions of an endpoint given as a base URL, a `ClientConfig`, or an `AsyncOpenAI` object."""

    PATH = "/completions"

    def __init__(self, client_or_config: ClientConfig | str | Any) -> None:
        from mettle.clients.config import ClientConfig, transport_for

        is_ours = isinstance(client_or_config, str | ClientConfig)
        self.transport = transport_for(client_or_config) if is_ours else None
        self.sdk: Any = None if is_ours else client_or_config
        self.base_url = (
            self.transport.base_url if self.transport else str(getattr(self.sdk, "base_url", "")).rstrip("/")
        )

    async def get_response(
        self,
        prompt: Messages,
        model: str,
        sampling_args: Mapping[str, Any] | None = None,
        tools: list[Tool] | None = None,
        **_: Any,
    ) -> Response:
        """One completion of the contents of `prompt`, joined as they are."""
        if tools:
            raise ValueError("text completions know no tools; use a chat endpoint for this environment")
        body: dict[str, Any] = {"model": model, "prompt": "".join(content_text(m.get("content")) for m in prompt)}
        if self.transport is not None:
            body.update(request_fields(sampling_args))
            raw: Mapping[str, Any] = await self.transport.post(self.PATH, body)
        else:
            body.update({key: value for key, value in (sampling_args or {}).items() if value is not None})
            raw = await self._through_sdk(body)
        return response_from_completion(raw, self.base_url + self.PATH)

    async def close(self) -> None:
        """Close our own connections."""
        if self.transport is not None:
            await self.transport.close()

    async def _through_sdk(self, body: dict[str, Any]) -> Mapping[str, Any]:
        assert self.sdk is not None, "without a transport there is an object to call"
        try:
            answer = await self.sdk.completions.create(**body)
        except Exception as error:
            raise sdk_error(error, self.base_url) from error
        return plain_answer(answer, self.base_url)


def response_from_completion(raw: Mapping[str, Any], url: str) -> Response:
    """A text completion as a `Response`."""
    choices = raw.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
        raise InvalidModelResponseError(f"POST {url}: an answer without choices: {str(raw)[:300]}")
    choice = choices[0]
    if not isinstance(choice.get("text"), str):
        raise InvalidModelResponseError(f"POST {url}: a choice without text: {str(choice)[:300]}")
    return Response(
        id=raw.get("id") or "",
        created=raw.get("created") or int(time.time()),
        model=raw.get("model") or "",
        usage=usage_from(raw.get("usage")),
        message=ResponseMessage(
            content=choice["text"],
            reasoning_content=None,
            tool_calls=None,
            finish_reason=choice.get("finish_reason"),
            is_truncated=choice.get("finish_reason") == "length",
            tokens=tokens_from(raw, choice),
        ),
    )
