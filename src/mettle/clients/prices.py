"""What tokens cost.

Parts: `Price`. Invariant: a cost exists only where both the price and the number of tokens are known; nothing is ever
taken to be free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PER_MILLION = 1e6
PRICE_KEYS = ("input_usd_per_mtok", "output_usd_per_mtok")


@dataclass(frozen=True, slots=True)
class Price:
    """US dollars for a million tokens read and for a million tokens written."""

    input_usd_per_mtok: float
    output_usd_per_mtok: float

    def cost(self, input_tokens: float, output_tokens: float) -> dict[str, float]:
        """What this many tokens cost, in the published form."""
        read = input_tokens * self.input_usd_per_mtok / PER_MILLION
        written = output_tokens * self.output_usd_per_mtok / PER_MILLION
        return {"input_usd": read, "output_usd": written, "total_usd": read + written}


def price_from(value: Any) -> Price:
    """A price as it is written in TOML: `{input_usd_per_mtok = 0.4, output_usd_per_mtok = 1.6}`.

    Raises: ValueError when it is anything else.
    """
    if isinstance(value, Price):
        return value
    shape = f"a price is {{{PRICE_KEYS[0]} = 0.4, {PRICE_KEYS[1]} = 1.6}}, in US dollars"
    if not isinstance(value, Mapping) or set(value) != set(PRICE_KEYS):
        raise ValueError(f"{value!r} is no price; {shape}")
    numbers = [value[key] for key in PRICE_KEYS]
    if not all(isinstance(each, int | float) and not isinstance(each, bool) and each >= 0 for each in numbers):
        raise ValueError(f"{value!r} is no price; {shape}")
    return Price(*map(float, numbers))
