"""Addresses and times as answers have them."""

from __future__ import annotations

from datetime import UTC, datetime

from fastapi import Request
from starlette.convertors import Convertor, register_url_convertor


def root_of(request: Request) -> str:
    """The address that the client used, so that it is right behind a proxy, too."""
    scheme = request.headers.get("x-forwarded-proto", request.url.scheme)
    return f"{'https' if scheme == 'https' else 'http'}://{request.headers.get('host', '')}"


def iso(at: float | None) -> str | None:
    """A time as the field's clients read it."""
    if at is None:
        return None
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class _ResultId(Convertor[str]):
    """An id of a pushed evaluation; evaluations of this machine's store have other names under the same path."""

    regex = "c[a-z0-9]{24}"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("result", _ResultId())
