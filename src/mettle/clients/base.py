"""What a client is: one model call in, one `Response` out.

Invariant: a call returns a `Response` or raises a `RolloutError`; there is no third outcome, and one failed call says
nothing about the next.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from mettle.records.messages import Messages, Response, Tool

STREAMING = frozenset({"stream", "stream_options"})
"""A client answers with whole responses, so asking the endpoint for a stream would get what nobody reads."""


class Client(ABC):
    """Talks to one model endpoint."""

    FORWARDED: ClassVar[frozenset[str]] = frozenset()
    """Fields besides sampling (`tool_choice`, ...) that the endpoint understands, should a caller want to set them."""

    @abstractmethod
    async def get_response(
        self,
        prompt: Messages,
        model: str,
        sampling_args: Mapping[str, Any] | None = None,
        tools: list[Tool] | None = None,
        **kwargs: Any,
    ) -> Response:
        """The model's answer to `prompt`. `state=` may carry the rollout, whose earlier turns a client may extend."""

    async def close(self) -> None:
        """Let go of connections. A closed client may be used again."""
        return


def request_fields(sampling_args: Mapping[str, Any] | None) -> dict[str, Any]:
    """Sampling arguments as fields of a request: None left out, `extra_body` laid over the rest, never as a stream."""
    fields = {key: value for key, value in (sampling_args or {}).items() if value is not None and key not in STREAMING}
    extra = fields.pop("extra_body", None)
    fields.update(extra or {})
    return fields
