"""What each file of tests takes: processor time with all it starts, and when it ran in which process.

    make tests ARGS="-p tests.costs --costs=FOLDER"
    python -m tests.costs FOLDER

The `=` matters: a folder that stands alone is taken for tests, and pytest looks for its settings above it.

Each process of a run writes a line for each test into a file of its own; the second command prints the files by what
they take, the longest first, and for how long each process had nothing left to do.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest


def processor_s() -> float:
    """Processor time of this process and of all its children that have ended."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


class Costs:
    """The plugin: notes each test in a file of this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        began, used = time.monotonic(), processor_s()
        try:
            return (yield)
        finally:
            told = [item.nodeid.partition("::")[0], began, time.monotonic(), processor_s() - used, item.nodeid]
            with (self.folder / f"{os.getpid()}.jsonl").open("a") as file:
                file.write(json.dumps(told) + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", type=Path, help="write what each test takes into this folder")


def pytest_configure(config: pytest.Config) -> None:
    if folder := config.getoption("--costs"):
        folder = config.invocation_params.dir / folder
        folder.mkdir(parents=True, exist_ok=True)
        config.pluginmanager.register(Costs(folder), "costs-of-tests")


def main(folder: Path) -> None:
    """Print the table."""
    spans = {path.stem: [json.loads(line) for line in path.open()] for path in sorted(folder.glob("*.jsonl"))}
    cpu_s: defaultdict[str, float] = defaultdict(float)
    wall_s: defaultdict[str, float] = defaultdict(float)
    count: defaultdict[str, int] = defaultdict(int)
    for name, began, ended, used, _ in (span for own in spans.values() for span in own):
        cpu_s[name] += used
        wall_s[name] += ended - began
        count[name] += 1
    print(f"{'processor s':>11} {'clock s':>8} {'tests':>6}  file")
    for name in sorted(cpu_s, key=lambda name: -cpu_s[name]):
        print(f"{cpu_s[name]:11.1f} {wall_s[name]:8.1f} {count[name]:6}  {name}")
    print(f"{sum(cpu_s.values()):11.1f} {sum(wall_s.values()):8.1f} {sum(count.values()):6}  all")
    first = min(span[1] for own in spans.values() for span in own)
    last = max(span[2] for own in spans.values() for span in own)
    print(f"from the first test to the end of the last {last - first:.1f} s; at the end idle:")
    for pid, own in spans.items():
        print(f"  process {pid}: {last - own[-1][2]:.1f} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
