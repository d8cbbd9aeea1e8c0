"""Sealing of secrets with the key file of the Hub: what the database, or a copy of it, holds opens nothing by itself.

AES-256-GCM; a sealed text names its place, so that it opens nowhere else. Invariant: the key is made once, readable by
the Hub's user alone, and never replaced: without it what was sealed is lost, so a backup has to have it.
"""

from __future__ import annotations

import base64
import binascii
import os
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from mettle.errors import StorageError

KEY_FILE: Final = "secrets.key"
_KEY_BYTES: Final = 32
_NONCE_BYTES: Final = 12


class Vault:
    """Seals with the key of a folder. The key is made when the first secret comes."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / KEY_FILE

    def seal(self, text: str, place: str) -> str:
        """`text` for a place, for example the id of its row. Raises: StorageError when the key cannot be had."""
        nonce = os.urandom(_NONCE_BYTES)
        sealed = AESGCM(self._key(is_new_fine=True)).encrypt(nonce, text.encode("utf-8", "replace"), place.encode())
        return base64.b64encode(nonce + sealed).decode()

    def open(self, sealed: str, place: str) -> str:
        """Raises: StorageError when the key is another's, or the text was sealed for another place."""
        try:
            data = base64.b64decode(sealed, validate=True)
            nonce, rest = data[:_NONCE_BYTES], data[_NONCE_BYTES:]
            return AESGCM(self._key(is_new_fine=False)).decrypt(nonce, rest, place.encode()).decode("utf-8")
        except (InvalidTag, binascii.Error, ValueError) as error:
            raise StorageError(
                f"a secret cannot be opened: {self.path} is not the key that it was sealed with"
            ) from error

    def _key(self, *, is_new_fine: bool) -> bytes:
        try:
            key = base64.b64decode(self.path.read_bytes(), validate=True)
            if len(key) != _KEY_BYTES:
                raise StorageError(f"{self.path} is no key of {_KEY_BYTES} bytes; put back the one of your backup")
            return key
        except FileNotFoundError:
            if not is_new_fine:
                raise StorageError(f"{self.path} is gone; put back the one of your backup") from None
        except (OSError, binascii.Error) as error:
            raise StorageError(f"{self.path} cannot be read: {error}") from error
        return self._make()

    def _make(self) -> bytes:
        aside = self.path.with_name(f".{KEY_FILE}.{os.getpid()}")
        try:
            handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(base64.b64encode(os.urandom(_KEY_BYTES)))
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(aside, self.path)  # of two servers that make one at once, one wins
            except FileExistsError:
                pass
            finally:
                aside.unlink()
        except OSError as error:
            raise StorageError(f"cannot make {self.path}: {error.strerror or error}") from error
        return self._key(is_new_fine=False)
