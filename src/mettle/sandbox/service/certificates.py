"""The service's own certificate.

Invariant: a service that was told to speak TLS speaks nothing else; a key that cannot be used is said at the start.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from mettle.errors import UserError


def tls_context(cert: Path, key: Path | None) -> ssl.SSLContext:
    """TLS 1.2 and up, with this certificate (its chain behind it). Raises: UserError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    for path in (cert, key or cert):
        try:
            is_locked = b"ENCRYPTED" in path.read_bytes()
        except OSError as error:
            raise UserError(f"{path} cannot be read: {os.strerror(error.errno or 0).lower()}") from error
        if is_locked:
            raise UserError(f"the key in {path} has a password; give one without")
    try:
        context.load_cert_chain(cert, key, password=lambda: "")  # never a question at the terminal
    except ssl.SSLError as error:
        where = f"{cert} and {key}" if key else f"{cert}"
        raise UserError(f"no TLS with {where}: {_reason(error, has_key=key is not None)}") from error
    return context


def _reason(error: ssl.SSLError, *, has_key: bool) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return "the key is not that of the certificate"
    if error.reason in ("NO_START_LINE", "PEM_LIB") or error.reason is None:
        return "they must be PEM" if has_key else "it must be PEM and hold the key as well, or tls_key names that"
    return error.reason.lower().replace("_", " ")
