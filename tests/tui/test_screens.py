"""What each screen looks like, line by line: `tests/tui/screens/NAME.txt`.

`METTLE_WRITE_SCREENS=1` writes what is drawn now; read the difference before it is committed.
"""

from __future__ import annotations

import os
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

SCREENS = Path(__file__).with_name("screens")
JOURNEYS = {
    "environments": ((90, 12), ()),
    "runs": ((140, 30), ("enter", "enter", "x")),
    "run": ((150, 56), ("enter", "enter", "enter", "down")),
    "run-narrow": ((60, 20), ("enter", "enter", "enter")),
    "filter": ((100, 20), ("enter", "enter", "enter", "f")),
    "rollout": ((130, 40), ("enter", "enter", "enter", "enter")),
    "rollout-json": ((80, 40), ("enter", "enter", "enter", "enter", "r")),
    "rollout-error": ((100, 40), ("enter", "enter", "enter", "end", "enter")),
    "task": ((130, 30), ("enter", "enter", "enter", "t")),
    "compare": ((110, 24), ("enter", "enter", "x", "down", "x", "c")),
    "help": ((100, 60), ("enter", "enter", "enter", "enter", "question_mark")),
}


@pytest.fixture
def two_runs(write, make_row):
    """A second evaluation, better than the first; both of one day."""
    rewards = ((1, 1.0), (2, 1.0), (1, 1.0), (2, 0.75))
    better = write([make_row(task, reward) for task, reward in rewards], "run00002", avg_reward=0.9375, avg_error=0.0)
    for age, folder in enumerate((better.with_name("run00001"), better)):
        os.utime(folder / "metadata.json", (1_700_000_000 - age,) * 2)


BY_DAY = ("environments", "run-narrow", "filter", "rollout")
"""The others, which are drawn by the same parts, are looked at by night."""


@pytest.mark.parametrize(
    "name", [name if name in BY_DAY else pytest.param(name, marks=pytest.mark.nightly) for name in JOURNEYS]
)
async def test_a_screen_looks_like_this(browse, two_runs, root, name):
    size, keys = JOURNEYS[name]
    async with browse(size=size) as at:
        await at.press(*keys)
        shown = _steady(at.text, root)
        drawn = at.app.export_screenshot()
    ElementTree.fromstring(drawn)
    file = SCREENS / f"{name}.txt"
    if os.environ.get("METTLE_WRITE_SCREENS"):
        file.write_text(shown, encoding="utf-8")
    assert shown == file.read_text(encoding="utf-8"), f"look at {file}; METTLE_WRITE_SCREENS=1 writes it anew"


def _steady(text: str, root: Path) -> str:
    """Without what differs from day to day and from machine to machine."""
    text = re.sub(r" *\d+ (s|min|h|d) ago", " AGO", text)
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d", "YYYY-MM-DD hh:mm", text)
    lines = text.splitlines()
    # The overview ends with the path of the folder, which may take several lines.
    start = next((n for n, line in enumerate(lines) if re.search(rf"[ \u258f]{re.escape(str(root)[:8])}", line)), None)
    if start is not None:
        lines[start:-2] = ["PATH"]
    return "\n".join(line.rstrip() for line in lines) + "\n"
