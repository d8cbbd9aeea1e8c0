"""The client of a Hub to await: `mettle.AsyncClient`. It has the verbs of `mettle.Client`, from the same code."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mettle.clients.hub_contexts import Contexts, HubContext
from mettle.clients.hub_requests import ApiRequest, Steps, client_settings, object_of, refusal, silence
from mettle.clients.hub_verbs import AwaitedVerbs

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")


class AsyncHubClient(AwaitedVerbs):
    """Asks one Hub, many things at once if one likes. Belongs to the event loop that it is first used on."""

    def __init__(self, context: HubContext | None = None, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        import httpx

        self.context = context or Contexts.load().active
        self.http = httpx.AsyncClient(transport=transport, **client_settings(self.context))

    async def carry_out(self, steps: Steps[T]) -> T:
        try:
            request = next(steps)
            while True:
                request = steps.send(await self._object(request))
        except StopIteration as done:
            result: T = done.value
            return result

    async def get(self, path: str, **params: Any) -> dict[str, Any]:
        """A JSON object under /api/v1."""
        return await self._object(ApiRequest("GET", path, params))

    async def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return await self._object(ApiRequest("POST", path, json=body))

    async def delete(self, path: str) -> dict[str, Any]:
        return await self._object(ApiRequest("DELETE", path))

    async def ask(
        self, method: str, path: str, *, params: dict[str, Any] | None = None, json: Any = None
    ) -> dict[str, Any]:
        """Any request under /api/v1; an answer without a body is an empty object."""
        return await self._object(ApiRequest(method, path, params or {}, json))

    async def download(self, path: str, target: Path) -> None:
        """Stream an answer into a file. `path` is one of the server, as answers have it."""
        import httpx

        try:
            async with self.http.stream("GET", path) as answer:
                if not answer.is_success:
                    await answer.aread()
                    raise refusal(answer)
                with await asyncio.to_thread(target.open, "wb") as file:
                    async for chunk in answer.aiter_bytes():
                        await asyncio.to_thread(file.write, chunk)
        except httpx.HTTPError as error:
            raise silence(error, self.context) from error

    async def close(self) -> None:
        await self.http.aclose()

    async def __aenter__(self) -> AsyncHubClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _object(self, request: ApiRequest) -> dict[str, Any]:
        import httpx

        if request.target is not None:
            await self.download(request.address, request.target)
            return {}
        try:
            answer = await self.http.request(request.method, request.address, **request.arguments())
        except httpx.HTTPError as error:
            raise silence(error, self.context) from error
        return object_of(answer, self.context)
