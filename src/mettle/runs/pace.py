"""How long something will still take, from how fast it went lately.

Parts: `StepPace`. Readings are of a monotonic clock and a count that only grows; a count that fell (a resumed run)
starts anew. Nothing is said before there is enough to go by.
"""

from __future__ import annotations

from collections import deque

WINDOW_S = 30.0
LEAST_S = 2.0
"""An estimate from less than this is a guess."""


class StepPace:
    """The pace of the last half minute."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, int]] = deque()

    def read(self, now_s: float, done: int) -> None:
        """So many are done at this moment. Equal counts in a row are kept once, at their first moment.

        The pace is read from the first that is done: what goes before it is a start.
        """
        readings = self._readings
        if readings and done < readings[-1][1]:
            readings.clear()
        if done == 0:
            return
        if not readings or done > readings[-1][1]:
            readings.append((now_s, done))
        while len(readings) > 2 and now_s - readings[1][0] > WINDOW_S:
            readings.popleft()

    def seconds_left(self, now_s: float, missing: int) -> float | None:
        """The time for `missing` more; None before the pace is known, or when nothing came of late."""
        if missing <= 0 or len(self._readings) < 2:
            return None
        (first_s, first), (last_s, last) = self._readings[0], self._readings[-1]
        if last_s - first_s < LEAST_S or now_s - last_s > WINDOW_S:
            return None
        return missing * (last_s - first_s) / (last - first)


def time_left(seconds: float | None) -> str:
    """`about 50 s left`, rounded as far as it may be wrong; "" for None."""
    if seconds is None:
        return ""
    if seconds < 90:
        return f"about {max(5, round(seconds / 5) * 5)} s left"
    if seconds < 5400:
        return f"about {round(seconds / 60)} min left"
    return f"about {seconds / 3600:.1f} h left"
