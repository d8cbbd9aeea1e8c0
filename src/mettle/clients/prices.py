"""What tokens cost.

Parts: `Price`. Invariant: a cost exists only where both the price and the number of tokens are known; nothing is ever
taken to be free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mettle.errors import UserError

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


def price_from(table: Any, where: str) -> Price:
    """A price as it is written in TOML: `{input_usd_per_mtok = 0.4, output_usd_per_mtok = 1.6}`.

    Raises: UserError, beginning with `where`, when it is anything else.
    """
    shape = f"a price is {{{PRICE_KEYS[0]} = 0.4, {PRICE_KEYS[1]} = 1.6}}"
    if not isinstance(table, Mapping) or set(table) != set(PRICE_KEYS):
        raise UserError(f"{where}: {table!r} is no price; {shape}")
    values = [table[key] for key in PRICE_KEYS]
    if not all(isinstance(v, int | float) and not isinstance(v, bool) and v >= 0 for v in values):
        raise UserError(f"{where}: {table!r} is no price; {shape}, in US dollars")
    return Price(*map(float, values))
