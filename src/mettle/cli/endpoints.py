"""Named endpoints: `configs/endpoints.toml` says which model, address and key a short name stands for.

[[endpoint]]
endpoint_id = "mine"
model = "policy"
url = "http://127.0.0.1:8000/v1"
key = "MY_KEY"          # name of the environment variable that holds the key; optional
headers = {}            # optional
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mettle.errors import UserError

ENDPOINTS_FILE = Path("configs/endpoints.toml")
_KEYS = {"endpoint_id", "model", "url", "key", "api_client_type", "headers"}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a model is, and how to be let in."""

    model: str
    base_url: str
    api_key_var: str | None = None
    client_type: str = "openai_chat_completions"
    headers: dict[str, str] = field(default_factory=dict)


def read_endpoints(path: Path = ENDPOINTS_FILE) -> dict[str, Endpoint]:
    """The endpoints of a file; none when there is no file.

    Raises: UserError for a file that is not as above.
    """
    if not path.exists():
        return {}
    try:
        rows = tomllib.loads(path.read_text(encoding="utf-8")).get("endpoint", [])
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path}: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path}: endpoints are [[endpoint]] tables")
    return dict(_endpoint(path, number, row) for number, row in enumerate(rows))


def _endpoint(path: Path, number: int, row: dict[str, Any]) -> tuple[str, Endpoint]:
    missing = {"endpoint_id", "model", "url"} - set(row)
    unknown = set(row) - _KEYS
    if missing or unknown:
        what = f"lacks {', '.join(sorted(missing))}" if missing else f"has an unknown key {sorted(unknown)[0]!r}"
        raise UserError(f"{path}: endpoint.{number} {what}; it may have {', '.join(sorted(_KEYS))}")
    kind = str(row.get("api_client_type", "openai_chat_completions"))
    return str(row["endpoint_id"]), Endpoint(
        row["model"], row["url"], row.get("key"), kind, dict(row.get("headers", {}))
    )
