"""The judge's client as reward functions see it: `judge_client.chat.completions.create(...)`, over any of our clients.

Parts: `JudgeClient`, `JudgeAnswer`, `JudgeCallFailed`. Made from an `AsyncOpenAI` object, a `ClientConfig`, a base URL,
a `Client`, or nothing, which means api.openai.com. Invariants: nothing is looked up or opened before the first call, so
a missing key is one error then and no error for those who never ask the judge; a call that fails is the judge's
failure, and not that of the model whose rollout is judged; while one is under way the process's beat says whom it asks.
"""

from __future__ import annotations

import os
from typing import Any

from mettle.clients.answer_length import readable
from mettle.clients.base import Client
from mettle.clients.config import ClientConfig
from mettle.clients.errors import ModelError
from mettle.clients.factory import client_from
from mettle.errors import JudgeError, RolloutError
from mettle.processes.beats import asking
from mettle.records.messages import Response, messages_from


class JudgeCallFailed(JudgeError, ModelError):
    """What a reward function sees of a judge that fails: an endpoint's error, laid at the judge."""


class JudgeAnswer(dict[str, Any]):
    """A dict whose keys are attributes, as deep as it goes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def model_dump(self, **_: Any) -> dict[str, Any]:
        """The dict."""
        return dict(self)


class JudgeClient:
    """Stands in for an `AsyncOpenAI` object. Attributes of the object that it was made from are reached through it."""

    def __init__(self, source: Any = None) -> None:
        self._source = source
        self._client: Client | None = None
        self.completions = self
        self.chat = self

    @property
    def client(self) -> Client:
        """The client behind it.

        Raises: UserError when a key is needed and not set.
        """
        if self._client is None:
            self._client = client_from(_openai() if self._source is None else self._source)
        return self._client

    @property
    def retries_itself(self) -> bool:
        """True when lost connections and 5xx were tried again below already."""
        return getattr(getattr(self.client, "endpoint", None), "transport", None) is not None

    @property
    def is_blocking(self) -> bool:
        """True when it was made from an `OpenAI` object."""
        return any(kind.__name__ == "SyncAPIClient" for kind in type(self._source).__mro__)

    async def ask(self, model: str, text: str, sampling_args: dict[str, Any]) -> Response:
        """The answer to one user message."""
        messages = messages_from([{"role": "user", "content": text}])
        with asking(self._name(model)):
            return readable(await self.client.get_response(messages, model, sampling_args))

    async def create(self, *, model: str, messages: list[Any], **sampling_args: Any) -> JudgeAnswer:
        """A chat completion in OpenAI's shape. Raises: JudgeCallFailed."""
        tools = sampling_args.pop("tools", None)
        try:
            with asking(self._name(model)):
                response = readable(
                    await self.client.get_response(messages_from(messages), model, sampling_args, tools)
                )
        except RolloutError as error:
            raise JudgeCallFailed(f"judge {model}: {error}") from error
        said = response.message
        calls = [_nested(call) for call in said.tool_calls or []] or None
        message = JudgeAnswer(
            role="assistant", content=said.content, reasoning_content=said.reasoning_content, tool_calls=calls
        )
        choice = JudgeAnswer(index=0, message=message, finish_reason=said.finish_reason)
        usage = JudgeAnswer(response.usage) if response.usage else None
        return JudgeAnswer(
            id=response.id, model=response.model, created=response.created, choices=[choice], usage=usage
        )

    def _name(self, model: str) -> str:
        """What the judge is called where somebody waits for it."""
        url = getattr(self.client, "base_url", "")
        return f"judge {model} at {url}" if url else f"judge {model}"

    async def close(self) -> None:
        """Close connections of our own."""
        if self._client is not None:
            await self._client.close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or self._source is None:
            raise AttributeError(name)
        return getattr(self._source, name)


def _openai() -> ClientConfig:
    """The endpoint that the OpenAI library would use, by the variables that it reads."""
    default = ClientConfig()
    base_url = os.environ.get("OPENAI_BASE_URL") or default.api_base_url
    return ClientConfig(api_base_url=base_url, api_key_var="OPENAI_API_KEY")


def _nested(call: Any) -> JudgeAnswer:
    return JudgeAnswer(
        id=call["id"], type="function", function=JudgeAnswer(name=call["name"], arguments=call["arguments"])
    )
