"""What a model has left in its machine, looked at from outside, and the checks made of it.

Parts: `Leftovers`; `Check`, and the makers of checks, from `text_is` to `prints`. Invariants: no command is run in the
machine that the model has worked in, because what it prints can be forged there: its files are listed and downloaded,
its host says which of the given programs still run, and a script is tried in a fresh machine. A link is never a file;
what is too large or too much counts as not there.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

MAX_FILE_BYTES = 1 << 20
MAX_ENTRIES = 4000
MAX_FOLDERS = 400
CASE_S = 10.0
END_S = 0.3
"""The host hears of the end of a process a moment after it."""

Check = Callable[["Leftovers"], Awaitable[bool]]
"""Whether what is left is as it should be."""


@dataclass(frozen=True)
class Case:
    """One try of a script: what it is given, and what it must print."""

    expected: str
    args: tuple[str, ...] = ()
    stdin: str = ""
    files: tuple[tuple[str, str], ...] = ()


class Leftovers:
    """The folder of a job after the model has worked there. `fresh` opens another machine."""

    def __init__(
        self,
        machine: Any,
        folder: str,
        programs: Mapping[str, Any],
        fresh: Callable[[], AbstractAsyncContextManager[Any]],
    ) -> None:
        self._machine, self._folder, self._fresh = machine, folder, fresh
        self._programs = programs
        self._listed: dict[str, dict[str, Any]] = {}
        self._texts: dict[str, str | None] = {}

    async def entry(self, path: str) -> Any | None:
        """What lies at a path of the folder, if no part of the way there is a link."""
        above, _, name = f"{self._folder}/{path}".rpartition("/")
        return (await self._list(above)).get(name)

    async def below(self, path: str) -> dict[str, Any] | None:
        """Everything below a path of the folder, by its path from there; None if it is too much."""
        top = f"{self._folder}/{path}"
        found: dict[str, Any] = {}
        waiting = [top]
        for _ in range(MAX_FOLDERS):
            if not waiting:
                return found
            inner = waiting.pop()
            for name, entry in (await self._list(inner)).items():
                found[f"{inner}/{name}".removeprefix(f"{top}/")] = entry
                waiting += [f"{inner}/{name}"] if entry.kind == "directory" else []
            if len(found) > MAX_ENTRIES:
                break
        return None

    async def read(self, path: str) -> str | None:
        """The text of a plain file of reasonable size."""
        if path not in self._texts:
            self._texts[path] = await self._download(path)
        return self._texts[path]

    async def is_running(self, name: str, wait_s: float) -> bool:
        """Whether a program that the machine was given has not ended after `wait_s`, by what the host knows."""
        return await self._programs[name].wait(wait_s) is None

    async def outputs(self, path: str, argv: Sequence[str], cases: Sequence[Case]) -> list[str] | None:
        """What a script that was left prints in a fresh machine, case by case; None when there is no script."""
        source = await self.read(path)
        if source is None:
            return None
        printed = []
        async with self._fresh() as machine:
            for case in cases:
                # Written anew each time, so that one case cannot change what the next one runs.
                await machine.upload_files({f"/work/{path}": source, **{f"/work/{n}": t for n, t in case.files}})
                ended = await machine.exec([*argv, f"/work/{path}", *case.args], stdin=case.stdin, timeout_s=CASE_S)
                printed.append(ended.stdout if ended.exit_code == 0 else f"exit code {ended.exit_code}")
        return printed

    async def _list(self, path: str) -> dict[str, Any]:
        """A real folder's entries by name; nothing if it is none, or the way to it has a link."""
        if path not in self._listed:
            self._listed[path] = await self._list_now(path)
        return self._listed[path]

    async def _list_now(self, path: str) -> dict[str, Any]:
        above, _, name = path.rpartition("/")
        if above:
            entry = (await self._list(above)).get(name)
            if entry is None or entry.kind != "directory":
                return {}
        try:
            return {entry.name: entry for entry in await self._machine.list(path)}
        except OSError:
            return {}

    async def _download(self, path: str) -> str | None:
        entry = await self.entry(path)
        if entry is None or entry.kind != "file" or entry.num_bytes > MAX_FILE_BYTES:
            return None
        try:
            data: bytes = await self._machine.download(f"{self._folder}/{path}", max_bytes=MAX_FILE_BYTES)
        except OSError:
            return None
        return data.decode("utf-8", "replace")


def text_is(path: str, expected: str, *, in_any_order: bool = False) -> Check:
    """The file has these lines; space at the ends of lines and empty lines at the end do not count."""

    async def check(left: Leftovers) -> bool:
        text = await left.read(path)
        if text is None:
            return False
        found, wanted = _lines(text), _lines(expected)
        return sorted(found) == sorted(wanted) if in_any_order else found == wanted

    return check


def parses_to(path: str, parse: Callable[[str], Any], expected: Any) -> Check:
    """The file means this; how it is written does not count."""

    async def check(left: Leftovers) -> bool:
        text = await left.read(path)
        try:
            return text is not None and bool(parse(text) == expected)
        except (ValueError, KeyError, LookupError, RecursionError):
            return False

    return check


def json_is(path: str, expected: Any) -> Check:
    """The file is JSON of this value."""
    return parses_to(path, json.loads, expected)


def file_is(path: str, expected: str) -> Check:
    """The file has exactly this text."""

    async def check(left: Leftovers) -> bool:
        return await left.read(path) == expected

    return check


def names_are(folder: str, expected: Sequence[str]) -> Check:
    """The plain files at and below a folder are these, by their path from there, and nothing is a link."""

    async def check(left: Leftovers) -> bool:
        inside = await left.below(folder)
        if inside is None or (await left.entry(folder)) is None:
            return False
        kinds = {entry.kind for entry in inside.values()}
        files = {path for path, entry in inside.items() if entry.kind == "file"}
        return kinds <= {"file", "directory"} and files == set(expected)

    return check


def mode_is(path: str, mode: int) -> Check:
    """A file or folder has these permissions."""

    async def check(left: Leftovers) -> bool:
        entry = await left.entry(path)
        return entry is not None and entry.kind in ("file", "directory") and entry.mode == mode

    return check


def has_ended(name: str) -> Check:
    """A program that ran at the beginning has ended."""

    async def check(left: Leftovers) -> bool:
        return not await left.is_running(name, END_S)

    return check


def runs(name: str) -> Check:
    """A program that ran at the beginning still runs."""

    async def check(left: Leftovers) -> bool:
        return await left.is_running(name, END_S)

    return check


def prints(path: str, argv: Sequence[str], cases: Sequence[Case]) -> Check:
    """A script prints what it should in each of these cases."""

    async def check(left: Leftovers) -> bool:
        printed = await left.outputs(path, argv, cases)
        return printed is not None and [_lines(text) for text in printed] == [_lines(c.expected) for c in cases]

    return check


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


async def hold(checks: Sequence[Check], left: Leftovers) -> list[bool]:
    """Which of the checks hold."""
    return [await check(left) for check in checks]
