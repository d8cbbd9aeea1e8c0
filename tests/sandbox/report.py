"""Runs the whole safety suite with isolation on and off, and writes its page: `python tests/sandbox/report.py`.

Started by root it runs a second time as an ordinary user. `--json` prints what was found instead of writing the page.
Invariant: each cell of the page's tables is what this run saw; the exit code is 1 if anything was not contained.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import ordinary
from arena import (
    MACHINE_LIMITS,
    attack_as_test,
    attack_from_machine,
    broken,
    open_plant,
    traces_of_machine,
    traces_of_test,
)
from attack import Attack
from attacks import GROUPS
from hidden_memory import HIDDEN_MEMORY
from landlock_gaps import OPEN_ALONE
from machine_attacks import ALLOWED_INSIDE, NEIGHBOUR, OWN
from neighbours import Neighbour
from python_forgeries import EXPECTED, FUNCTIONS, PROGRAMS
from simulated import start_on

from mettle.sandbox import CallTest, MachineConfig, MachinePool, SandboxConfig, SandboxPool, StdioTest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "sandbox-suite.md"
LIMIT_MB = 64
MACHINE_GROUP = "Machines only"
ALONE_GROUP = "Where there are no namespaces"
NEIGHBOUR_GROUP = "From one machine to another"
Row = dict[str, Any]
Traces = Callable[[Attack], Awaitable[list[str]]]


async def examine(is_root: bool) -> dict[str, Any]:
    """Every attack on every kind of sandbox, with and without isolation."""
    rows: dict[str, Row] = {}
    memory: dict[str, dict[str, int]] = {}
    forged: dict[str, dict[str, bool]] = {}
    for backend, state in (("zygote", "on"), ("unsafe", "off")):
        async with SandboxPool(SandboxConfig(backend=backend, timeout_s=2.0, memory_mb=256)) as pool:
            for attack in [attack for attacks in GROUPS.values() for attack in attacks]:
                row = rows.setdefault(attack.name, {})
                row[f"test_{state}"] = await _verdict(attack, state, _as_test(pool), is_root=is_root)
            for name in (*PROGRAMS, *FUNCTIONS):
                forged.setdefault(name, {})[state] = await _is_forged(pool, name)
        async with MachinePool(SandboxConfig(backend=backend)) as machines:
            for attack in [*(a for attacks in GROUPS.values() for a in attacks), *OWN]:
                row = rows.setdefault(attack.name, {})
                if attack.name in ALLOWED_INSIDE:
                    row[f"machine_{state}"] = f"allowed: {ALLOWED_INSIDE[attack.name]}"
                else:
                    row[f"machine_{state}"] = await _verdict(attack, state, _in_machine(machines), is_root=is_root)
            for attack in NEIGHBOUR:
                verdict = await _verdict(attack, state, _at_neighbour(machines), is_root=is_root)
                rows.setdefault(attack.name, {})[f"machine_{state}"] = verdict
            for name in HIDDEN_MEMORY:
                memory.setdefault(name, {})[state] = await _hidden_mb(machines, name)
    return {"rows": rows, "memory": memory, "forged": forged, "alone": await examine_alone()}


async def examine_alone() -> dict[str, str]:
    """Every attack on a test that has no namespaces, under the filter that Docker has by default."""
    interpreter = (ordinary.interpreter() or "") if os.geteuid() == 0 else ""
    pool = SandboxPool(SandboxConfig(require="landlock-only", timeout_s=2.0, memory_mb=256))
    await start_on(pool, "docker", interpreter)
    rows = {}
    for attack in [attack for attacks in GROUPS.values() for attack in attacks]:
        verdict = await _verdict(attack, "on", _as_test(pool), is_root=os.geteuid() == 0)
        is_open = verdict.startswith("NOT") and attack.name in OPEN_ALONE
        rows[attack.name] = f"open: {OPEN_ALONE[attack.name]}" if is_open else verdict
    await pool.close()
    return rows


async def _verdict(attack: Attack, state: str, traces: Traces, *, is_root: bool) -> str:
    if state == "off" and attack.is_harmful:
        return f"not run: {attack.off}"
    found = await traces(attack)
    if state == "on":
        return f"NOT CONTAINED: {'; '.join(found)}" if found else "contained"
    if found:
        return "succeeds"
    return f"stopped: {attack.why_not_off(is_root=is_root) or 'by what the backend without isolation does, too'}"


def _as_test(pool: SandboxPool) -> Traces:
    async def traces(attack: Attack) -> list[str]:
        with tempfile.TemporaryDirectory(dir="/tmp") as directory, open_plant(Path(directory)) as planted:
            return traces_of_test(await attack_as_test(pool, attack, planted), planted)

    return traces


def _in_machine(machines: MachinePool) -> Traces:
    async def traces(attack: Attack) -> list[str]:
        with tempfile.TemporaryDirectory(dir="/tmp") as directory, open_plant(Path(directory)) as planted:
            return await traces_of_machine(machines, attack, planted)

    return traces


def _at_neighbour(machines: MachinePool) -> Traces:
    async def traces(attack: Attack) -> list[str]:
        neighbour = await Neighbour.move_in(await machines.create())
        machine = await machines.create(MACHINE_LIMITS)
        result = await attack_from_machine(machine, attack, neighbour.described)
        found = [result.stdout.strip()] if "BREACH" in result.stdout else []
        found += [] if await neighbour.is_unharmed() else ["the other machine was harmed"]
        await machine.delete()
        await neighbour.move_out()
        return found + broken(result.stderr)

    return traces


async def _is_forged(pool: SandboxPool, name: str) -> bool:
    if name in PROGRAMS:
        return (await pool.judge(PROGRAMS[name], [StdioTest("", EXPECTED)])).has_passed
    return (await pool.judge(FUNCTIONS[name], [CallTest("add", (2, 3), expected=5)])).has_passed


async def _hidden_mb(machines: MachinePool, name: str) -> int:
    machine = await machines.create(MachineConfig(memory_mb=LIMIT_MB, disk_mb=16))
    await machine.upload("hidden.py", HIDDEN_MEMORY[name])
    result = await machine.exec(["python3", "hidden.py"], timeout_s=20)
    await machine.delete()
    return int((result.stdout.split() or ["0"])[-1])


def page(runs: dict[str, dict[str, Any]]) -> str:
    """The page of these runs, by who started them; the tables are those of the first."""
    first = next(iter(runs.values()))
    lines = [
        "# The safety suite",
        "",
        "<!-- Written by `python tests/sandbox/report.py` from a real run. Do not edit. -->",
        "",
        "Named attacks on the [sandbox](../explanation/sandbox.md), each run as a solution that is judged and as a program",
        "in a machine, with isolation and without (backend `unsafe`). Without it an attack must succeed, which proves that",
        "its check can fail; where it does not, the table says why. `tests/sandbox/journeys/test_attacks.py` and",
        f"`test_machine_attacks.py` run them one by one. This run: Linux {platform.release()} {platform.machine()}.",
        "",
        "| started by | tests, on | tests, off | machines, on | machines, off |",
        "|---|---|---|---|---|",
    ]
    for user, run in runs.items():
        lines.append(f"| {user} | " + " | ".join(_totals(run, use, state) for use in _USES for state in _STATES) + " |")
    number = 0
    for title, attacks in {**GROUPS, MACHINE_GROUP: OWN, NEIGHBOUR_GROUP: NEIGHBOUR}.items():
        lines += ["", f"## {title}", "", f"Afterwards: {attacks[0].must}.", ""]
        lines += ["| | attack | test, on | test, off | machine, on | machine, off |", "|---|---|---|---|---|---|"]
        for attack in attacks:
            number += 1
            cells = [first["rows"][attack.name].get(f"{use}_{state}", "-") for use in _USES for state in _STATES]
            lines.append(f"| {number} | {attack.name} | {' | '.join(cells)} |")
    return (
        "\n".join([*lines, *_memory_lines(first["memory"]), *_forgery_lines(first["forged"]), *alone_lines(runs)])
        + "\n"
    )


def alone_lines(runs: dict[str, dict[str, Any]]) -> list[str]:
    """The part of the page about the grade without namespaces."""
    lines = ["", f"## {ALONE_GROUP}", ""]
    lines += ["The same attacks on tests under the filter that Docker has by default, which allows no namespaces, with"]
    lines += [
        '`SandboxConfig(require="landlock-only")`. What is open, and why that is accepted, is said; each column is a'
    ]
    lines += ["run by that user.", ""]
    lines += [f"| attack | {' | '.join(runs)} |", "|---" * (len(runs) + 1) + "|"]
    for name in next(iter(runs.values()))["alone"]:
        lines.append(f"| {name} | {' | '.join(run['alone'][name] for run in runs.values())} |")
    totals = [f"{user}: {sum(cell == 'contained' for cell in run['alone'].values())}" for user, run in runs.items()]
    return [*lines, "", f"Contained of {len(next(iter(runs.values()))['alone'])}, by {'; by '.join(totals)}."]


_USES = ("test", "machine")
_STATES = ("on", "off")


def _totals(run: dict[str, Any], use: str, state: str) -> str:
    verdicts = [row[f"{use}_{state}"] for row in run["rows"].values() if f"{use}_{state}" in row]
    counted = [verdict for verdict in verdicts if not verdict.startswith("allowed")]
    word = "contained" if state == "on" else "succeeds"
    return (
        f"{sum(verdict == word for verdict in counted)} of {len(counted)} {'contained' if state == 'on' else 'succeed'}"
    )


def _memory_lines(memory: dict[str, dict[str, int]]) -> list[str]:
    lines = ["", "## Memory that no process's size shows", ""]
    lines += [
        f"Afterwards: a machine of {LIMIT_MB} MB was held to it and goes on. The most that it held, in MB, of 320 that it"
    ]
    lines += [
        "tried for. Sockets fill at gigabytes a second, and process 1 looks every 4 to 20 ms; what is taken between two"
    ]
    lines += ["looks is included.", ""]
    lines += ["| way | on | off |", "|---|---|---|"]
    return [*lines, *(f"| {name} | {held['on']} | {held['off']} |" for name, held in memory.items())]


def _forgery_lines(forged: dict[str, dict[str, bool]]) -> list[str]:
    lines = ["", "## Forged results", ""]
    lines += [
        "Afterwards: the verdict is `wrong` or `error`. Results are compared outside the process with isolation and"
    ]
    lines += ["without, so that neither lets one through.", "", "| forgery | on | off |", "|---|---|---|"]
    words = {True: "PASSED", False: "not passed"}
    return [*lines, *(f"| {name} | {words[seen['on']]} | {words[seen['off']]} |" for name, seen in forged.items())]


def uncontained(run: dict[str, Any]) -> list[str]:
    """What got through where it must not."""
    found = [f"{name}: {text}" for name, row in run["rows"].items() for text in row.values() if text.startswith("NOT")]
    found += [f"{name}, landlock only" for name, text in run["alone"].items() if text.startswith("NOT")]
    return found + [f"forged: {name}" for name, seen in run["forged"].items() if seen["on"]]


def main() -> int:
    """Run, and print or write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print what was found")
    is_json = parser.parse_args().json
    is_root = os.geteuid() == 0
    runs = {"root" if is_root else "an ordinary user": asyncio.run(examine(is_root))}
    executable = None if is_json else ordinary.interpreter()
    if executable is not None:
        run = ordinary.run(executable, [str(Path(__file__).resolve()), "--json"], timeout_s=600)
        runs["an ordinary user"] = json.loads(run.stdout)
    if is_json:
        sys.stdout.write(json.dumps(next(iter(runs.values()))))
    else:
        PAGE.write_text(page(runs), encoding="utf-8")
        sys.stdout.write(f"wrote {PAGE}\n")
    failures = [text for run in runs.values() for text in uncontained(run)]
    sys.stderr.write("".join(f"{text}\n" for text in failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parent))
    sys.exit(main())
