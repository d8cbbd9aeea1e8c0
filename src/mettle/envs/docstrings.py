"""What a docstring says about a function and about each of its parameters.

Parts: `docstring_parts`; one reader for each style (Google, NumPy, Sphinx). The style is that of which the docstring
shows the most marks, Google when it shows none. Invariant: the parts are those that verifiers took from the same
docstring, because they become the tool's description and a model was perhaps trained on it: a header counts only when
an indented line follows it at once, and the description ends where the first section begins.
"""

from __future__ import annotations

import re
from inspect import cleandoc
from typing import NamedTuple

_SPHINX_MARKS = (r"^:param\s", r"^:type\s", r"^:return:", r"^:rtype:")
_NUMPY_MARKS = tuple(rf"^{name}\s*\n\s*-{{3,}}" for name in ("Parameters", "Returns", "Yields"))
_GOOGLE_MARKS = (r"^(Args|Arguments):", r"^Returns:", r"^Raises:")
_GOOGLE_HEADER = re.compile(r"^(\w[\s\w-]*):(?:\s+\S.*)?\s*$")
_GOOGLE_PARAMETERS = frozenset({"args", "arguments", "params", "parameters"})
_GOOGLE_ITEM = re.compile(r"^\*{0,2}(\w+)\s*(?:\(.*?\))?\s*:\s*(.*)$")
_NUMPY_ITEM = re.compile(r"^\*{0,2}(\w+)\s*(?::.*)?$")
_SPHINX_FIELD = re.compile(r"^:(\w+)([^:]*):\s*(.*)$")
_SPHINX_PARAMETERS = frozenset({"param", "parameter", "arg", "argument", "key", "keyword"})


class Docstring(NamedTuple):
    """What comes before the first section, and a text for each parameter that is described."""

    description: str
    parameters: dict[str, str]


def docstring_parts(docstring: str) -> Docstring:
    """Take a docstring apart."""
    text = cleandoc(docstring)
    counts = [
        (_count(_SPHINX_MARKS, text), _sphinx),
        (_count(_NUMPY_MARKS, text), _numpy),
        (_count(_GOOGLE_MARKS, text), _google),
    ]
    most = max(count for count, _ in counts)
    reader = next(reader for count, reader in counts if count == most) if most else _google
    return reader(text.splitlines())


def _count(marks: tuple[str, ...], text: str) -> int:
    return sum(re.search(mark, text, re.MULTILINE) is not None for mark in marks)


def _google(lines: list[str]) -> Docstring:
    description: list[str] = []
    parameters: dict[str, str] = {}
    has_section = False
    index = 0
    while index < len(lines):
        header = _GOOGLE_HEADER.match(lines[index])
        if header is None or not _is_indented(lines, index + 1):
            if not has_section:
                description.append(lines[index])
            index += 1
            continue
        has_section = True
        block, index = _indented_block(lines, index + 1)
        if header.group(1).lower() in _GOOGLE_PARAMETERS:
            parameters.update(_google_items(block))
    return Docstring("\n".join(description).strip(), parameters)


def _google_items(block: list[str]) -> dict[str, str]:
    items: dict[str, str] = {}
    for item in _items(block):
        found = _GOOGLE_ITEM.match(item[0])
        if found:
            items[found.group(1)] = cleandoc("\n".join([found.group(2), *item[1:]]))
    return items


def _numpy(lines: list[str]) -> Docstring:
    starts = [i for i in range(len(lines) - 1) if lines[i].strip() and re.match(r"^-{3,}\s*$", lines[i + 1])]
    description = lines[: starts[0]] if starts else lines
    parameters: dict[str, str] = {}
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        if lines[start].strip().lower() == "parameters":
            for item in _items(lines[start + 2 : end]):
                found = _NUMPY_ITEM.match(item[0])
                if found:
                    parameters[found.group(1)] = cleandoc("\n".join(["", *item[1:]]))
    return Docstring("\n".join(description).strip(), parameters)


def _sphinx(lines: list[str]) -> Docstring:
    fields: list[tuple[str, list[str]]] = []
    description: list[str] = []
    for line in lines:
        found = _SPHINX_FIELD.match(line)
        if found:
            words = found.group(2).split()
            is_parameter = found.group(1) in _SPHINX_PARAMETERS and bool(words)
            fields.append((words[-1] if is_parameter else "", [found.group(3)]))
        elif fields:
            fields[-1][1].append(line)
        else:
            description.append(line)
    parameters = {name: cleandoc("\n".join(text)) for name, text in fields if name}
    return Docstring("\n".join(description).strip(), parameters)


def _is_indented(lines: list[str], index: int) -> bool:
    return index < len(lines) and lines[index].startswith(" ")


def _indented_block(lines: list[str], start: int) -> tuple[list[str], int]:
    """The lines from `start` that are indented or blank, without their common indent, and where they end."""
    end = start
    while end < len(lines) and (_is_indented(lines, end) or not lines[end].strip()):
        end += 1
    margin = len(lines[start]) - len(lines[start].lstrip())
    return [line[margin:] if line[:margin].isspace() else line.lstrip() for line in lines[start:end]], end


def _items(block: list[str]) -> list[list[str]]:
    """The block cut where a line is not indented; blank lines stay with the item before them."""
    items: list[list[str]] = []
    for line in block:
        if line.strip() and not line[0].isspace():
            items.append([line])
        elif items:
            items[-1].append(line)
    return items
