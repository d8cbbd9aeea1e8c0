"""The bytes of a token: GPT-2's alphabet, by which byte-level tokenizers write each byte as a printable character.

Parts: `BYTE_OF_CHARACTER`; `is_byte_level`, `word_bytes`. Printable Latin-1 stands for itself, the other bytes for
U+0100 and onwards in order.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def _alphabet() -> dict[str, int]:
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(rest)}


BYTE_OF_CHARACTER: Final = _alphabet()
_RAW_BYTE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE: Final = "\u2581"


def is_byte_level(tokenizer: Tokenizer) -> bool:
    """True for a vocabulary in GPT-2's alphabet; SentencePiece's write a space as U+2581 and raw bytes as <0xNN>."""
    return "ByteLevel" in f"{tokenizer.decoder!r} {tokenizer.pre_tokenizer!r}"


def word_bytes(word: str, *, byte_level: bool) -> bytes:
    """The bytes that a word of a vocabulary stands for."""
    if byte_level:
        values = [BYTE_OF_CHARACTER.get(character) for character in word]
        return word.encode() if None in values else bytes(value for value in values if value is not None)
    raw = _RAW_BYTE.fullmatch(word)
    return bytes([int(raw[1], 16)]) if raw else word.replace(_SPACE, " ").encode()
