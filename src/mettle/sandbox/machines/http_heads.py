"""Heads of the requests that a machine sends to its proxy: strict, so that two readers cannot read them differently.

Parts: `read_head`, `Head`. Invariant: what `Head.forwarded` sends is built anew from checked parts, with one Host (that
of the destination) and one length; a body without a stated length is refused, so that nothing follows a request but its
own body.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

_MAX_HEAD_BYTES: Final = 1 << 15
_MAX_HEADERS: Final = 100
_MAX_PORT: Final = 65_535
_MAX_LABEL: Final = 63
_PORT: Final = re.compile(r"\d{1,5}", re.ASCII)
_REQUEST: Final = re.compile(rb"([A-Z]{1,20}) ([\x21-\x7e]{1,8192}) HTTP/1\.[01]")
_HEADER: Final = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,256}):[ \t]*([\x20-\x7e\x80-\xff\t]*)")
_HOST: Final = re.compile(r"[a-z0-9._-]{1,253}|[0-9a-f:.]{2,45}")
# They are about this one connection; or they are set anew.
_NOT_FORWARDED: Final = frozenset(
    (
        *(b"connection", b"proxy-connection", b"keep-alive", b"proxy-authorization", b"proxy-authenticate", b"te"),
        *(b"trailer", b"transfer-encoding", b"upgrade", b"host", b"content-length", b"expect"),
    )
)


class BadHead(Exception):
    """A request that is not answered; `status` is what it is told."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


@dataclass(frozen=True, slots=True)
class Head:
    """One request: where to, and for one that is forwarded what."""

    host: str
    port: int
    is_tunnel: bool
    method: bytes = b""
    target: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body_bytes: int = 0

    def forwarded(self) -> bytes:
        """The head for the destination."""
        name = f"[{self.host}]" if ":" in self.host else self.host
        host = name.encode() if self.port == 80 else f"{name}:{self.port}".encode()
        lines = [self.method + b" " + self.target + b" HTTP/1.1", b"Host: " + host, b"Connection: close"]
        if self.body_bytes or self.method not in (b"GET", b"HEAD"):
            lines.append(b"Content-Length: " + str(self.body_bytes).encode())
        lines += [name + b": " + value for name, value in self.headers]
        return b"\r\n".join(lines) + b"\r\n\r\n"


async def read_head(reader: asyncio.StreamReader) -> Head:
    """The next request. Raises: BadHead, and what the reader raises."""
    try:
        data = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError as error:
        raise BadHead(431, "the request's head is too long") from error
    if len(data) > _MAX_HEAD_BYTES:
        raise BadHead(431, "the request's head is too long")
    first, *rest = data[:-4].split(b"\r\n")
    request = _REQUEST.fullmatch(first)
    if request is None or len(rest) > _MAX_HEADERS:
        raise BadHead(400, "this is an HTTP proxy, and that is no request")
    if request[1] == b"CONNECT":
        host, port = _split(request[2].decode("ascii"))
        return Head(host, port, is_tunnel=True)
    return _plain(request[1], request[2].decode("ascii"), _headers(rest))


def _headers(lines: list[bytes]) -> list[tuple[bytes, bytes]]:
    found = [_HEADER.fullmatch(line) for line in lines]
    if not all(found):
        raise BadHead(400, "a header is malformed")
    return [(match[1], match[2].strip()) for match in found if match]


def _plain(method: bytes, target: str, headers: list[tuple[bytes, bytes]]) -> Head:
    if not target.startswith("http://"):
        raise BadHead(400, "only http:// is forwarded, and other protocols by CONNECT; http_proxy says how")
    try:
        parts = urlsplit(target)
    except ValueError as error:
        raise BadHead(400, f"the URL cannot be read: {error}") from error
    if "@" in parts.netloc:
        raise BadHead(400, "the URL holds a user; send an Authorization header")
    authority = parts.netloc if re.search(r":\d+$", parts.netloc) else f"{parts.netloc}:80"
    host, port = _split(authority)
    if any(name.lower() == b"transfer-encoding" for name, _ in headers):
        raise BadHead(411, "a body without a Content-Length is not forwarded")
    lengths = {value for name, value in headers if name.lower() == b"content-length"}
    if len(lengths) > 1 or not all(re.fullmatch(rb"\d{1,15}", value) for value in lengths):
        raise BadHead(400, "the request's length is not one number")
    path = target[len("http://") + len(parts.netloc) :].partition("#")[0]
    return Head(
        host,
        port,
        is_tunnel=False,
        method=method,
        target=(path if path.startswith("/") else "/" + path).encode(),
        headers=tuple((name, value) for name, value in headers if name.lower() not in _NOT_FORWARDED),
        body_bytes=int(next(iter(lengths), b"0")),
    )


def _split(authority: str) -> tuple[str, int]:
    """Host and port, in the form in which rules are compared: lower case, no brackets, no last dot."""
    host, _, port = authority.lower().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    host = host.rstrip(".")
    is_host = _HOST.fullmatch(host) and (":" in host or all(1 <= len(part) <= _MAX_LABEL for part in host.split(".")))
    if not is_host or not _PORT.fullmatch(port) or not 1 <= int(port) <= _MAX_PORT:
        raise BadHead(400, f"{authority[:300]!r} is not a host and a port")
    return host, int(port)
