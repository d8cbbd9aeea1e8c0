"""What keeping results costs: CPU of saving a rollout beside running it, and of reading ten thousand back.

The same environment and mock model run with results in memory and with results on disk, interleaved in one run; a
rollout is about 4.6 kB. Saving saves the memory, and with it work of the garbage collector, so the two differ by less
than writing costs; that is `append_ms`, by itself. The second half of the run is given too: a cost that grows with what
was saved before would show there.

Run: `python benchmarks/eval_results.py [--num 10000] [--json FILE]`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mettle.envs as vf
from mettle.clients.base import Client
from mettle.evals.export.page import write_page
from mettle.evals.folder import EvaluationFolder
from mettle.evals.reader import EvaluationReader
from mettle.records.messages import Response, ResponseMessage, Usage
from mettle.records.tasks import GroupRecord, TaskDraw
from mettle.storage.evals import EvalPlan

NUM_REPEATS = 3
ROLLOUTS_PER_EXAMPLE = 4


class Mock(Client):
    """Answers at once, with 3 kB."""

    base_url = "http://mock/v1"

    async def get_response(self, prompt: Any, model: str, *_: Any, **__: Any) -> Response:
        message = ResponseMessage(content="lorem ipsum " * 250, finish_reason="stop", is_truncated=False)
        usage = Usage(prompt_tokens=10, completion_tokens=300, total_tokens=310)
        return Response(id="r", created=0, model=model, usage=usage, message=message)


def even(answer: str) -> float:
    """Half of the tasks are solved."""
    return float(int(answer) % 2)


def run(num: int, folder: Path | None) -> dict[str, float]:
    """CPU milliseconds a rollout, over all of them and over the second half."""
    rows = [{"question": f"what is {i}? " * 40, "answer": str(i)} for i in range(num // ROLLOUTS_PER_EXAMPLE)]
    env = vf.SingleTurnEnv(eval_dataset=rows, rubric=vf.Rubric([even]), env_id="toy")
    options: dict[str, Any] = {"results_path": folder, "keep_outputs": False} if folder is not None else {}
    halfway = [0.0]
    num_seen = [0]

    def see(_: Any) -> None:
        num_seen[0] += 1
        if num_seen[0] == num // 2:
            halfway[0] = time.process_time()

    before = time.process_time()
    asyncio.run(
        env.evaluate(
            Mock(), "m", rollouts_per_example=ROLLOUTS_PER_EXAMPLE, max_concurrent=64, on_rollout=see, **options
        )
    )
    ended = time.process_time()
    return {"cpu_ms": (ended - before) / num * 1e3, "second_half_cpu_ms": (ended - halfway[0]) / (num / 2) * 1e3}


def timed(what: Callable[[], Any]) -> float:
    """CPU milliseconds."""
    before = time.process_time()
    what()
    return (time.process_time() - before) * 1e3


def read_back(folder: Path) -> dict[str, float]:
    """CPU milliseconds of what a viewer does."""
    reader = EvaluationReader(folder)
    return {
        "append_ms": append_all(reader) / len(reader),
        "index_ms": timed(lambda: EvaluationReader(folder)),
        "one_row_ms": timed(lambda: reader.row(len(reader) - 1)),
        "search_ms": timed(lambda: list(reader.search("is 77?"))),
        "stats_ms": timed(reader.stats),
        "page_ms": timed(lambda: write_page(reader, folder / "page.html")),
        "megabytes": (folder / "results.jsonl").stat().st_size / 1e6,
    }


def append_all(reader: EvaluationReader) -> float:
    """CPU milliseconds of keeping all rollouts in another store, 64 side by side."""
    records = [record for _, record in reader.records()]
    folder = EvaluationFolder(reader.path / "again")
    folder.begin(EvalPlan("eval", "toy", len(records), len(records)))
    keeper = folder.keeper()

    async def keep() -> None:
        for start in range(0, len(records), 64):
            together = records[start : start + 64]
            draws = [TaskDraw(-1, "toy", record.uid, 0, record.example_id) for record in together]
            groups = [GroupRecord(draw, 0, (record,)) for draw, record in zip(draws, together, strict=True)]
            await asyncio.gather(*map(keeper.keep, groups))

    spent = timed(lambda: asyncio.run(keep()))
    folder.close()
    return spent


def medians(measured: list[dict[str, float]]) -> dict[str, float]:
    """The median of each figure."""
    return {name: statistics.median(row[name] for row in measured) for name in measured[0]}


def main() -> None:
    """Measure, print a table, write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=10_000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    running, saving, reading = [], [], []
    for _ in range(NUM_REPEATS):
        running.append(run(args.num, None))
        with tempfile.TemporaryDirectory() as name:
            saving.append(run(args.num, Path(name)))
            reading.append(read_back(Path(name)))
    table = {"in memory": medians(running), "on disk": medians(saving), "files": medians(reading)}
    for name, figures in table.items():
        print(f"{name:20}" + "  ".join(f"{key} {value:.3g}" for key, value in figures.items()))
    if args.json:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        about = {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
        about |= {"commit": commit.stdout.strip(), "num": args.num, "repeats": NUM_REPEATS}
        args.json.write_text(json.dumps({**about, "median": table}, indent=2) + "\n")


if __name__ == "__main__":
    main()
