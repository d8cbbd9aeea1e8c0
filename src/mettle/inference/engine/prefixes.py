"""Keys and values of prompts that were computed before: full pages in a tree, the least recently used dropped first.

A page holds `PAGE` positions of all layers, [L, 2K, PAGE, E], and hangs below the page before it, so that a path from
the root spells a prefix. There is a tree for each unit (adapter, version): what one policy computed is never another's.
Invariant: a page is at least as recently used as those below it, so the oldest page is always a leaf.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mettle.inference.engine.attention import BLOCK

PAGE = BLOCK
"""Tokens of a page: a whole number of the blocks in which prompts are computed."""

Unit = tuple[str, int]
"""An adapter's name ("" for the base alone) and its version."""


class _PrefixNode:
    __slots__ = ("below", "kv", "parent", "tokens")

    def __init__(self, parent: _PrefixNode | None, tokens: tuple[int, ...], kv: Tensor | None) -> None:
        self.parent, self.tokens, self.kv = parent, tokens, kv
        self.below: dict[tuple[int, ...], _PrefixNode] = {}


class PrefixPages:
    """The pages of all units; `claim` says whether so many more bytes may be taken for one."""

    def __init__(self, claim: Callable[[int], bool]) -> None:
        self.num_bytes = 0
        self._claim = claim
        self._roots: dict[Unit, _PrefixNode] = {}
        self._recent: OrderedDict[_PrefixNode, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._recent)

    def match(self, unit: Unit, prompt: Sequence[int]) -> list[Tensor]:
        """The pages of the longest known prefix of a prompt, short of its last token, which must be computed."""
        path = self._path(unit, prompt, (len(prompt) - 1) // PAGE)
        self._touch(path)
        return [node.kv for node in path if node.kv is not None]

    def insert(self, unit: Unit, prompt: Sequence[int], kv_LKTE: Tensor) -> None:
        """Keep the full pages of a prompt that was computed, as far as there is room."""
        path = self._path(unit, prompt, len(prompt) // PAGE)
        self._touch(path)
        node = path[-1] if path else self._roots.setdefault(unit, _PrefixNode(None, (), None))
        starts = range(len(path) * PAGE, len(prompt) // PAGE * PAGE, PAGE)
        page_bytes = kv_LKTE[:, :, :PAGE].numel() * kv_LKTE.element_size()
        # Room is made by dropping the oldest pages, which may be those of this very prompt; then it is enough.
        has_room = self._claim(len(starts) * page_bytes) and self._is_known(node)
        for start in starts:
            if not has_room and not (self._claim(page_bytes) and self._is_known(node)):
                return
            added = _PrefixNode(node, tuple(prompt[start : start + PAGE]), kv_LKTE[:, :, start : start + PAGE].clone())
            node.below[added.tokens] = added
            path.append(added)
            self._recent[added] = None
            self.num_bytes += page_bytes
            if not has_room:  # the next claim may drop pages, and must find these in their order
                self._touch(path)
            node = added
        self._touch(path)

    def drop_oldest(self) -> None:
        """Drop one page."""
        node, _ = self._recent.popitem(last=False)
        self._forget(node)

    def keep_only(self, units: set[Unit]) -> None:
        """Drop the pages of units that are no longer served for new requests."""
        for unit in [unit for unit in self._roots if unit not in units]:
            waiting = list(self._roots.pop(unit).below.values())
            while waiting:
                node = waiting.pop()
                waiting += node.below.values()
                del self._recent[node]
                self._count_out(node)

    def _path(self, unit: Unit, prompt: Sequence[int], num_pages: int) -> list[_PrefixNode]:
        node, found = self._roots.get(unit), []
        for number in range(num_pages):
            node = node and node.below.get(tuple(prompt[number * PAGE : (number + 1) * PAGE]))
            if node is None:
                break
            found.append(node)
        return found

    def _touch(self, path: Sequence[_PrefixNode]) -> None:
        for node in reversed(path):
            self._recent.move_to_end(node)

    def _is_known(self, node: _PrefixNode) -> bool:
        return node.parent is None or node in self._recent

    def _forget(self, node: _PrefixNode) -> None:
        assert node.parent is not None, "a root is no page"
        assert not node.below, "the oldest page has none below it"
        del node.parent.below[node.tokens]
        self._count_out(node)

    def _count_out(self, node: _PrefixNode) -> None:
        assert node.kv is not None, "a page has keys and values"
        self.num_bytes -= node.kv.numel() * node.kv.element_size()
        node.kv = None


def as_prompt(pages: Sequence[Tensor]) -> Tensor:
    """Pages that follow each other as one tensor [L, 2K, T, E]."""
    return torch.cat(list(pages), 2)
