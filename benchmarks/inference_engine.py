"""How many tokens a CPU-second does the embedded engine decode, and what does HTTP add?

Two questions, one run: decoding at several batch sizes against `transformers` generate (same weights, same prompts,
same run, interleaved, so the ratio holds on a busy machine), and 256 completions of 8 tokens as 16 group requests, once
called directly and once through the server (CPU-seconds of the server's process and of the client's).

    PYTHONPATH=src OMP_NUM_THREADS=1 python benchmarks/inference_engine.py [--quick] [--json FILE]

The number that matters is the ratio. Wall time says little on shared cores, so CPU time is what is counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import aiohttp
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from mettle.inference.engine.architecture import shape_from_config
from mettle.inference.engine.decoder import Decoder
from mettle.inference.engine.limits import Limits
from mettle.inference.engine.local import run_requests
from mettle.inference.engine.protocol import GenerationRequest
from mettle.inference.engine.scheduler import Scheduler
from mettle.inference.engine.weights import fuse
from mettle.records.sampling import SamplingParams

PROMPT_LENGTH, NUM_NEW = 20, 64
GROUPS, GROUP_SIZE, SHORT = 16, 16, 8


def make_model() -> Qwen3ForCausalLM:
    """0.83 M parameters: 4 layers, hidden 128, head size 32."""
    config = Qwen3Config(
        vocab_size=264,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        rope_parameters={"rope_theta": 10_000.0, "rope_type": "default"},
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config).eval()


def make_scheduler(model: Qwen3ForCausalLM, max_slots: int = 256) -> Scheduler:
    shape = shape_from_config(model.config.to_dict())
    weights = fuse(shape, model.state_dict(), torch.device("cpu"), torch.float32)
    return Scheduler(Decoder(shape, weights, 512), Limits(max_slots, 512), seed=0)


def cpu_seconds(work: Callable[[], Any], repeats: int = 1) -> float:
    """CPU time of all threads of this process."""
    started = time.process_time()
    for _ in range(repeats):
        work()
    return time.process_time() - started


def decode_with_engine(scheduler: Scheduler, prompts: list[list[int]]) -> None:
    params = SamplingParams(max_tokens=NUM_NEW, ignore_eos=True)
    run_requests(scheduler, [GenerationRequest(str(i), prompt, params) for i, prompt in enumerate(prompts)])


def decode_with_transformers(model: Qwen3ForCausalLM, prompts: list[list[int]]) -> None:
    with torch.inference_mode():
        model.generate(
            torch.tensor(prompts),
            attention_mask=torch.ones(len(prompts), PROMPT_LENGTH, dtype=torch.long),
            max_new_tokens=NUM_NEW,
            min_new_tokens=NUM_NEW,
            do_sample=True,
            top_k=0,
            pad_token_id=0,
        )


def measure_decoding(model: Qwen3ForCausalLM, batches: list[int], rounds: int) -> list[dict[str, Any]]:
    scheduler = make_scheduler(model)
    rows = []
    for batch in batches:
        prompts = torch.randint(0, 256, (batch, PROMPT_LENGTH)).tolist()
        decode_with_engine(scheduler, prompts)
        decode_with_transformers(model, prompts)
        repeats = max(1, 16 // batch)  # a measurement of a few milliseconds would be noise
        ours, theirs = [], []
        for _ in range(rounds):
            ours.append(cpu_seconds(partial(decode_with_engine, scheduler, prompts), repeats))
            theirs.append(cpu_seconds(partial(decode_with_transformers, model, prompts), repeats))
        tokens = batch * NUM_NEW * repeats
        rows.append(
            {
                "batch": batch,
                "engine_tokens_per_cpu_s": [round(tokens / t) for t in spread(ours)],
                "transformers_tokens_per_cpu_s": [round(tokens / t) for t in spread(theirs)],
                "ratio": round(statistics.median(theirs) / statistics.median(ours), 2),
            }
        )
    return rows


def spread(values: list[float]) -> tuple[float, float, float]:
    """Least, median and greatest."""
    return min(values), statistics.median(values), max(values)


def measure_direct(model: Qwen3ForCausalLM, rounds: int) -> list[float]:
    """CPU-seconds of 16 groups of 16 completions of 8 tokens, called in this process."""
    scheduler = make_scheduler(model)
    params = SamplingParams(max_tokens=SHORT, ignore_eos=True)
    prompts = torch.randint(0, 256, (GROUPS, PROMPT_LENGTH)).tolist()
    requests = [GenerationRequest(str(i), prompt, params, GROUP_SIZE) for i, prompt in enumerate(prompts)]
    run_requests(scheduler, requests)
    return [cpu_seconds(lambda: run_requests(scheduler, requests)) for _ in range(rounds)]


def measure_http(model: Qwen3ForCausalLM, rounds: int) -> dict[str, list[float]]:
    """The same through a server process: its CPU-seconds and the client's."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model.save_pretrained(folder / "model")
        write_tokenizer(folder / "model")
        (folder / "config.json").write_text(json.dumps({"model": str(folder / "model"), "max_model_len": 512}))
        ready = folder / "ready.json"
        process = subprocess.Popen(
            [sys.executable, "-m", "mettle.inference", "--config", folder / "config.json", "--ready-file", ready]
        )
        try:
            while not ready.exists():
                assert process.poll() is None, "the server ended before it was ready"
                time.sleep(0.05)
            return asyncio.run(drive(json.loads(ready.read_text())["base_url"], process.pid, rounds))
        finally:
            process.terminate()
            process.wait()


async def drive(base_url: str, pid: int, rounds: int) -> dict[str, list[float]]:
    prompts = torch.randint(0, 256, (GROUPS, PROMPT_LENGTH)).tolist()
    server, client, wall = [], [], []
    async with aiohttp.ClientSession() as session:

        async def ask(prompt: list[int]) -> None:
            body = {"prompt_ids": prompt, "n": GROUP_SIZE, "max_tokens": SHORT, "ignore_eos": True}
            async with session.post(f"{base_url}/generate", data=json.dumps(body)) as response:
                answer = json.loads(await response.read())
            assert len(answer["choices"]) == GROUP_SIZE

        for _ in range(rounds + 1):
            before, mine, started = process_cpu_s(pid), time.process_time(), time.perf_counter()
            async with asyncio.TaskGroup() as group:
                for prompt in prompts:
                    group.create_task(ask(prompt))
            server.append(process_cpu_s(pid) - before)
            client.append(time.process_time() - mine)
            wall.append(time.perf_counter() - started)
    return {"server_cpu_s": server[1:], "client_cpu_s": client[1:], "wall_s": wall[1:]}


def process_cpu_s(pid: int) -> float:
    """User and system time of another process, in steps of a clock tick (10 ms)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE(vocab={chr(0x100 + i): i for i in range(264)}, merges=[])).save(str(folder / "tokenizer.json"))


def print_table(result: dict[str, Any]) -> None:
    out = sys.stdout.write
    out(f"{'batch':>6} {'engine':>10} {'transformers':>13} {'ratio':>6}   (median tokens per CPU-second)\n")
    for row in result["decoding"]:
        ours, theirs = row["engine_tokens_per_cpu_s"][1], row["transformers_tokens_per_cpu_s"][1]
        out(f"{row['batch']:>6} {ours:>10,} {theirs:>13,} {row['ratio']:>6}\n")
    out(f"{GROUPS} groups of {GROUP_SIZE} x {SHORT} tokens, median CPU-seconds:\n")
    out(f"  direct       {result['direct_cpu_s'][1]:.3f}\n")
    for key, values in result["http"].items():
        out(f"  http {key:<13} {values[1]:.3f}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small batches and one round: does it run at all")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = make_model()
    rounds = 1 if arguments.quick else 3
    result = {
        "question": "tokens per CPU-second of the embedded engine against transformers generate, and the cost of HTTP",
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "parameters": sum(p.numel() for p in model.parameters()),
        "rounds": rounds,
        "decoding": measure_decoding(model, [1, 16] if arguments.quick else [1, 16, 64, 256], rounds),
        "direct_cpu_s": [round(t, 4) for t in spread(measure_direct(model, 3 * rounds))],
        "http": {k: [round(t, 4) for t in spread(v)] for k, v in measure_http(model, 5 * rounds).items()},
    }
    print_table(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
