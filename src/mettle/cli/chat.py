"""Talking to an OpenAI-compatible endpoint from a terminal: one question, or a conversation, as it streams."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import click

from mettle.errors import ServiceError, UserError
from mettle.wording import printable

CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 300.0


@dataclass(slots=True)
class Conversation:
    """Messages so far, and how to ask for the next."""

    base_url: str
    model: str
    sampling: dict[str, Any]
    api_key: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, text: str) -> Iterator[str]:
        """Send a user turn and give the answer piece by piece. The turn counts only when the answer is whole."""
        turns = [*self.messages, {"role": "user", "content": text}]
        pieces: list[str] = []
        for piece in self._stream(turns):
            pieces.append(piece)
            yield piece
        self.messages = [*turns, {"role": "assistant", "content": "".join(pieces)}]

    def _stream(self, messages: list[dict[str, str]]) -> Iterator[str]:
        body = {"model": self.model, "messages": messages, "stream": True, **self.sampling}
        url = f"{self.base_url.rstrip('/')}/chat/completions"
        try:
            with _opened(url, self.api_key, body) as response:
                for line in response:
                    data = line.decode("utf-8", "replace")
                    data = data.removeprefix("data:").strip() if data.startswith("data:") else ""
                    if data and data != "[DONE]":
                        yield from _pieces(url, data)
        except urllib.error.HTTPError as error:
            raise _refusal(url, error) from error
        except (OSError, http.client.HTTPException) as error:
            raise ServiceError(f"POST {url}: {_reason(error)}; is a server running there?") from error


def first_model(base_url: str, api_key: str | None) -> str:
    """The first model that an endpoint lists.

    Raises: ServiceError when nobody answers, UserError when it lists none.
    """
    url = f"{base_url.rstrip('/')}/models"
    try:
        with _opened(url, api_key) as response:
            listed = json.loads(response.read())["data"]
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        raise ServiceError(f"GET {url}: {_reason(error)}; is a server running there?") from error
    if not listed:
        raise UserError(f"{base_url} lists no models; name one with -m")
    return str(listed[0]["id"])


def _opened(url: str, api_key: str | None, body: dict[str, Any] | None = None) -> Any:
    """The answer to a GET, or to a POST of `body`; it is slow in coming where a model thinks, a connection is not."""
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {api_key}"} if api_key else {})}
    try:
        request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
    except ValueError as error:
        raise UserError(f"{url!r} is no address of an endpoint; it looks like http://HOST:PORT/v1") from error
    return _OPENER.open(request, timeout=CONNECT_TIMEOUT_S)


class _Http(http.client.HTTPConnection):
    def connect(self) -> None:
        super().connect()
        self.sock.settimeout(READ_TIMEOUT_S)


class _Https(http.client.HTTPSConnection):
    def connect(self) -> None:
        super().connect()
        self.sock.settimeout(READ_TIMEOUT_S)


class _HttpHandler(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Http, req)


class _HttpsHandler(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Https, req)


_OPENER = urllib.request.build_opener(_HttpHandler, _HttpsHandler)


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None)
    return str(reason if isinstance(reason, OSError) else error) or type(error).__name__


def key_from(variable: str | None) -> str | None:
    """The key in an environment variable.

    Raises: UserError when a variable was named and is not set.
    """
    if variable is None:
        return None
    key = os.environ.get(variable)
    if key is None:
        raise UserError(f"the environment variable {variable} is not set")
    return key


def converse(conversation: Conversation) -> None:
    """Ask and answer until the input ends."""
    click.echo(f"{conversation.model} at {conversation.base_url}; an empty line starts anew, Ctrl-D ends", err=True)
    while True:
        try:
            text = click.prompt("you", prompt_suffix=" > ", default="", show_default=False, err=True)
        except click.Abort:
            click.echo(err=True)
            return
        if not text.strip():
            conversation.messages = conversation.messages[:1] if _has_system(conversation) else []
            continue
        for piece in conversation.ask(text):
            click.echo(printable(piece), nl=False)
        click.echo()


def _has_system(conversation: Conversation) -> bool:
    return bool(conversation.messages) and conversation.messages[0]["role"] == "system"


def _pieces(url: str, data: str) -> Iterator[str]:
    try:
        event = json.loads(data)
        if "error" in event:
            raise ServiceError(f"POST {url}: {event['error'].get('message', event['error'])}")
        for choice in event["choices"]:
            delta = choice.get("delta") or {}
            piece = delta.get("reasoning_content") or delta.get("content")
            if piece:
                yield str(piece)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ServiceError(f"POST {url}: not a chat completion stream: {data[:200]}") from error


def _refusal(url: str, error: urllib.error.HTTPError) -> Exception:
    text = error.read().decode("utf-8", "replace")
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = text[:200]
    kind = UserError if 400 <= error.code < 500 else ServiceError
    return kind(f"POST {url}: status {error.code}: {message}")
