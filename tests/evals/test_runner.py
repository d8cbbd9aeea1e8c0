"""Where finished rollouts go: whoever waits for them to be safe hears what became of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mettle.errors import StorageError
from mettle.evals.runner import StoreKeeper


class Broken:
    """A store that takes nothing."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def add(self, eval_id: int, groups: list[Any]) -> None:
        raise self._error


@pytest.mark.parametrize("error", [StorageError("no space left"), ValueError("a mistake of ours")], ids=repr)
async def test_what_goes_wrong_while_rollouts_are_written_reaches_whoever_waits_for_them(error: Exception) -> None:
    keeper = StoreKeeper(Broken(error), 1)  # type: ignore[arg-type]
    group: Any = object()
    with pytest.raises(type(error), match=str(error)):
        await asyncio.wait_for(keeper.keep(group), 60)
