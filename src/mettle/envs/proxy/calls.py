"""One call of an agent program, whatever API it speaks.

Parts: `AgentCall`; `DIALECTS` (the routes that agents know, and who reads them).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mettle.clients.dialects import chat, messages, responses
from mettle.clients.dialects.call import ModelCall, ServedDialect

DIALECTS: dict[str, ServedDialect] = {
    "/chat/completions": chat,
    "/responses": responses,
    "/messages": messages,
    "/messages/count_tokens": messages,
}


@dataclass(slots=True, kw_only=True)
class AgentCall(ModelCall):
    """What an agent asked for. `digest` is the same for the same request sent again."""

    dialect: ServedDialect
    headers: Mapping[str, str] = field(default_factory=dict)
    digest: bytes = b""
    num_retries: int = 0
