"""The client of a Hub that answers at once: `mettle.Client`. Its twin to await is in `mettle.clients.hub_async`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mettle.clients.hub_contexts import Contexts, HubContext
from mettle.clients.hub_requests import ApiRequest, Steps, client_settings, object_of, refusal, silence
from mettle.clients.hub_verbs import VerbsAtOnce

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")


class HubClient(VerbsAtOnce):
    """Asks one Hub: that of `mettle login` and the environment, unless a context says another.

    Raises from each call: UserError for what the Hub refuses, ServiceError when it does not answer.
    """

    def __init__(self, context: HubContext | None = None, *, transport: httpx.BaseTransport | None = None) -> None:
        import httpx

        self.context = context or Contexts.load().active
        self.http = httpx.Client(transport=transport, **client_settings(self.context))

    def carry_out(self, steps: Steps[T]) -> T:
        try:
            request = next(steps)
            while True:
                request = steps.send(self._object(request))
        except StopIteration as done:
            result: T = done.value
            return result

    def get(self, path: str, **params: Any) -> dict[str, Any]:
        """A JSON object under /api/v1."""
        return self._object(ApiRequest("GET", path, params))

    def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._object(ApiRequest("POST", path, json=body))

    def delete(self, path: str) -> dict[str, Any]:
        return self._object(ApiRequest("DELETE", path))

    def ask(self, method: str, path: str, *, params: dict[str, Any] | None = None, json: Any = None) -> dict[str, Any]:
        """Any request under /api/v1; an answer without a body is an empty object."""
        return self._object(ApiRequest(method, path, params or {}, json))

    def download(self, path: str, target: Path) -> None:
        """Stream an answer into a file. `path` is one of the server, as answers have it."""
        import httpx

        try:
            with self.http.stream("GET", path) as answer:
                if not answer.is_success:
                    answer.read()
                    raise refusal(answer)
                with target.open("wb") as file:
                    for chunk in answer.iter_bytes():
                        file.write(chunk)
        except httpx.HTTPError as error:
            raise silence(error, self.context) from error

    def close(self) -> None:
        self.http.close()

    def __enter__(self) -> HubClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _object(self, request: ApiRequest) -> dict[str, Any]:
        import httpx

        if request.target is not None:
            self.download(request.address, request.target)
            return {}
        try:
            answer = self.http.request(request.method, request.address, **request.arguments())
        except httpx.HTTPError as error:
            raise silence(error, self.context) from error
        return object_of(answer, self.context)
