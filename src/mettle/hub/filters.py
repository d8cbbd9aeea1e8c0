"""Filters of the templates: the wording of figures with a page's typography, and what only pages have."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from mettle import wording

DASH = "\u2013"


def on_a_page(show: Callable[..., str]) -> Callable[..., str]:
    """`show` of `mettle.wording` with a real dash for what is not known."""
    return lambda *values: DASH if (text := show(*values)) == wording.DASH else text


compact, duration, reward = map(on_a_page, (wording.compact, wording.duration, wording.format_reward))


def signed(value: float | None) -> str:
    """A difference with its sign."""
    return DASH if value is None else f"{value:+.3f}".replace("-", "\u2212")


def number(value: float | None) -> str:
    """A count with thousands apart, or a figure with three significant digits."""
    if value is None:
        return DASH
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def small(value: float | None) -> str:
    """A small figure as 1.4e-4."""
    if value is None:
        return DASH
    if value == 0:
        return "0"
    if abs(value) >= 0.01:
        return f"{value:.3g}"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def bound(value: float | None) -> str:
    """The next round figure above: 1.8e-7 as 2e-7, so that "agree to" stays true."""
    if value is None:
        return DASH
    if value <= 0:
        return "the last bit"
    exponent = math.floor(math.log10(value))
    mantissa = math.ceil(value / 10**exponent - 1e-9)
    return f"1e{exponent + 1}" if mantissa == 10 else f"{mantissa}e{exponent}"


def clock(at: float | None) -> str:
    """A time of day, in the time zone of the machine."""
    return DASH if at is None else time.strftime("%H:%M:%S", time.localtime(at))


def date(at: float | None) -> str:
    """A date and a time of day."""
    return DASH if at is None else time.strftime("%d %b %Y, %H:%M", time.localtime(at))


def versions(oldest: int, newest: int) -> str:
    """The policy versions that sampled a rollout."""
    if newest < 0:
        return DASH
    return f"v{oldest}" if oldest == newest else f"v{oldest}\u2013v{newest}"


def heat(logprob: float) -> int:
    """The shade of a sampled token, 0 (probability above 0.9) to 6 (below 0.01)."""
    return sum(logprob < math.log(limit) for limit in HEAT_LIMITS)


HEAT_LIMITS = (0.9, 0.7, 0.5, 0.25, 0.1, 0.01)


def probability(logprob: float) -> str:
    """A log probability as a percentage."""
    percent = 100 * math.exp(min(0.0, logprob))
    return f"{percent:.1f}%" if percent >= 0.1 else f"{percent:.1g}%"


def spark(values: list[float], width: float = 120.0, height: float = 28.0) -> str:
    """The points of a small line, for an SVG polyline; empty for fewer than two values."""
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    step = (width - 2) / (len(values) - 1)
    return " ".join(
        f"{1 + i * step:.1f},{height - 2 - (v - low) / span * (height - 4):.1f}" for i, v in enumerate(values)
    )


def card_state(state: str) -> str:
    """The state of a release's check, for people."""
    words = {"PENDING": "waiting", "SUCCESS": "passed", "CANCELLED": "not checked", "": "not checked"}
    return words.get(state, state.lower())


FILTERS: dict[str, Callable[..., object]] = {
    f.__name__: f for f in (signed, number, small, bound, card_state, clock, date, heat, probability, spark)
} | {
    "reward": reward,
    "compact": compact,
    "bytes": on_a_page(wording.num_bytes),
    "duration": duration,
    "interval": wording.format_interval,
    "percent": on_a_page(wording.percent),
    "usd": on_a_page(wording.usd),
    "share_of": wording.share_of,
}
