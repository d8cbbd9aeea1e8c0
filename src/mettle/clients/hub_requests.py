"""What the two clients of a Hub share: requests as values, what an answer means, and what is said when there is none.

A verb is a generator of requests (`Steps`): it yields each, is sent the JSON object of the answer, and returns its
result. It is written once (`mettle.clients.hub_verbs`); the clients differ in how they wait.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import quote, urlsplit

from mettle.clients.hub_contexts import HubContext
from mettle.errors import ServiceError, UserError

if TYPE_CHECKING:
    import httpx

CONNECT_S: Final = 5.0
ANSWER_S: Final = 30.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """One request. `path` is under `root`, which is empty for a path that an answer names (`own_path`)."""

    method: str
    path: str
    params: Mapping[str, Any] = field(default_factory=dict)
    json: Any = None
    content: bytes | None = None
    """Sent in place of `json`."""
    root: str = "/api/v1"
    is_public: bool = False
    """Sent without the token, to a whole address, which is itself the secret."""
    timeout_s: float | None = None
    target: Path | None = None
    """Where the answer is streamed to; the result is an empty object then."""

    def arguments(self) -> dict[str, Any]:
        """What httpx takes."""
        import httpx

        told: dict[str, Any] = {"params": {key: value for key, value in self.params.items() if value is not None}}
        if self.content is not None:
            told["content"] = self.content
        elif self.json is not None:
            told["json"] = self.json
        if self.is_public:
            told["headers"] = {"Authorization": ""}
        if self.timeout_s is not None:
            told["timeout"] = httpx.Timeout(self.timeout_s, connect=CONNECT_S)
        return told

    @property
    def address(self) -> str:
        """The path on the server, or the whole address of what needs no token."""
        assert self.is_public or "://" not in self.path, "a token goes to the address that it is for, and to no other"
        return self.path if self.is_public else f"{self.root}{self.path}"


Steps = Generator[ApiRequest, dict[str, Any], T]


def part(text: str) -> str:
    """A word as one part of a path."""
    return quote(text, safe="@")


def own_path(url: Any) -> str:
    """The path of an address that an answer names: a token stays with the address that we know, whatever it says."""
    return urlsplit(str(url)).path


def slug_parts(slug: str) -> tuple[str, str]:
    """(owner/name as a path, version) of `owner/name` or `owner/name@version`. Raises: UserError for another form."""
    name, _, version = slug.partition("@")
    owner, slash, own = name.partition("/")
    if not slash or not owner or not own or "/" in own:
        raise UserError(f"{slug!r} names no environment of a Hub: write owner/name or owner/name@version")
    return f"{part(owner)}/{part(own)}", version or "latest"


def client_settings(context: HubContext) -> dict[str, Any]:
    """How httpx's clients are made, of either kind."""
    import httpx

    headers = {"Authorization": f"Bearer {context.token}"} if context.token else {}
    return {
        "base_url": context.url, "headers": {**headers, "User-Agent": "mettle"},
        "timeout": httpx.Timeout(ANSWER_S, connect=CONNECT_S),
    }  # fmt: skip


def object_of(answer: httpx.Response, context: HubContext) -> dict[str, Any]:
    """The JSON object of an answer; an empty one where it has no body. Raises: UserError for a refusal."""
    if not answer.is_success:
        raise refusal(answer)
    try:
        value = answer.json() if answer.content else {}
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ServiceError(f"{context.url} answers, but not as a Hub does; is it the right address?")
    return value


def refusal(answer: httpx.Response) -> UserError:
    """What a Hub says when it refuses, in one line."""
    try:
        detail = answer.json()["detail"]
    except (ValueError, KeyError, TypeError):
        detail = answer.text[:200].strip() or answer.reason_phrase
    if isinstance(detail, list):
        detail = "; ".join(f"{'.'.join(map(str, d.get('loc', ())))}: {d.get('msg')}" for d in detail)
    if answer.status_code == 401:
        detail = f"{detail}; `mettle login` signs in"
    return UserError(f"the Hub refused (HTTP {answer.status_code}): {detail}")


def silence(error: Exception, context: HubContext) -> ServiceError:
    """What is said of a Hub that does not answer."""
    what = str(error) or type(error).__name__
    return ServiceError(f"no answer from the Hub at {context.url} ({what}); is `mettle hub serve` running there?")
