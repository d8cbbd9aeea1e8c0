"""Compressed bodies: zstd, unpacked up to a limit, so that a few bytes can't fill the memory."""

from __future__ import annotations

import zstandard

from mettle.errors import UserError


def unpacked(body: bytes, encoding: str, *, max_bytes: int) -> bytes:
    """The body as it was before `Content-Encoding`. Raises: UserError."""
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise UserError(f"content encoding {encoding[:40]!r} is not taken; zstd is")
    try:
        with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(body) as reader:
            data = reader.read(max_bytes + 1)
    except (zstandard.ZstdError, MemoryError) as error:
        raise UserError(f"the body is not zstd: {str(error)[:120]}") from None
    if len(data) > max_bytes:
        raise UserError(f"the body is longer than the {max_bytes:,} bytes that are taken, once unpacked")
    return data
