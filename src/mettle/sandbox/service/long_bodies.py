"""JSON that is long: read in a process beside this one, one body of a token at a time, and nobody else waits for it.

`json.loads` holds the interpreter for as long as it works, and what was made of 40 MB takes seconds to look at. So a
long body is parsed aside and comes back in slices of its longest list; what is done with it then is done in a thread,
which others take turns with. Parts: `LongBodies`, `slices` (the work of the other process). Invariant: the loop handles
no more at once than `_SLICE` items, or one item of at most `_MAX_VALUES` values.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Final

from mettle.processes.aside import Aside, AsideEnded
from mettle.sandbox.service.faults import TooLarge
from mettle.web.problems import HttpError

SHORT_BYTES: Final = 256 << 10
_SLICE: Final = 1000
_MAX_VALUES: Final = 500_000
_CPU_S: Final = 5.0
_CPU_S_PER_MB: Final = 0.25


class LongBodies:
    """Of one service."""

    def __init__(self) -> None:
        self._aside = Aside(memory_mb=4096)
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def fields(self, owner: str, body: bytes) -> dict[str, Any]:
        """The object that a token's body is. Raises: HttpError 400 for none, TooLarge for one of too many values."""
        limit_s = _CPU_S + _CPU_S_PER_MB * len(body) / (1 << 20)
        async with self._turns[owner]:
            try:
                [problem, rest, *parts] = await self._aside.run(slices, body, cpu_s=limit_s)
            except AsideEnded as error:
                raise TooLarge(f"the body of {len(body):,} bytes cannot be read: {error}") from error
        if problem == "values":
            raise TooLarge(f"the body holds more than {_MAX_VALUES:,} values; send fewer tests at a time")
        if problem:
            raise HttpError(400, problem)
        fields: dict[str, Any] = rest
        for name, items in parts:
            fields[name].extend(items)
        return fields

    def close(self) -> None:
        """End what works beside."""
        self._aside.close()


def slices(body: bytes) -> Iterator[Any]:
    """What is wrong (in words, or "values"), the object with its lists empty, then their items, slice by slice."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        yield from (f"the body is not JSON: {str(error)[:200]}", {})
        return
    if not isinstance(fields, dict):
        yield from ("the body must be a JSON object", {})
        return
    if _num_values(fields) > _MAX_VALUES:
        yield from ("values", {})
        return
    lists = {name: value for name, value in fields.items() if isinstance(value, list)}
    yield from ("", {**fields, **{name: [] for name in lists}})
    for name, items in lists.items():
        for start in range(0, len(items), _SLICE):
            yield name, items[start : start + _SLICE]


def _num_values(value: Any) -> int:
    """How many there are, as far as it matters."""
    num, left = 0, [value]
    while left and num <= _MAX_VALUES:
        one = left.pop()
        num += 1
        if isinstance(one, dict):
            left.extend(one.values())
        elif isinstance(one, list):
            left.extend(one)
    return num
