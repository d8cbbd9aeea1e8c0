"""The wire of a sandbox service, as far as both ends and the agent in a container share it. Standard library only."""

from __future__ import annotations

from typing import Final

PREFIX: Final = "/api/v1"
CLIENT_HEADER: Final = "Mettle-Client"
KEY_HEADER: Final = "Idempotency-Key"
ERROR_HEADER: Final = "Mettle-Error"
"""Repeats the body where a client cannot read it: in the refusal of a websocket."""
FILES_TYPE: Final = "application/x-mettle-files"
LINES_TYPE: Final = "application/x-ndjson"
EOF: Final = "eof"
"""The text message that ends one direction of a port's websocket."""
MAX_MESSAGE_BYTES: Final = 1 << 20
HEARTBEAT_S: Final = 15.0
"""Of an answer in lines: how long it may be silent."""
STATUSES: Final = {
    "user": 400,
    "token": 401,
    "no_machine": 404,
    "no_job": 404,
    "no_route": 404,
    "wrong_method": 405,
    "machine_ended": 410,
    "too_large": 413,
    "os": 422,
    "quota": 429,
    "checker": 422,
    "busy": 429,
    "stalled": 408,
    "refused": 403,
    "sandbox": 500,
    "internal": 500,
    "closing": 503,
    "no_space": 507,
}
"""HTTP status by the type of an error."""
