"""A log of Inspect (`inspect_ai`): what it says of the evaluation, and its samples, one at a time.

Parts: `InspectLog`. A log is a zip (`.eval`: `header.json`, a file `samples/*.json` for each sample, compressed with
deflate or, since 2025, zstandard) or one JSON document (`.json`). Invariants: nothing of the archive is unpacked to
disk; a part that is larger than its limit is refused, whatever the archive says of its size; of several samples of one
name the last counts, as an evaluation that was tried again leaves them.

Source: the models EvalLog and EvalSample of inspect_ai 0.3 (https://inspect.aisi.org.uk/reference/inspect_ai.log.html).
"""

from __future__ import annotations

import json
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from mettle.errors import StorageError, UserError
from mettle.extras import install_line

MAX_SAMPLE_BYTES: Final = 512 << 20
MAX_DOCUMENT_BYTES: Final = 2 << 30
MAX_ENTRIES: Final = 2_000_000
_ZSTANDARD: Final = 93
_LOCAL_HEADER: Final = struct.Struct("<4s22xHH")


class InspectLog:
    """One log. `header` is the log without its samples.

    Raises: UserError when the file is no log of Inspect, StorageError when it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._archive: zipfile.ZipFile | None = None
        self._samples: list[Any] = []
        self._entries: list[zipfile.ZipInfo] = []
        try:
            self.header = self._open_zip() if zipfile.is_zipfile(path) else self._read_document()
        except OSError as error:
            raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
        if not isinstance(self.header.get("eval"), dict):
            raise self._no_log("it says nothing of an evaluation")

    @property
    def num_samples(self) -> int:
        """Samples that it holds."""
        return len(self._entries) if self._archive is not None else len(self._samples)

    def samples(self) -> Iterator[dict[str, Any]]:
        """The samples in the order of the log. Raises: UserError for one that cannot be read."""
        if self._archive is None:
            values: Iterator[Any] = iter(self._samples)
        else:
            values = (self._part(entry) for entry in self._entries)
        for value in values:
            if not isinstance(value, dict):
                raise self._no_log("a sample of it is no JSON object")
            yield value

    def close(self) -> None:
        """Let go of the file."""
        if self._archive is not None:
            self._archive.close()

    def _open_zip(self) -> dict[str, Any]:
        try:
            self._archive = zipfile.ZipFile(self.path)
        except (zipfile.BadZipFile, ValueError) as error:
            raise self._no_log(str(error)) from error
        entries = {entry.filename: entry for entry in self._archive.infolist()[:MAX_ENTRIES]}
        self._entries = [e for name, e in entries.items() if name.startswith("samples/") and name.endswith(".json")]
        # A log without header.json is of an evaluation that was killed; how it began is in its journal.
        found = entries.get("header.json") or entries.get("_journal/start.json")
        header = None if found is None else self._part(found)
        if not isinstance(header, dict):
            raise self._no_log("it has no header")
        return header

    def _read_document(self) -> dict[str, Any]:
        if self.path.stat().st_size > MAX_DOCUMENT_BYTES:
            raise UserError(
                f"{self.path} is larger than {MAX_DOCUMENT_BYTES >> 30} GiB; `inspect log convert --to eval` makes a"
                " log of it that is read sample by sample"
            )
        document = self._parsed(self.path.read_bytes())
        if not isinstance(document, dict):
            raise self._no_log("it is no JSON object")
        samples = document.pop("samples", None)
        self._samples = samples if isinstance(samples, list) else []
        return document

    def _part(self, entry: zipfile.ZipInfo) -> Any:
        """A file of the archive as JSON."""
        assert self._archive is not None, "parts are those of an archive"
        try:
            if entry.compress_type == _ZSTANDARD:
                data = self._unpack_zstandard(entry)
            else:
                with self._archive.open(entry) as file:
                    data = file.read(MAX_SAMPLE_BYTES + 1)
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
            raise self._no_log(f"{entry.filename[:80]!r}: {error}") from error
        if len(data) > MAX_SAMPLE_BYTES:
            raise UserError(f"{self.path}: {entry.filename[:80]!r} is larger than {MAX_SAMPLE_BYTES >> 20} MiB")
        return self._parsed(data)

    def _unpack_zstandard(self, entry: zipfile.ZipInfo) -> bytes:
        """What `zipfile` itself reads only since Python 3.14."""
        try:
            import zstandard
        except ImportError as error:
            raise UserError(f"{self.path} is packed with zstandard: {install_line('inspect')}") from error
        with self.path.open("rb") as file:
            file.seek(entry.header_offset)
            head = file.read(_LOCAL_HEADER.size)
            if len(head) < _LOCAL_HEADER.size or head[:4] != b"PK\x03\x04":
                raise zipfile.BadZipFile("a file of it begins nowhere")
            _, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(head)
            file.seek(name_bytes + extra_bytes, 1)
            packed = file.read(entry.compress_size)
        try:
            with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(packed) as reader:
                data = reader.read(MAX_SAMPLE_BYTES + 1)
        except (zstandard.ZstdError, MemoryError) as error:
            raise zipfile.BadZipFile(str(error)) from error
        if len(data) <= MAX_SAMPLE_BYTES and zlib.crc32(data) != entry.CRC:
            raise zipfile.BadZipFile("its checksum is another")
        return data

    def _parsed(self, data: bytes) -> Any:
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise self._no_log(f"{error}"[:200]) from error

    def _no_log(self, why: str) -> UserError:
        return UserError(f"{self.path} is no log of Inspect that can be read: {why}")
