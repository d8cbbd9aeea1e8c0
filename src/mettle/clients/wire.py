"""JSON as it goes over the wire, without surrogates: half of a character is not text, and most programs refuse it.

Parts: `encoded` (a request), `decoded` (an answer), `well_formed` (any value). Models and tools make lone surrogates by
cutting text in the middle of a character. Invariant: what leaves and what comes in is text that UTF-8 can write; each
lone surrogate is U+FFFD, the sign for a character that was lost.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json


def encoded(body: Mapping[str, Any]) -> bytes:
    """`body` as UTF-8 JSON.

    Raises: TypeError or ValueError when something in it has no JSON.
    """
    text = json.dumps(body, ensure_ascii=False)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return _paired(text).encode()


def decoded(payload: bytes) -> Any:
    """The value that `payload` is the JSON of.

    Raises: ValueError (RecursionError for one nested without end) when it is not JSON.
    """
    try:
        value = from_json(payload)
    except ValueError:  # lone surrogates and deep nesting, which it does not read; or no JSON, which `json` explains
        value = json.loads(payload)
    may_have_lone = b"\\ud" in payload or b"\\uD" in payload or b"\xed" in payload
    return well_formed(value) if may_have_lone else value


def well_formed(value: Any) -> Any:
    """`value` with each lone surrogate in its texts replaced; the value itself where there is none."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return _paired(value)
    elif isinstance(value, dict):
        for key in list(value):
            item, name = well_formed(value[key]), well_formed(key)
            if name is not key:
                del value[key]
            value[name] = item
    elif isinstance(value, list):
        for index, item in enumerate(value):
            value[index] = well_formed(item)
    return value


def _paired(text: str) -> str:
    """Two halves side by side become their character, a half alone U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
