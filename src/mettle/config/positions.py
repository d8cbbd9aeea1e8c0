"""The line on which each key of a TOML document stands.

A scan over a text that `tomllib` has already accepted, so it checks nothing. Array elements are addressed by index:
`envs.0.id` is the `id` of the first `[[envs]]`.
"""

from __future__ import annotations

import tomllib

KeyPath = tuple[str | int, ...]
"""Where a value lies: table keys and list indices from the root."""

_BARE_END = frozenset(" \t.=]\n\r")


def key_lines(text: str) -> dict[KeyPath, int]:
    """The line (from 1) of every key, table header and list element in a valid TOML document."""
    return _Scan(text).run()


class _Scan:
    """One pass over one document."""

    def __init__(self, text: str) -> None:
        self._text = text.replace("\r\n", "\n")
        self._at = 0
        self._lines: dict[KeyPath, int] = {}
        self._list_lengths: dict[KeyPath, int] = {}

    def run(self) -> dict[KeyPath, int]:
        table: KeyPath = ()
        while self._skip_blank():
            line = self._line()
            if self._text.startswith("[[", self._at):
                table = self._header(2, line, is_list=True)
            elif self._text[self._at] == "[":
                table = self._header(1, line, is_list=False)
            else:
                self._pair(table)
        return self._lines

    def _header(self, width: int, line: int, *, is_list: bool) -> KeyPath:
        self._at += width
        keys = self._keys()
        self._at += width
        path: KeyPath = ()
        for key in keys[:-1]:
            path = self._newest((*path, key))
            self._lines.setdefault(path, line)
        path = (*path, keys[-1])
        self._lines.setdefault(path, line)
        if is_list:
            index = self._list_lengths.get(path, 0)
            self._list_lengths[path] = index + 1
            path = (*path, index)
            self._lines[path] = line
        return path

    def _newest(self, path: KeyPath) -> KeyPath:
        """The last element, when the path names a list of tables."""
        length = self._list_lengths.get(path)
        return path if length is None else (*path, length - 1)

    def _pair(self, table: KeyPath) -> None:
        line = self._line()
        path = table
        for key in self._keys():
            path = (*path, key)
            self._lines.setdefault(path, line)
        self._skip_space()
        self._at += 1  # the equals sign
        self._skip_space()
        self._value(path)

    def _keys(self) -> list[str]:
        """A dotted key, up to the equals sign or the closing bracket."""
        keys: list[str] = []
        while True:
            self._skip_space()
            start = self._at
            if self._text[start] in "\"'":
                self._string()
                keys.append(str(tomllib.loads(f"k = {self._text[start : self._at]}")["k"]))
            else:
                while self._text[self._at] not in _BARE_END:
                    self._at += 1
                keys.append(self._text[start : self._at])
            self._skip_space()
            if self._text[self._at] != ".":
                return keys
            self._at += 1

    def _value(self, path: KeyPath) -> None:
        first = self._text[self._at]
        if first in "\"'":
            self._string()
        elif first == "[":
            self._array(path)
        elif first == "{":
            self._inline_table(path)
        else:
            while self._at < len(self._text) and self._text[self._at] not in ",]}#\n":
                self._at += 1

    def _array(self, path: KeyPath) -> None:
        self._at += 1
        index = 0
        while self._skip_blank() and self._text[self._at] != "]":
            if self._text[self._at] == ",":
                self._at += 1
                continue
            self._lines[(*path, index)] = self._line()
            self._value((*path, index))
            index += 1
        self._at += 1

    def _inline_table(self, path: KeyPath) -> None:
        self._at += 1
        while self._skip_blank() and self._text[self._at] != "}":
            if self._text[self._at] == ",":
                self._at += 1
                continue
            self._pair(path)
        self._at += 1

    def _string(self) -> None:
        quote = self._text[self._at]
        if self._text.startswith(quote * 3, self._at):
            self._at = self._closing(quote * 3, self._at + 3) + 3
            while self._text[self._at : self._at + 1] == quote:  # quotes that belong to the text's end
                self._at += 1
        else:
            self._at = self._closing(quote, self._at + 1) + 1

    def _closing(self, quotes: str, start: int) -> int:
        at = start
        while not self._text.startswith(quotes, at):
            at += 2 if self._text[at] == "\\" and quotes[0] == '"' else 1
        return at

    def _skip_space(self) -> None:
        while self._at < len(self._text) and self._text[self._at] in " \t":
            self._at += 1

    def _skip_blank(self) -> bool:
        """Pass over space, line ends and comments; False at the end of the text."""
        while self._at < len(self._text):
            if self._text[self._at] == "#":
                end = self._text.find("\n", self._at)
                self._at = len(self._text) if end < 0 else end
            elif self._text[self._at] in " \t\r\n":
                self._at += 1
            else:
                return True
        return False

    def _line(self) -> int:
        return self._text.count("\n", 0, self._at) + 1
