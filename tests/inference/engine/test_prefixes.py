"""Pages of known prefixes: found by their tokens, kept apart by adapter and version, the oldest dropped first."""

from __future__ import annotations

import torch

from mettle.inference.engine.prefixes import PAGE, PrefixPages, as_prompt

BASE, TUNED = ("", 1), ("tuned", 1)
PAGE_BYTES = 2 * 2 * PAGE * 4 * 4


def prompt_of(*pages: int, more: int = 1) -> list[int]:
    """A prompt of pages that hold one token each, and some tokens more."""
    return [token for page in pages for token in [page] * PAGE] + [99] * more


def kv_of(prompt: list[int]) -> torch.Tensor:
    """Keys and values that say which token they belong to, [L, 2K, T, E]."""
    return torch.tensor(prompt, dtype=torch.float32)[None, None, :, None].expand(2, 2, -1, 4)


def room_for(count: int) -> PrefixPages:
    def claim(num_bytes: int) -> bool:
        if num_bytes > count * PAGE_BYTES:
            return False
        while pages.num_bytes + num_bytes > count * PAGE_BYTES:
            pages.drop_oldest()
        return True

    pages = PrefixPages(claim)
    return pages


def known(pages: PrefixPages, prompt: list[int], unit: tuple[str, int] = BASE) -> int:
    found = pages.match(unit, prompt)
    if found:
        assert torch.equal(as_prompt(found), kv_of(prompt)[:, :, : len(found) * PAGE])
    return len(found)


def test_a_prompt_finds_the_pages_that_it_begins_with() -> None:
    pages = room_for(9)
    pages.insert(BASE, prompt := prompt_of(1, 2, 3), kv_of(prompt))
    assert (len(pages), pages.num_bytes) == (3, 3 * PAGE_BYTES)
    assert known(pages, prompt) == 3
    assert known(pages, prompt_of(1, 2, 4)) == 2
    assert known(pages, prompt_of(2, 1)) == 0
    assert known(pages, prompt_of(1)[: PAGE - 1]) == 0


def test_the_last_token_is_always_left_to_compute() -> None:
    pages = room_for(9)
    pages.insert(BASE, prompt := prompt_of(1, 2, more=0), kv_of(prompt))
    assert len(pages) == 2
    assert known(pages, prompt) == 1


def test_adapters_and_versions_share_nothing() -> None:
    pages = room_for(9)
    for unit in (BASE, TUNED, ("", 2)):
        assert known(pages, prompt_of(1), unit) == 0
        pages.insert(unit, prompt := prompt_of(1), kv_of(prompt))
    pages.keep_only({TUNED, ("", 2)})
    assert [known(pages, prompt_of(1), unit) for unit in (BASE, TUNED, ("", 2))] == [0, 1, 1]
    assert pages.num_bytes == 2 * PAGE_BYTES


def test_the_least_recently_used_goes_first_and_never_from_under_another() -> None:
    pages = room_for(4)
    for prompt in (prompt_of(1, 2), prompt_of(3, 4)):
        pages.insert(BASE, prompt, kv_of(prompt))
    assert known(pages, prompt_of(1, 2)) == 2
    pages.insert(BASE, prompt := prompt_of(5), kv_of(prompt))
    assert [known(pages, p) for p in (prompt_of(1, 2), prompt_of(3, 4), prompt_of(5))] == [2, 1, 1]
    pages.insert(BASE, prompt := prompt_of(6, 7, 8), kv_of(prompt))
    assert [known(pages, p) for p in (prompt_of(1, 2), prompt_of(3), prompt_of(5), prompt_of(6, 7, 8))] == [0, 0, 1, 3]


def test_a_prompt_larger_than_all_room_is_kept_as_far_as_it_goes() -> None:
    pages = room_for(2)
    pages.insert(BASE, prompt := prompt_of(1, 2, 3, 4), kv_of(prompt))
    assert pages.num_bytes <= 2 * PAGE_BYTES
    assert known(pages, prompt) <= 2
