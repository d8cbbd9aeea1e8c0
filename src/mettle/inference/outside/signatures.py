"""Every word of a worker is signed: Ed25519 over the method, the path, a session, a number and the body.

Parts: `WorkerKey` (the worker's half), `check_signature`. The session is drawn anew whenever the door opens and the
number rises within it, so that no word counts twice. Invariant: what a signature does not cover is not read.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mettle.errors import UserError
from mettle.extras import install_line

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

KEY_HEADER: Final = "mettle-key"
COUNT_HEADER: Final = "mettle-count"
SIGNATURE_HEADER: Final = "mettle-signature"
_KEY_BYTES: Final = 32


def signed_bytes(method: str, path: str, session: str, count: int, body: bytes) -> bytes:
    """What is signed of a word."""
    return f"mettle-work-1\n{method}\n{path}\n{session}\n{count}\n{hashlib.sha256(body).hexdigest()}".encode()


@dataclass(frozen=True, slots=True)
class WorkerKey:
    """A private key; `name` is the public one, in hex, by which the run knows the worker."""

    private: Ed25519PrivateKey
    name: str

    @classmethod
    def of_file(cls, path: Path) -> WorkerKey:
        """The key in a file that no other user can read; it is made where there is none.

        Raises: UserError when the file holds none.
        """
        try:
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        except ImportError:
            raise UserError(f"workers from outside sign what they say: {install_line('outside')}") from None
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            path.write_text(Ed25519PrivateKey.generate().private_bytes_raw().hex() + "\n")
        try:
            private = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(path.read_text().strip()))
        except (OSError, ValueError) as error:
            raise UserError(f"{path} holds no key of a worker: {error}; remove it, and another is made") from error
        return cls(private, private.public_key().public_bytes_raw().hex())

    def headers(self, method: str, path: str, session: str, count: int, body: bytes) -> dict[str, str]:
        """What goes along with a word."""
        signature = self.private.sign(signed_bytes(method, path, session, count, body))
        return {KEY_HEADER: self.name, COUNT_HEADER: str(count), SIGNATURE_HEADER: signature.hex()}


def check_signature(key: str, signature: str, signed: bytes) -> bool:
    """Whether the holder of `key` signed that."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        public = bytes.fromhex(key)
        if len(public) != _KEY_BYTES:
            return False
        Ed25519PublicKey.from_public_bytes(public).verify(bytes.fromhex(signature), signed)
    except (ValueError, InvalidSignature):
        return False
    return True
