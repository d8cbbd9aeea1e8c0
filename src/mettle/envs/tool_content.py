"""What an MCP tool answered, as the content of a message.

Parts: `content_of`. Invariants: text alone stays text; images and sounds become the content parts that chat endpoints
know; nothing is left out without a word saying so, and nothing is longer than the limit.
"""

from __future__ import annotations

import json
from typing import Any

from mettle.records.messages import Content

NOTHING = "(no content)"
MAX_MEDIA_CHARS = 20_000_000
"""Longest image or sound, in base64 characters."""


def content_of(result: dict[str, Any], max_chars: int) -> Content:
    """The content of a result in the protocol's own words (`content`, `structuredContent`)."""
    parts = [_part(block) for block in result.get("content") or []]
    if not parts and "structuredContent" in result:
        parts = [_text(json.dumps(result["structuredContent"], ensure_ascii=False))]
    if not parts:
        return NOTHING
    if all(part["type"] == "text" for part in parts):
        return _cut("\n".join(part["text"] for part in parts), max_chars)
    return [_text(_cut(part["text"], max_chars)) if part["type"] == "text" else part for part in parts]


def _part(block: dict[str, Any]) -> dict[str, Any]:
    kind = block.get("type")
    if kind == "text":
        return _text(block.get("text", ""))
    if kind in ("image", "audio"):
        return _media(block.get("mimeType", ""), block.get("data", ""))
    if kind == "resource":
        return _resource(block.get("resource") or {})
    if kind == "resource_link":
        about = ": ".join(str(block[key]) for key in ("name", "description") if block.get(key))
        return _text(f"[{about}]({block.get('uri', '')})")
    return _text(json.dumps(block, ensure_ascii=False))


def _media(mime: str, data: str) -> dict[str, Any]:
    kind, _, form = mime.partition("/")
    if len(data) > MAX_MEDIA_CHARS:
        return _text(f"[{mime} of {len(data) * 3 // 4} bytes, too large to show]")
    if kind == "image":
        return {"type": "image_url", "image_url": {"url": f"data:{mime};base64,{data}"}}
    if kind == "audio":
        return {"type": "input_audio", "input_audio": {"data": data, "format": form.removeprefix("x-")}}
    return _text(f"[{mime or 'data'} of {len(data) * 3 // 4} bytes]")


def _resource(resource: dict[str, Any]) -> dict[str, Any]:
    if "text" in resource:
        return _text(str(resource["text"]))
    return _media(resource.get("mimeType", ""), resource.get("blob", ""))


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _cut(text: str, max_chars: int) -> str:
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}\n[{len(text) - max_chars} more characters left out]"
