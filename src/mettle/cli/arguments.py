"""Arguments whose text has a form of its own."""

from __future__ import annotations

import json
from typing import Any

from mettle.errors import UserError


def json_object(text: str | None, option: str) -> dict[str, Any]:
    """The JSON object given to an option; nothing given is an empty one.

    Raises: UserError naming the option and what was given.
    """
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UserError(f"{option} {text!r} is not JSON ({error}); write it like '{{\"length\": 4}}'") from error
    if not isinstance(value, dict):
        raise UserError(f"{option} {text!r} is no JSON object; write it like '{{\"length\": 4}}'")
    return value
