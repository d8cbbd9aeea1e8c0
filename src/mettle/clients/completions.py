"""OpenAI text completions: a prompt as bare text.

Invariant: as in `chat`, an answer is a `Response` or an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mettle.clients.answer import first_choice, read, response_of
from mettle.clients.base import Client
from mettle.clients.config import ClientConfig
from mettle.clients.endpoint import Endpoint
from mettle.clients.errors import InvalidModelResponseError
from mettle.records.messages import Messages, Response, Tool, content_text


class OpenAICompletionsClient(Client):
    """Text completions of an endpoint given as a base URL, a `ClientConfig`, or an `AsyncOpenAI` object."""

    PATH = "/completions"

    def __init__(self, client_or_config: ClientConfig | str | Any) -> None:
        self.endpoint = Endpoint(client_or_config)
        self.base_url = self.endpoint.base_url

    async def get_response(
        self,
        prompt: Messages,
        model: str,
        sampling_args: Mapping[str, Any] | None = None,
        tools: list[Tool] | None = None,
        *,
        state: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> Response:
        """One completion of the contents of `prompt`, joined as they are."""
        if tools:
            raise ValueError("text completions know no tools; use a chat endpoint for this environment")
        body: dict[str, Any] = {"model": model, "prompt": "".join(content_text(m.get("content")) for m in prompt)}
        body.update(self.endpoint.fields(sampling_args))
        return read(
            response_from_completion, await self.endpoint.post(self.PATH, body, state), self.base_url + self.PATH
        )

    async def close(self) -> None:
        """Close our own connections."""
        await self.endpoint.close()


def response_from_completion(raw: Mapping[str, Any], url: str) -> Response:
    """A text completion as a `Response`."""
    choice = first_choice(raw, url)
    if not isinstance(choice.get("text"), str):
        raise InvalidModelResponseError(f"POST {url}: a choice without text: {str(choice)[:300]}")
    return response_of(raw, choice, choice["text"])
