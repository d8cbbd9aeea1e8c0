"""Several endpoints that serve the same model: rollouts take turns among them.

Parts: `RotatingClient`. Invariant: all calls of one rollout go to one endpoint, whose cache then holds its earlier
turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from mettle.clients.base import Client
from mettle.clients.config import ClientConfig
from mettle.records.messages import Messages, Response, Tool

STATE_KEY = "client_idx"
"""Where a rollout's state remembers its endpoint; as in verifiers, it can be saved as a state column."""


class RotatingClient(Client):
    """`clients` in turn, each with the model to ask it for (None: the one that is asked for).

    `source` is what they were made from, for a process that makes them again.
    """

    def __init__(self, clients: Sequence[tuple[Client, str | None]], source: ClientConfig | None = None) -> None:
        self.clients = list(clients)
        self.source = source
        self.base_url = str(getattr(self.clients[0][0], "base_url", ""))
        self._turns = count()

    async def get_response(
        self,
        prompt: Messages,
        model: str,
        sampling_args: Mapping[str, Any] | None = None,
        tools: list[Tool] | None = None,
        **kwargs: Any,
    ) -> Response:
        """One model call, at the endpoint of its rollout."""
        client, own_model = self.clients[self._index(kwargs.get("state"))]
        return await client.get_response(prompt, own_model or model, sampling_args, tools, **kwargs)

    async def close(self) -> None:
        """Close every client."""
        for client, _ in self.clients:
            await client.close()

    def _index(self, state: Any) -> int:
        if state is None:
            return next(self._turns) % len(self.clients)
        index = state.get(STATE_KEY)
        if not isinstance(index, int):
            index = state[STATE_KEY] = next(self._turns) % len(self.clients)
        return index % len(self.clients)
