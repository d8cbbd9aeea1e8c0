"""Line charts as SVG that needs nothing else: one panel below the other, each with its own scale.

Parts: `Line`, `Panel`, `charts_svg`. Invariant: the same figures give the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d")
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 16, 26, 40
_NUM_LEVELS = 4


@dataclass(frozen=True)
class Line:
    """Points from left to right; `is_faint` lines are drawn thin and behind."""

    label: str
    points: Sequence[tuple[float, float]]
    is_faint: bool = False


@dataclass(frozen=True)
class Panel:
    """One chart. `lowest` and `highest` fix the scale where it has natural ends; `labels_px` is room on the right."""

    title: str
    x_title: str
    lines: Sequence[Line] = field(default_factory=list)
    lowest: float | None = 0.0
    highest: float | None = None
    height: int = 200
    labels_px: int = 190


def charts_svg(panels: Sequence[Panel], width: int = 860) -> str:
    """All panels in one picture."""
    height = sum(panel.height for panel in panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        ' font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    offset = 0
    for panel in panels:
        parts += [f'<g transform="translate(0,{offset})">', *_panel(panel, width), "</g>"]
        offset += panel.height
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel, width: int) -> list[str]:
    points = [point for line in panel.lines for point in line.points]
    values = [y for _, y in points]
    lowest = min(values, default=0.0) if panel.lowest is None else panel.lowest
    levels = _levels(lowest, max(values, default=1.0) if panel.highest is None else panel.highest)
    first = min((x for x, _ in points), default=0.0)
    last = max((x for x, _ in points), default=1.0)
    right = width - _RIGHT - panel.labels_px

    def across(x: float) -> float:
        return _LEFT + (right - _LEFT) * (x - first) / ((last - first) or 1.0)

    def down(y: float) -> float:
        share = (y - levels[0]) / ((levels[-1] - levels[0]) or 1.0)
        return _TOP + (panel.height - _TOP - _BOTTOM) * (1 - share)

    parts = [f'<text x="{_LEFT}" y="16" font-weight="bold" fill="#333">{escape(panel.title)}</text>']
    for level in levels:
        y = down(level)
        parts.append(f'<line x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#555">{level:g}</text>')
    for index, line in sorted(enumerate(panel.lines), key=lambda pair: not pair[1].is_faint):
        colour = COLOURS[index % len(COLOURS)]
        path = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in line.points)
        style = 'stroke-width="0.8" opacity="0.45"' if line.is_faint else 'stroke-width="1.5"'
        parts.append(f'<polyline fill="none" stroke="{colour}" {style} points="{path}"/>')
        label = f'<text x="{right + 8}" y="{_TOP + 8 + 16 * index}" fill="{colour}">{escape(line.label)}</text>'
        parts.append(label)
    for x in (level for level in _levels(first, last) if first <= level <= last):
        place = f'x="{across(x):.1f}" y="{panel.height - _BOTTOM + 16}" text-anchor="middle"'
        parts.append(f'<text {place} fill="#555">{x:g}</text>')
    parts.append(f'<text x="{_LEFT}" y="{panel.height - 8}" fill="#555">{escape(panel.x_title)}</text>')
    return parts


def _levels(lowest: float, highest: float) -> list[float]:
    """Round numbers from the lowest to the highest value, at most a handful."""
    rough = max(highest - lowest, 1e-9) / _NUM_LEVELS
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= rough * 0.999)
    start = math.floor(lowest / step + 1e-9)
    return [round((start + i) * step, 9) for i in range(math.ceil((highest - start * step) / step - 1e-9) + 1)]
