"""The key pair of one pod, and the connection that it secures: both ends show the same certificate and take no other.

Invariant: whoever does not hold the key gets no byte from the agent and none to it; what the network changes ends the
connection, and what it sees is encrypted.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import tempfile
from datetime import UTC, datetime, timedelta
from typing import Final, Self

from mettle.errors import UserError

_READ_BYTES: Final = 1 << 18
_SKEW: Final = timedelta(days=1)
_LIFE: Final = timedelta(days=3650)  # the pod's own life is far shorter


def make_identity() -> str:
    """A new certificate and its key, as PEM. Raises: UserError where the package that makes them is missing."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise UserError("the backend kubernetes needs `cryptography`: pip install 'mettle-lab[kubernetes]'") from None
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "mettle agent")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - _SKEW, now + _LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return (certificate.public_bytes(pem) + secret).decode()


class SecureStream:
    """A connection to the agent that holds an identity."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, host: str, port: int, identity: str, timeout_s: float) -> Self:
        """Raises: OSError, also for what answers and has not this identity."""
        async with asyncio.timeout(timeout_s):
            return cls(*await asyncio.open_connection(host, port, ssl=_trust_only(identity)))

    async def read(self) -> bytes:
        return await self._reader.read(_READ_BYTES)

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    async def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended before it
            self._writer.transport.abort()


def _trust_only(identity: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate is the name
    context.load_verify_locations(cadata=identity)
    with tempfile.NamedTemporaryFile("w", prefix="mettle-") as file:  # the library takes files only
        file.write(identity)
        file.flush()
        context.load_cert_chain(file.name)
    return context
