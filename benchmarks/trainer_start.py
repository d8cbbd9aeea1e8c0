"""How much memory the ranks of a trainer take to read a model: `python benchmarks/trainer_start.py [FOLDER]`.

A model of about 100 million parameters (Qwen3's architecture, tied embeddings, random weights in files of float32 and
of bfloat16, which are widened) is read by 1, 2 and 4 gloo ranks in processes of their own, each way in turns: every
rank reads the whole model and keeps its part (`whole`), or each reads its own part (`parts`). Of each rank the
peak of its resident memory is told as the kernel counts it, less what it had before it began to read, in MB, and the
processor time of reading.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from mettle.trainer.loading import load_policy, shard_policy
from mettle.trainer.world import join_world

RANKS = (1, 2, 4)
ROUNDS = 1
SHAPE = {
    "vocab_size": 32_768, "hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 2048,
    "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": True,
}  # fmt: skip


def write_model(folder: Path, stored: str) -> int:
    """Random weights; returns how many numbers they are."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    network = Qwen3ForCausalLM(Qwen3Config(**SHAPE, dtype="float32"))
    network.to(getattr(torch, stored)).save_pretrained(folder)
    return sum(parameter.numel() for parameter in network.parameters())


def resident_mb(field: str) -> float:
    """VmRSS or VmHWM of this process."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) / 1000


def read_as_rank(folder: Path, way: str) -> None:
    """One rank: read, and say what it took."""
    torch.set_num_threads(1)
    with join_world("cpu") as world:
        warm = torch.nn.Linear(8, 8)  # imports and pools that any model needs
        warm(torch.ones(1, 8)).sum().backward()
        world.gather(0)
        before, cpu = resident_mb("VmRSS"), time.process_time()
        policy = load_policy(folder, world, dtype=torch.float32, is_whole=way == "whole")
        if way == "whole":
            shard_policy(policy, world)
        took = {"peak_mb": resident_mb("VmHWM") - before, "cpu_s": time.process_time() - cpu}
        found = world.gather(took)
        if world.is_main:
            print(json.dumps(found))


def measure(folder: Path, way: str, ranks: int) -> list[dict[str, float]]:
    """What each rank took."""
    with tempfile.TemporaryDirectory() as scratch:
        meeting = Path(scratch) / "attempt" / "0" / "error.json"
        meeting.parent.mkdir(parents=True)
        sizes = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "TORCHELASTIC_ERROR_FILE": str(meeting)}
        command = [sys.executable, __file__, str(folder), way]
        started = [
            subprocess.Popen(
                command, env={**os.environ, **sizes, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE, text=True,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        said = [process.communicate()[0] for process in started]
    found: list[dict[str, float]] = json.loads(said[0].splitlines()[-1])
    return found


def main(folder: Path) -> None:
    """Print the table, and keep it as JSON."""
    rows = []
    for stored, ranks in itertools.product(("float32", "bfloat16"), RANKS):
        model = folder / stored
        number = write_model(model, stored)
        whole_mb = number * 4 / 1e6
        tries: dict[str, list[list[dict[str, float]]]] = {"whole": [], "parts": []}
        for _ in range(ROUNDS):
            for way, kept in tries.items():
                kept.append(measure(model, way, ranks))
        row: dict[str, Any] = {"stored": stored, "ranks": ranks, "share_mb": round(whole_mb / ranks, 1)}
        for way, kept in tries.items():
            row[f"{way}_peak_mb"] = round(max(rank["peak_mb"] for found in kept for rank in found), 1)
            row[f"{way}_cpu_s"] = round(min(sum(rank["cpu_s"] for rank in found) for found in kept), 2)
        rows.append(row)
        print(json.dumps(row), flush=True)
    results = {"parameters": number, "rounds": ROUNDS, "torch": torch.__version__, "rows": rows}
    (Path(__file__).parent / "results" / "trainer-start.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        read_as_rank(Path(sys.argv[1]), sys.argv[2])
    elif len(sys.argv) == 2:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(Path(scratch))
