"""The page of the sandbox's figures, from what the benchmarks have kept in benchmarks/results.

Parts: `sandbox_figures_page` and one function for each table. Invariant: each figure on the page stands in a JSON file
that a benchmark has written; nothing is typed by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_HEAD = """# What sandboxes cost, and what they leave behind

Written from `benchmarks/results/sandbox_*.json`. Milliseconds depend on the host; the column "to the floor" is measured
against fork, exit and wait of the same interpreter in the same run, samples interleaved, and is what to compare.
"""
_LATENCY_NAMES = {
    "fork + exit of the interpreter": "fork + exit, the floor",
    "judge, warm": "**judge, one test**",
    "judge, per test of 20": "judge, each test of 20 one after another",
}
_ORPHAN_NAMES = {
    "n": "times",
    "processes_killed_median": "processes at that moment, median",
    "processes_killed_max": "the most",
    "gone_after_s_median": "seconds until all had gone, median",
    "gone_after_s_max": "the most",
    "uploads_swept": "uploads removed by the next service",
    "left_folders": "left: folders and files",
    "left_machines": "left: machines of the client",
}
_COLD = "subprocess python -I -S"
_BWRAP = "bwrap python -I -S"
_WHY = """
The goal of .2 of bwrap's latency on a loaded host is met for one test. The goals of .3 of a cold start's processor time
for a judgement of one test, and of .1 for each test of a batch, are **not met**; what keeps them from it has
[its own part](../explanation/sandbox.md#what-it-costs-and-what-it-leaves-behind). All runs have a session of their own,
because the kernel shares processors out by session where it has autogroups, and that cuts both ways: each test of
the judge's has a session too, which helps it here, while from a shell that weighed twenty-eight times as much as a new
session it took 1.6 times as long as bwrap, which has the shell's. A host that shares by cgroup was not measured.

    python benchmarks/sandbox_judge.py --brief --samples 25 --executions 24
"""
_SOAK = """
One process holds two sides, each a judge pool and a machine pool under mixed load: honest and wrong programs in four
languages, time-outs, memory hogs, output floods, fork bombs, crashes, survivors; machines with files, snapshots, jobs
with deep trees, ports, streams left early, refused hosts, idle ends. One client in a dozen is cancelled, and on one
side both templates are killed with -9 in each window. After each window the load stops and everything is counted by
the kernel's books. The first third is warm-up; over the rest growth is Theil and Sen's slope times the time, and first
and last are medians of a quarter each. Neither the growth nor the step between those may be more than is allowed.
"""
_ORPHANS = """
Owners are killed with -9 at random moments: a process with both pools, `mettle sandbox serve` under a client, and the
client of a service (whose machines end with its lease, here 1 s, before the service is killed, too). They are at work
on the soak's load, and hold machines whose processes have forked twice, left their session and ignore signals. The
counting process adopts orphans, so that none escapes by losing its parent. Uploads that a killed service was receiving
are removed when the next one starts, and counted apart. The `unsafe` backend, which is not part of this, leaves its
folder.
"""


def sandbox_figures_page(results: Path, note: str) -> str:
    """All of it."""
    judge, machines, soak, orphans = (
        json.loads((results / f"sandbox_{name}.json").read_text(encoding="utf-8"))
        for name in ("judge", "machines", "soak", "orphans")
    )
    lines = [note, "", *_HEAD.splitlines(), ""]
    lines += ["## Judging", "", f"{judge['machine']}, Python {judge['python']}.", ""]
    lines += [*_latency(judge), "", *_rates(judge), "", f"A waiting cell takes {judge['idle_cell_mb']:.1f} MB.", ""]
    lines += [
        "    python benchmarks/sandbox_judge.py",
        "",
        *_loaded(results),
        "## Machines",
        "",
        f"{machines['machine']}.",
        "",
    ]
    lines += [*_machines(machines), "", "    python benchmarks/sandbox_machines.py --machines 500", ""]
    lines += [f"## A soak of {soak['minutes']:g} minutes", "", *_SOAK.strip().splitlines(), ""]
    lines += ["![What both pools held, minute by minute](../assets/sandbox-soak.svg)", "", *_soak(soak), ""]
    lines += ["    python benchmarks/sandbox_soak.py --minutes 10 --plot soak.svg", ""]
    lines += [
        f"## After {len(orphans['rounds'])} kills",
        "",
        *_ORPHANS.strip().splitlines(),
        "",
        *_orphans(orphans),
        "",
    ]
    lines += ["    python benchmarks/sandbox_orphans.py --rounds 50", ""]
    return "\n".join(lines).rstrip() + "\n"


def _latency(judge: dict[str, Any]) -> list[str]:
    lines = ["| | p50 ms | p95 ms | to the floor |", "|---|---|---|---|"]
    for name, row in judge["latency"].items():
        figures = f"{row['p50_ms']:.1f} | {row['p95_ms']:.1f} | {row['p50_to_floor']:.1f}"
        lines.append(f"| {_LATENCY_NAMES.get(name, name)} | {figures} |")
    return lines


def _rates(judge: dict[str, Any]) -> list[str]:
    head = (
        "| sustained, one for each core at a time | executions a second | processor ms each | of a cold python -I -S |"
    )
    rates = sorted(judge["sustained"].items(), key=lambda pair: -pair[1]["per_s"])
    cold_ms = judge["sustained"][_COLD]["cpu_ms_each"]
    lines = [head, "|---|---|---|---|"]
    for name, rate in rates:
        cpu_ms = rate["cpu_ms_each"]
        cost = "- | -" if cpu_ms is None else f"{cpu_ms:.1f} | {cpu_ms / cold_ms:.2f}"
        lines.append(f"| {_LATENCY_NAMES.get(name, name)} | {rate['per_s']:.0f} | {cost} |")
    return lines


def _loaded(results: Path) -> list[str]:
    """The same on a busy host, where that was measured; ratios, because the milliseconds are the load's."""
    path = results / "sandbox_judge_loaded.json"
    if not path.exists():
        return []
    judge = json.loads(path.read_text(encoding="utf-8"))
    bwrap, cold = judge["latency"][_BWRAP], judge["sustained"][_COLD]
    lines = [f"Once more at a load average of {judge['load_average']:.0f} on {judge['machine']}:", ""]
    lines += ["| under load | p50 ms | of bwrap + python | processor, of a cold python -I -S |", "|---|---|---|---|"]
    shown = {_COLD: _COLD, _BWRAP: _BWRAP, "judge, warm": "judge"}
    shown["judge, per test of 20"] = "judge, tests of 20 at a time"
    for name, sustained in shown.items():
        p50_ms = judge["latency"][name]["p50_ms"]
        cpu_ms = judge["sustained"][sustained]["cpu_ms_each"]
        cost = "-" if cpu_ms is None else f"{cpu_ms / cold['cpu_ms_each']:.2f}"
        figures = f"{p50_ms:.1f} | {p50_ms / bwrap['p50_ms']:.2f} | {cost}"
        lines.append(f"| {_LATENCY_NAMES.get(name, name)} | {figures} |")
    return [*lines, "", *_WHY.strip().splitlines(), ""]


def _machines(machines: dict[str, Any]) -> list[str]:
    num = machines["num_machines"]
    lines = ["| | p50 ms | p95 ms |", "|---|---|---|"]
    for name, row in machines["latency"].items():
        shown = f"create ({num} one after another)" if name == "create" else name
        lines.append(f"| {shown} | {row['p50_ms']:.1f} | {row['p95_ms']:.1f} |")
    return [
        *lines,
        "",
        f"With {num} machines at once, an idle one takes {machines['idle_mb_each']:.1f} MB; a command in each of them,",
        f"all started together, took {machines['all_exec_at_once_s']:.2f} s, and deleting all of them",
        f"{machines['all_deleted_s']:.2f} s.",
    ]


def _soak(soak: dict[str, Any]) -> list[str]:
    counts = soak["counts"]
    num_killed = sum(count for name, count in counts.items() if name.endswith("templates killed"))
    num_cancelled = sum(count for name, count in counts.items() if name.endswith("clients cancelled"))
    num_samples = len(soak["at_rest"]["at_s"])
    num_judged = sum(count for name, count in counts.items() if ": judge: " in name)
    num_machines = sum(count for name, count in counts.items() if ": machine: " in name)
    lines = [
        f"{num_judged:,} judgements, {num_machines:,} machine scenarios, {num_cancelled} cancelled clients, both",
        f"templates killed {num_killed} times, {num_samples} samples at rest. Answers that were not the",
        f"right ones: {soak['num_surprises']}. Left when the pools were closed: {_words_of(soak['left_when_closed'])}.",
        f"Verdict: **{'steady' if soak['is_steady'] else 'not steady'}**.",
        "",
        "| at rest | first | last | growth | allowed |",
        "|---|---|---|---|---|",
    ]
    for one in soak["growth"]:
        name = f"**{one['name']}**" if one["is_growing"] else one["name"]
        lines.append(f"| {name} | {one['first']:.1f} | {one['last']:.1f} | {one['growth']:+.2f} | {one['limit']:g} |")
    return lines


def _orphans(orphans: dict[str, Any]) -> list[str]:
    rows = orphans["summary"]
    lines = ["| killed | " + " | ".join(rows) + " |", "|---" * (len(rows) + 1) + "|"]
    for name in next(iter(rows.values())):
        shown = _ORPHAN_NAMES.get(name, name.replace("left_", "left: "))
        lines.append(f"| {shown} | " + " | ".join(f"{row[name]:g}" for row in rows.values()) + " |")
    return lines


def _words_of(left: dict[str, float]) -> str:
    return ", ".join(f"{count:g} {name}" for name, count in left.items()) or "nothing"
