"""How smooth the evaluation browser is: opening an evaluation, pressing keys in it, and doing so while it searches.

Two evaluations of five-turn rollouts in one run, of which one is a hundred times smaller: what a key costs should not
depend on the size. The browser runs without a terminal, at 140 by 40 cells; a key counts until its frame is drawn.
The numbers that matter are the seconds to open ten thousand rollouts and the slowest key while a search runs.

Run: `python benchmarks/tui_browse.py [--rollouts 10000] [--json FILE]`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from mettle.tui.app import EvaluationBrowser
from mettle.tui.screens.run import RunScreen

NUM_REPEATS = 3
KEYS = ("down", "down", "pagedown", "end", "home", "s", "S", "enter", "right", "r", "escape", "escape")
WORDS = "each number is added to the sum and the digits are checked once more with the tool before the answer"


def write_evaluation(folder: Path, num_rollouts: int) -> int:
    """Rollouts of five turns with tool calls, of about 4 KB each; the size of the file."""
    folder.mkdir(parents=True)
    about = {"env_id": "bench", "model": "m", "num_examples": num_rollouts // 4, "rollouts_per_example": 4}
    (folder / "metadata.json").write_text(json.dumps(about))
    call = json.dumps({"id": "c", "name": "add", "arguments": '{"a": 1, "b": 2}'})
    turn = [
        {"role": "assistant", "content": WORDS * 4, "reasoning_content": WORDS, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": WORDS},
    ]
    row: dict[str, Any] = {"prompt": [{"role": "user", "content": WORDS * 3}], "completion": turn * 5, "error": None}
    row["token_usage"] = {"input_tokens": 100.0, "output_tokens": 500.0}
    with (folder / "results.jsonl").open("w") as file:
        for index in range(num_rollouts):
            reward = index % 5 / 4
            row.update(
                example_id=index // 4, reward=reward, metrics={"right": reward}, timing={"total": index % 7 + 0.5}
            )
            file.write(json.dumps(row) + "\n")
    return (folder / "results.jsonl").stat().st_size


async def measure(folder: Path) -> dict[str, float]:
    """Open, press each key, press keys while a search reads everything."""
    wall, work = time.perf_counter(), time.process_time()
    app = EvaluationBrowser(folder.parents[3], folder)
    async with app.run_test(size=(140, 40)) as pilot:
        screen = app.screen
        assert isinstance(screen, RunScreen), "the browser opens on the run"
        await pilot.pause()
        await app.workers.wait_for_complete()
        await pilot.pause()
        assert screen.run is not None, "it has been read"
        found = {"open_s": time.perf_counter() - wall, "open_cpu_s": time.process_time() - work}
        keys = [await _press(pilot, key) for key in KEYS]
        began = time.perf_counter()
        screen.search("not in there")
        searching = [await _press(pilot, "down")]
        while any(worker.group == "search" and worker.is_running for worker in app.workers):
            searching.append(await _press(pilot, "down"))
        found["search_s"] = time.perf_counter() - began
    found |= {"key_ms": 1e3 * statistics.median(keys), "slowest_key_ms": 1e3 * max(keys)}
    found |= {"searching_key_ms": 1e3 * statistics.median(searching), "slowest_searching_key_ms": 1e3 * max(searching)}
    return found


def medians(measured: list[dict[str, float]]) -> dict[str, float]:
    """The median of each figure."""
    return {name: statistics.median(row[name] for row in measured) for name in measured[0]}


async def _press(pilot: Any, key: str) -> float:
    began = time.perf_counter()
    pilot.app.simulate_key(key)
    await pilot.pause(0)
    return time.perf_counter() - began


def main() -> None:
    """Measure both, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    cells: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as root:
        for number in (max(4, options.rollouts // 100), options.rollouts):
            folder = Path(root) / str(number) / "outputs" / "evals" / "bench--m" / "run00001"
            size = write_evaluation(folder, number)
            runs = [asyncio.run(measure(folder)) for _ in range(NUM_REPEATS)]
            cells[str(number)] = {"file_mb": size / 1e6, **medians(runs)}
    names = list(next(iter(cells.values())))
    print(f"{'rollouts':>10} " + " ".join(f"{name:>24}" for name in names))
    for number, cell in cells.items():
        print(f"{number:>10} " + " ".join(f"{cell[name]:>24.3f}" for name in names))
    if options.json:
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        about = {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
        about |= {"commit": commit.stdout.strip(), "repeats": NUM_REPEATS, "peak_mb": round(peak_mb, 1)}
        options.json.write_text(json.dumps({**about, "median": cells}, indent=2) + "\n")


if __name__ == "__main__":
    main()
