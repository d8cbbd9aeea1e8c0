"""Token ids as text, read from a `tokenizer.json` by itself: no tokenizer library, no model code.

Byte-level BPE stores each token as printable stand-ins for its bytes; SentencePiece models write a space as U+2581 and
raw bytes as <0xNN>. A character may be spread over several tokens: it is shown at the token that completes it, the
ones before show their bytes. Invariant: any list of ids gives as many texts, whatever the bytes.
"""

from __future__ import annotations

import codecs
import json
import logging
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 64 * 2**20
_RAW_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary:
    """Ids to bytes. `specials` are control tokens, shown by their names."""

    def __init__(self, pieces: dict[int, bytes], specials: dict[int, str]) -> None:
        self._pieces = pieces
        self._specials = specials

    def texts(self, ids: Iterable[int]) -> list[str]:
        """The text of each token in its context. An unknown id is shown as `#id`."""
        decoder = codecs.getincrementaldecoder("utf-8")("strict")
        texts: list[str] = []
        for token_id in ids:
            piece = self._pieces.get(token_id)
            if piece is None:
                decoder.reset()
                texts.append(self._specials.get(token_id, f"#{token_id}"))
                continue
            try:
                text = decoder.decode(piece)
            except UnicodeDecodeError:
                decoder.reset()
                texts.append(_hex(piece))
                continue
            texts.append(text or (_hex(piece) if piece else ""))
        return texts

    def text(self, ids: Iterable[int]) -> str:
        """All of `ids` as one text, control tokens by name."""
        parts: list[bytes] = []
        for token_id in ids:
            name = self._specials.get(token_id, f"#{token_id}")
            parts.append(self._pieces.get(token_id, name.encode()))
        return b"".join(parts).decode("utf-8", "backslashreplace")


def load_vocabulary(folder: Path) -> Vocabulary | None:
    """The vocabulary beside a model; None when there is none to read."""
    path = folder / "tokenizer.json"
    try:
        stat = path.stat()
    except OSError:
        return None
    if stat.st_size > MAX_FILE_BYTES:
        return None
    return _load(path, stat.st_mtime_ns)


def id_texts(ids: Sequence[int]) -> list[str]:
    """What is shown when there is no vocabulary."""
    return [f"#{token_id}" for token_id in ids]


@lru_cache(maxsize=4)
def _load(path: Path, modified_ns: int) -> Vocabulary | None:
    try:
        return parse_vocabulary(json.loads(path.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("cannot read the tokenizer", extra={"path": str(path), "error": str(error)})
        return None


def parse_vocabulary(document: dict[str, Any]) -> Vocabulary:
    """The vocabulary of a parsed `tokenizer.json` (BPE, WordPiece, WordLevel or Unigram)."""
    vocab = document["model"]["vocab"]
    words: Iterable[tuple[str, int]]
    words = vocab.items() if isinstance(vocab, dict) else ((entry[0], i) for i, entry in enumerate(vocab))
    to_bytes = _byte_level if _is_byte_level(document) else _plain
    pieces = {int(token_id): to_bytes(word) for word, token_id in words}
    specials: dict[int, str] = {}
    for token in document.get("added_tokens") or []:
        pieces.pop(token["id"], None)
        if token.get("special"):
            specials[token["id"]] = token["content"]
        else:
            pieces[token["id"]] = token["content"].encode()
    return Vocabulary(pieces, specials)


def _is_byte_level(document: dict[str, Any]) -> bool:
    return '"ByteLevel"' in json.dumps([document.get("decoder"), document.get("pre_tokenizer")])


def _byte_level(word: str) -> bytes:
    alphabet = _byte_of()
    if all(character in alphabet for character in word):
        return bytes(alphabet[character] for character in word)
    return word.encode()


def _plain(word: str) -> bytes:
    raw = _RAW_BYTE.fullmatch(word)
    return bytes([int(raw[1], 16)]) if raw else word.replace("\u2581", " ").encode()


@lru_cache(maxsize=1)
def _byte_of() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 onwards in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


def _hex(piece: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in piece)
