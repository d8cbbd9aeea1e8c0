"""Does anything grow while sandboxes are used for minutes? Memory, descriptors, processes, mounts, cgroups, files.

One process holds two sides, each a judge pool and a machine pool under steady mixed load (`soak_programs.py`,
`soak_machines.py`); on one side the templates are killed with -9 once a window, and on both some clients are cancelled.
After each window the load stops, what it has used ends by itself, and everything is counted (`soak_resources.py`). The
samples at rest are judged (`soak_verdict.py`); those under load are shown beside them.

    python benchmarks/sandbox_soak.py [--minutes 10] [--json FILE] [--plot FILE.svg]

Exit code 1: something grows, or a sandbox gave an answer that it may not give.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import math
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from line_charts import Line, Panel, charts_svg
from soak_load import Side, Traffic, warm_up
from soak_resources import ResourceCount, adopt_orphans, settle, take_own_mounts
from soak_verdict import WARM_UP, Growth, judge_samples, table

from mettle.sandbox import MachinePool, SandboxConfig, SandboxPool

SAMPLE_S = 3.0
WINDOW_S = 12.0
MIN_WINDOWS = 7
Values = dict[str, float]
PANELS: dict[str, tuple[str, ...]] = {
    "Memory (anonymous and shared), MB": (
        "memory of all, MB",
        "memory of the owner, MB",
        "memory of cells and machines, MB",
        "memory of the templates, MB",
    ),
    "Descriptors": (
        "descriptors of the owner",
        "descriptors of the templates",
        "descriptors of cells and machines",
    ),
    "Processes, threads, namespaces": ("processes", "threads of the owner", "mnt namespaces", "net namespaces"),
    "Mounts, cgroups, files": (
        "mounts of the owner",
        "mounts in templates",
        "mounts in machines",
        "cgroups",
        "files in templates",
    ),
}


@dataclass
class Soak:
    """One soak: its sides, its resource_count, and what was found."""

    sides: Sequence[Side]
    resource_count: ResourceCount
    traffic: Traffic
    window_s: float = WINDOW_S
    sample_s: float = SAMPLE_S
    each_window: Callable[[], None] = lambda: None
    quiet_s: float = 0.4
    at_rest: list[tuple[float, Values]] = field(default_factory=list)
    under_load: list[tuple[float, Values]] = field(default_factory=list)
    windows: list[tuple[float, Values]] = field(default_factory=list)

    async def run(self, seconds: float, report: Callable[[str], None] = lambda _: None) -> list[Growth]:
        """Windows of load and rests between them, until the time is over and there are enough; the verdicts."""
        started = time.monotonic()
        while (now_s := time.monotonic() - started) < seconds or len(self.at_rest) < MIN_WINDOWS:
            self.traffic.window()
            sampler = asyncio.create_task(self._sample_load(started))
            async with asyncio.TaskGroup() as sides:
                for side in self.sides:
                    sides.create_task(side.window(self.window_s))
            sampler.cancel()
            self.windows.append((now_s, self.traffic.window()))
            self.each_window()
            await self._rest(started)
            self._say(report)
        return judge_samples(self.at_rest)

    async def _rest(self, started: float) -> None:
        async with asyncio.TaskGroup() as sides:
            for side in self.sides:
                sides.create_task(side.rest())
        if not await settle(quiet_s=self.quiet_s):
            self.traffic.surprise("processes came and went for 15 s after the load had stopped")
        self.at_rest.append((time.monotonic() - started, self._take()))

    async def _sample_load(self, started: float) -> None:
        while True:
            await asyncio.sleep(self.sample_s)
            self.under_load.append((time.monotonic() - started, self._take()))

    def _take(self) -> Values:
        templates = [pid for side in self.sides for pid in side.templates()]
        return self.resource_count.take(templates, [pid for side in self.sides for pid in side.machine_pids()])

    def _say(self, report: Callable[[str], None]) -> None:
        (at_s, values), (_, pace) = self.at_rest[-1], self.windows[-1]
        report(
            f"{at_s:6.0f} s  {values['memory of all, MB']:6.1f} MB"
            f"  {values['descriptors of the owner']:4.0f} descriptors  {values['processes']:4.0f} processes"
            f"  {values['cgroups']:3.0f} cgroups"
            f"  {pace['judgements a second']:5.1f} judgements/s, p50 {pace['judge p50, ms']:6.1f} ms"
            f"  exec p50 {pace['exec p50, ms']:6.1f} ms  {self.traffic.num_surprises} surprises"
        )


@contextlib.asynccontextmanager
async def opened_sides(traffic: Traffic, rng: random.Random) -> AsyncIterator[list[Side]]:
    """A steady and a shaken side, at work."""
    config = SandboxConfig(warm=2, disk_mb=16)
    async with (
        SandboxPool(config) as judge,
        MachinePool(config) as machines,
        SandboxPool(config) as shaken_judge,
        MachinePool(config) as shaken_machines,
    ):
        sides = [
            Side("steady", judge, machines, traffic, rng),
            Side("shaken", shaken_judge, shaken_machines, traffic, rng, is_shaken=True, num_judging=1, num_working=1),
        ]
        for side in sides:
            await warm_up(side.judge)
        yield sides


async def main(minutes: float, seed: int) -> tuple[Soak, list[Growth], Values]:
    """A soak of its own pools, and what is left when they are closed."""
    adopt_orphans()
    take_own_mounts()
    with tempfile.TemporaryDirectory(prefix="mettle-soak-") as folder:
        tempfile.tempdir = folder
        resource_count, traffic = ResourceCount(Path(folder)), Traffic()
        async with opened_sides(traffic, random.Random(seed)) as sides:
            soak = Soak(sides, resource_count, traffic)
            verdicts = await soak.run(minutes * 60, lambda line: print(line, flush=True))
        await settle()
        return soak, verdicts, resource_count.take([])


def left_over(values: Values) -> Values:
    """What should be gone when the pools are closed."""
    names = ("processes", "cgroups", "files of the pools")
    return {name: values[name] for name in names if values[name]}


def figures(soak: Soak, verdicts: list[Growth], closed: Values, minutes: float) -> dict[str, Any]:
    """What is kept."""

    def columns(samples: list[tuple[float, Values]]) -> dict[str, list[float]]:
        names = samples[0][1] if samples else {}
        found = {name: [_rounded(values[name]) for _, values in samples] for name in names}
        return {"at_s": [round(at_s, 1) for at_s, _ in samples], **found}

    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}",
        "python": platform.python_version(),
        "minutes": minutes,
        "warm_up": round(WARM_UP, 3),
        "is_steady": is_steady(soak, verdicts, closed),
        "growth": [{**one._asdict(), "is_growing": one.is_growing} for one in verdicts],
        "left_when_closed": left_over(closed),
        "counts": dict(sorted(soak.traffic.counts.items())),
        "num_surprises": soak.traffic.num_surprises,
        "surprises": soak.traffic.surprises,
        "at_rest": columns(soak.at_rest),
        "under_load": columns(soak.under_load),
        "windows": columns(soak.windows),
    }


def judged_again(found: dict[str, Any]) -> dict[str, Any]:
    """A soak that was kept, with the verdict that its samples get now."""
    columns = dict(found["at_rest"])
    times = columns.pop("at_s")
    samples = [(at_s, {name: column[i] for name, column in columns.items()}) for i, at_s in enumerate(times)]
    verdicts = judge_samples(samples)
    is_clean = not (found["left_when_closed"] or found["num_surprises"])
    growth = [{**one._asdict(), "is_growing": one.is_growing} for one in verdicts]
    return {**found, "growth": growth, "is_steady": is_clean and not any(one.is_growing for one in verdicts)}


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 2)


def is_steady(soak: Soak, verdicts: list[Growth], closed: Values) -> bool:
    return not (any(one.is_growing for one in verdicts) or left_over(closed) or soak.traffic.num_surprises)


def plot(found: dict[str, Any]) -> str:
    """The picture of a soak that was kept."""
    panels = []
    for title, names in PANELS.items():
        lines = [_line(found["at_rest"], name) for name in names]
        panels.append(Panel(f"{title}, at rest after each window", "minutes", lines))
    loaded = ("processes", "memory of all, MB", "descriptors of the owner")
    panels.append(Panel("Under load", "minutes", [_line(found["under_load"], name) for name in loaded]))
    paces = ("judgements a second", "machine scenarios a second", "judge p50, ms", "exec p50, ms")
    panels.append(Panel("Throughput and latency, by window", "minutes", [_line(found["windows"], n) for n in paces]))
    return charts_svg(panels)


def _line(columns: dict[str, list[float]], name: str) -> Line:
    pairs = zip(columns["at_s"], columns[name], strict=True)
    return Line(name.removesuffix(", MB"), [(at_s / 60, value) for at_s, value in pairs if value is not None])


def show(soak: Soak, verdicts: list[Growth], closed: Values) -> None:
    lines = ["", *table(verdicts), ""]
    counts = soak.traffic.counts
    lines.append(f"{sum(counts.values())} operations; {soak.traffic.num_surprises} surprises")
    lines += [f"  surprise: {line}" for line in soak.traffic.surprises]
    lines.append(f"left when the pools were closed: {left_over(closed) or 'nothing'}")
    lines.append("steady" if is_steady(soak, verdicts, closed) else "NOT STEADY")
    print("\n".join(lines))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--plot", type=Path, default=None)
    parser.add_argument("--kept", type=Path, default=None, help="judge and draw what this file holds; run nothing")
    arguments = parser.parse_args()
    logging.getLogger("mettle.sandbox").setLevel(logging.ERROR)  # templates that die are part of the load
    if arguments.kept:
        kept = judged_again(json.loads(arguments.kept.read_text()))
        print("\n".join(table([Growth(*list(one.values())[:5]) for one in kept["growth"]])))
    else:
        soaked, judged, left = asyncio.run(main(arguments.minutes, arguments.seed))
        show(soaked, judged, left)
        kept = figures(soaked, judged, left, arguments.minutes)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(kept) + "\n")
    if arguments.plot:
        arguments.plot.write_text(plot(kept))
    sys.exit(0 if kept["is_steady"] else 1)
