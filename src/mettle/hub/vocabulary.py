"""Token ids as text, one by one, by the `tokenizers` library; no model code.

A character may be spread over several tokens: it is shown at the token that completes it, the ones before show their
bytes. Invariant: any list of ids gives as many texts, whatever the bytes.
"""

from __future__ import annotations

import codecs
import logging
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from mettle.clients.byte_level import is_byte_level, word_bytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 64 * 2**20


class Vocabulary:
    """Ids to bytes. Control tokens are shown by their names."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self._tokenizer = tokenizer
        self._is_byte_level = is_byte_level(tokenizer)
        self._specials = {token_id: token.content for token_id, token in added.items() if token.special}
        self._added = {token_id: token.content.encode() for token_id, token in added.items() if not token.special}

    def texts(self, ids: Iterable[int]) -> list[str]:
        """The text of each token in its context. An unknown id is shown as `#id`."""
        decoder = codecs.getincrementaldecoder("utf-8")("strict")
        texts: list[str] = []
        for token_id in ids:
            piece = self._piece(token_id)
            if piece is None:
                decoder.reset()
                texts.append(self._name(token_id))
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
        pieces = ((self._piece(token_id), token_id) for token_id in ids)
        parts = [self._name(token_id).encode() if piece is None else piece for piece, token_id in pieces]
        return b"".join(parts).decode("utf-8", "backslashreplace")

    def _piece(self, token_id: int) -> bytes | None:
        """The bytes of a token; None for a control token and for an id that there is not."""
        if token_id < 0 or token_id in self._specials:
            return None
        if token_id in self._added:
            return self._added[token_id]
        word = self._tokenizer.id_to_token(token_id)
        return None if word is None else word_bytes(word, byte_level=self._is_byte_level)

    def _name(self, token_id: int) -> str:
        return self._specials.get(token_id, f"#{token_id}")


def load_vocabulary(folder: Path) -> Vocabulary | None:
    """The vocabulary beside a model; None when there is none to read."""
    path = folder / "tokenizer.json"
    try:
        stat = path.stat()
    except OSError:
        return None
    return _load(path, stat.st_mtime_ns) if stat.st_size <= MAX_FILE_BYTES else None


def id_texts(ids: Sequence[int]) -> list[str]:
    """What is shown when there is no vocabulary."""
    return [f"#{token_id}" for token_id in ids]


@lru_cache(maxsize=4)
def _load(path: Path, modified_ns: int) -> Vocabulary | None:
    from tokenizers import Tokenizer

    try:
        return Vocabulary(Tokenizer.from_file(str(path)))
    except Exception as error:  # the Rust side raises plain Exception
        logger.warning("cannot read the tokenizer", extra={"path": str(path), "error": str(error)})
        return None


def _hex(piece: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in piece)
