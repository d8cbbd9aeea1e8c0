"""Talking to a Hub: a client of its HTTP API, and where its address and token are kept.

Parts: `HubClient`; `HubContext`, `Contexts` (saved addresses with their tokens, in a file that its user alone can
read). The environment goes before the file: METTLE_API_KEY and METTLE_HUB_URL. Invariant: a token is sent to the
address that it was saved for, and to no other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from mettle.errors import ServiceError, UserError

if TYPE_CHECKING:
    import httpx

DEFAULT_URL: Final = "http://127.0.0.1:7860"
CONNECT_S: Final = 5.0
ANSWER_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class HubContext:
    """A Hub and who one is there. `team` is the slug of the team that acts; empty is oneself."""

    url: str = DEFAULT_URL
    token: str = field(default="", repr=False)
    user: str = ""
    team: str = ""


@dataclass(slots=True)
class Contexts:
    """The contexts that are saved, and the one in use."""

    path: Path
    current: str = "default"
    saved: dict[str, HubContext] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path | None = None) -> Contexts:
        """Those of this user. Raises: UserError when the file cannot be read."""
        path = path or _default_path()
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            known = {name: HubContext(**entry) for name, entry in value["contexts"].items()}
            return cls(path, str(value["current"]), known)
        except FileNotFoundError:
            return cls(path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} cannot be read ({error}); mend it, or remove it and `mettle login`") from error

    def save(self) -> None:
        """Write the file, readable by its user alone. Raises: OSError when the disk refuses."""
        value = {"current": self.current, "contexts": {name: asdict(entry) for name, entry in self.saved.items()}}
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        aside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(value, file, indent=2)
                file.write("\n")
            os.replace(aside, self.path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise

    @property
    def active(self) -> HubContext:
        """The one in use, with what the environment says instead."""
        here = self.saved.get(self.current, HubContext())
        url, key = os.environ.get("METTLE_HUB_URL", ""), os.environ.get("METTLE_API_KEY", "")
        if url and checked_url(url) != here.url:
            here = HubContext(checked_url(url))  # a saved token is not for another address
        return replace(here, token=key) if key else here


def checked_url(url: str) -> str:
    """An address without what clients of the field leave at its end. Raises: UserError when it is none."""
    text = url.strip()
    parts = urlsplit(text if "://" in text else f"http://{text}")
    try:
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_good = False
    if not is_good or parts.username or parts.query or parts.fragment:
        raise UserError(f"{url!r} is no address of a Hub; write it like https://hub.example.org or {DEFAULT_URL}")
    path = parts.path.rstrip("/").removesuffix("/api/v1").rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path}"


class HubClient:
    """Asks one Hub. Raises from each call: UserError for what the Hub refuses, ServiceError when it does not answer."""

    def __init__(self, context: HubContext, *, transport: httpx.BaseTransport | None = None) -> None:
        import httpx

        self.context = context
        headers = {"Authorization": f"Bearer {context.token}"} if context.token else {}
        self.http = httpx.Client(
            base_url=context.url, headers={**headers, "User-Agent": "mettle"}, transport=transport,
            timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S),
        )  # fmt: skip

    def get(self, path: str, **params: Any) -> dict[str, Any]:
        """A JSON object under /api/v1."""
        return self.ask("GET", path, params={name: value for name, value in params.items() if value is not None})

    def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return self.ask("POST", path, json=body)

    def delete(self, path: str) -> dict[str, Any]:
        return self.ask("DELETE", path)

    def ask(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        """Any request under /api/v1; an answer without a body is an empty object."""
        answer = self.send(method, f"/api/v1{path}", **request)
        try:
            value = answer.json() if answer.content else {}
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise ServiceError(f"{self.context.url} answers, but not as a Hub does; is it the right address?")
        return value

    def send(self, method: str, path: str, **request: Any) -> httpx.Response:
        """Any request; returns an answer that is no refusal."""
        answer = self._answered(lambda: self.http.request(method, path, **request))
        if answer.is_success:
            return answer
        raise refusal(answer)

    def download(self, path: str, target: Path) -> None:
        """Stream an answer into a file."""
        import httpx

        try:
            with self.http.stream("GET", path) as answer, target.open("wb") as file:
                if not answer.is_success:
                    answer.read()
                    raise refusal(answer)
                for chunk in answer.iter_bytes():
                    file.write(chunk)
        except httpx.HTTPError as error:
            raise self._silent(error) from error

    def close(self) -> None:
        self.http.close()

    def __enter__(self) -> HubClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _answered(self, ask: Callable[[], httpx.Response]) -> httpx.Response:
        import httpx

        try:
            return ask()
        except httpx.HTTPError as error:
            raise self._silent(error) from error

    def _silent(self, error: Exception) -> ServiceError:
        what = str(error) or type(error).__name__
        return ServiceError(
            f"no answer from the Hub at {self.context.url} ({what}); is `mettle hub serve` running there?"
        )


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


def _default_path() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "mettle" / "hub.json"
