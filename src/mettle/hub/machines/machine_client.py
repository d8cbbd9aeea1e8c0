"""A joined machine's side of its Hub's API. The machine asks; nothing asks it.

Raises from each call: LeaseLostError for work that is another's by now, UserError for what the Hub refuses for good,
ServiceError for what may go well later (no answer, a Hub that is starting, a full disk there).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import mettle
from mettle.clients.hub import HubClient
from mettle.clients.hub_contexts import HubContext
from mettle.clients.hub_requests import refusal
from mettle.errors import MettleError, ServiceError, UserError
from mettle.hub.machines.work_files import Mode

if TYPE_CHECKING:
    import httpx

_LATER = frozenset({408, 425, 429})


class LeaseLostError(MettleError):
    """The work was given to another machine, or taken back."""


class MachineClient:
    """Speaks for one machine, with its secret."""

    def __init__(self, url: str, secret: str, *, transport: httpx.BaseTransport | None = None) -> None:
        self.url = url
        self._http = HubClient(HubContext(url, secret), transport=transport).http

    def join(self, token: str, digest: str, facts: dict[str, Any]) -> dict[str, Any]:
        return self._ask("POST", "/join", json={"token": token, "digest": digest, **_version(), "facts": facts})

    def come_back(self) -> dict[str, Any]:
        return self._ask("POST", "/back", json=_version())

    def beat(self, leases: list[str], *, is_asking: bool, facts: dict[str, Any] | None) -> dict[str, Any]:
        body = {**_version(), "leases": leases, "is_asking": is_asking, "facts": facts}
        return self._ask("POST", "/beat", json=body)

    def leave(self, *, is_over: bool) -> str:
        return str(self._ask("POST", "/leave", json={"is_over": is_over})["state"])

    def end(self, lease: str, code: int) -> None:
        self._ask("POST", f"/leases/{lease}/end", json={"code": code})

    def give_back(self, lease: str) -> None:
        self._ask("POST", f"/leases/{lease}/back", json={})

    def hand_in(self, lease: str, name: str, data: bytes, *, offset: int, size: int, mode: Mode) -> bool:
        """False when the file at the Hub does not end where the piece begins."""
        params: dict[str, Any] = {"offset": offset, "size": size, "mode": mode}
        with _silence(self.url):
            answer = self._http.put(_path(f"/leases/{lease}/files/{quote(name)}"), content=data, params=params)
        if answer.status_code == 409 and _code(answer) == "wrong_offset":
            return False
        _must_be_good(answer)
        return True

    def fetch(self, lease: str, kind: str, name: str, target: Path) -> None:
        """A file of the work (`files`), or of its model (`inputs`)."""
        target.parent.mkdir(parents=True, exist_ok=True)
        with _silence(self.url), self._http.stream("GET", _path(f"/leases/{lease}/{kind}/{quote(name)}")) as answer:
            if not answer.is_success:
                answer.read()
            _must_be_good(answer)
            with target.open("wb") as file:
                for chunk in answer.iter_bytes():
                    file.write(chunk)

    def close(self) -> None:
        self._http.close()

    def _ask(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        with _silence(self.url):
            answer = self._http.request(method, _path(path), **request)
        _must_be_good(answer)
        try:
            value = answer.json()
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise ServiceError(f"{self.url} answers, but not as a Hub does; is it the right address?")
        return value


def _version() -> dict[str, str]:
    return {"version": mettle.__version__}


def _path(path: str) -> str:
    return f"/api/v1/compute{path}"


@contextmanager
def _silence(url: str) -> Iterator[None]:
    import httpx

    try:
        yield
    except httpx.HTTPError as error:
        raise ServiceError(f"no answer from the Hub at {url} ({str(error) or type(error).__name__})") from error


def _must_be_good(answer: httpx.Response) -> None:
    if answer.is_success:
        return
    if answer.status_code == 409 and _code(answer) == "lease_lost":
        raise LeaseLostError("this work is another's by now")
    said = str(refusal(answer)).replace("; `mettle login` signs in", "")
    raise ServiceError(said) if answer.status_code >= 500 or answer.status_code in _LATER else UserError(said)


def _code(answer: httpx.Response) -> str:
    try:
        return str(answer.json().get("code", ""))
    except (ValueError, AttributeError):
        return ""
