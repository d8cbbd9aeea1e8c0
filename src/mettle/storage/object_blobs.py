"""Blobs in an object store (S3 and what speaks like it), with a folder of this machine before it.

What is pushed comes into the folder first and is then stored; what is read is fetched into it once. Invariants: a blob
counts as there when the store has it, so that servers on several machines agree; the store's own put is whole or not
there; the folder may be deleted at any time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from mettle.errors import StorageError, UserError
from mettle.extras import install_line
from mettle.storage.blobs import BlobStore, BlobWriter

_CHUNK_BYTES: Final = 8 << 20
_RETRIES: Final[Any] = {"max_retries": 4, "retry_timeout": timedelta(seconds=30)}


class ObjectBlobStore(BlobStore):
    """The blobs below `url`, such as `s3://bucket/prefix`; `folder` holds those that were used here.

    Credentials, region and endpoint come from the environment: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION,
    AWS_ENDPOINT_URL (of a store that is not Amazon's; plain http needs AWS_ALLOW_HTTP=true).
    Raises: UserError for an address that is none, or without the extra `s3`.
    """

    def __init__(self, url: str, folder: Path) -> None:
        super().__init__(folder)
        self.url = url
        try:
            from obstore.exceptions import BaseError
            from obstore.store import from_url
        except ImportError as error:
            raise UserError(f"blobs in an object store need obstore: {install_line('s3')}") from error
        self._error = BaseError
        if "://" not in url:
            raise UserError(f"blobs {url!r} is no address: write it like s3://bucket/prefix")
        try:
            self._store = from_url(url, retry_config=_RETRIES)
        except (BaseError, ValueError) as error:
            raise UserError(f"blobs {url!r}: {_line(error)}") from error

    def keep(self, writer: BlobWriter, path: Path, wanted: str) -> str:
        """Give what was written its name, here and in the store. Raises as `BlobStore.keep` does."""
        found = super().keep(writer, path, wanted)
        self.send(found)
        return found

    def send(self, sha256: str) -> None:
        """Store what lies in the folder. Raises: StorageError when the store refuses."""
        import obstore

        try:
            with self._refusals(f"storing the blob {sha256[:12]}"), self.folder_path(sha256).open("rb") as file:
                obstore.put(self._store, _key(sha256), file)
        except FileNotFoundError as error:
            raise StorageError(f"storing a blob in {self.url}: there is no such bucket") from error

    def has(self, sha256: str) -> bool:
        """True when the store has it."""
        import obstore

        self.folder_path(sha256)
        try:
            with self._refusals(f"looking for the blob {sha256[:12]}"):
                obstore.head(self._store, _key(sha256))
        except FileNotFoundError:
            return False
        return True

    def path(self, sha256: str) -> Path:
        """The blob as a file of this machine, fetched where it is not here yet; checked on its way."""
        import obstore

        final = self.folder_path(sha256)
        if final.is_file():
            return final
        try:
            with self._refusals(f"fetching the blob {sha256[:12]}"), self.incoming() as (writer, path):
                for chunk in obstore.get(self._store, _key(sha256)).stream(min_chunk_size=_CHUNK_BYTES):
                    writer.write(bytes(chunk))
                super().keep(writer, path, sha256)
        except FileNotFoundError:
            return final  # which is not there, as in a folder
        except UserError as error:
            raise StorageError(f"the object store has another blob under {sha256[:12]}: {error}") from error
        return final

    def sweep(self, known: set[str], *, older_than_s: float = 3600.0) -> int:
        """Remove what nobody refers to, here and in the store; returns how many went from the store."""
        import obstore

        super().sweep(known, older_than_s=older_than_s)
        old, gone = time.time() - older_than_s, []
        with self._refusals("listing the blobs"):
            for page in obstore.list(self._store):
                gone += [
                    str(each["path"])
                    for each in page
                    if str(each["path"]).rpartition("/")[2] not in known and each["last_modified"].timestamp() < old
                ]
            for key in gone:
                obstore.delete(self._store, key)
        return len(gone)

    @contextmanager
    def _refusals(self, doing: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except (self._error, ConnectionError, PermissionError, TimeoutError) as error:
            raise StorageError(f"{doing} in {self.url}: {_line(error)}") from error


def blob_store(url: str, folder: Path) -> BlobStore:
    """The store of an address; without one, the folder."""
    return ObjectBlobStore(url, folder) if url else BlobStore(folder)


def _key(sha256: str) -> str:
    return f"{sha256[:2]}/{sha256}"


def _line(error: Any) -> str:
    said = str(error).strip().splitlines()
    return said[0][:300] if said else type(error).__name__
