"""What do eight adapters in one batch cost, against one, and against the base alone?

One model with random weights (hidden 512, 4 layers), adapters of rank 16 on all linear modules, the same prompts. Three
cases by turns in the same run, so that the ratio holds on a busy machine: all rows under the base, all under one
adapter, and the rows dealt out to eight. Once with long prompts and few tokens, once the other way round.

    PYTHONPATH=src OMP_NUM_THREADS=1 python benchmarks/adapters.py [--quick] [--json FILE]

The number that matters is eight against one, in CPU-seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from mettle.inference.engine.adapter_files import AdapterFile, LowRankPair
from mettle.inference.engine.adapters import fit_adapter
from mettle.inference.engine.architecture import shape_from_config
from mettle.inference.engine.decoder import Decoder
from mettle.inference.engine.limits import Limits
from mettle.inference.engine.local import run_requests
from mettle.inference.engine.protocol import GenerationRequest
from mettle.inference.engine.scheduler import Scheduler
from mettle.inference.engine.weights import fuse
from mettle.records.sampling import SamplingParams

RANK, NUM_ADAPTERS = 16, 8
WORKLOADS = {"decoding": (16, 48), "prompts": (192, 4)}
"""Tokens of a prompt and of its completion."""


def make_model() -> Qwen3ForCausalLM:
    """14 M parameters: 4 layers, hidden 512, head size 64."""
    config = Qwen3Config(
        vocab_size=2048,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        rope_parameters={"rope_theta": 10_000.0, "rope_type": "default"},
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config).eval()


def make_adapter(model: Qwen3ForCausalLM) -> AdapterFile:
    """Random factors for every linear module but the head."""
    modules = [(n, m) for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]
    pairs = {
        name: LowRankPair(torch.randn(RANK, m.in_features) * 0.02, torch.randn(m.out_features, RANK) * 0.02)
        for name, m in modules
    }
    return AdapterFile({"r": RANK}, 1.0, pairs)


def make_scheduler(model: Qwen3ForCausalLM) -> Scheduler:
    cpu = torch.device("cpu")
    shape = shape_from_config(model.config.to_dict())
    decoder = Decoder(shape, fuse(shape, model.state_dict(), cpu, torch.float32), 512)
    scheduler = Scheduler(decoder, Limits(256, 512), seed=0)
    for number in range(NUM_ADAPTERS):
        weights = fit_adapter(shape, make_adapter(model), cpu, torch.float32)
        scheduler.put_adapter(f"adapter-{number}", Path(), 0, weights)
    return scheduler


def requests_of(batch: int, workload: str, num_adapters: int) -> list[GenerationRequest]:
    """Prompts that nobody has computed before, dealt out to the adapters; none is the base."""
    prompt_length, num_new = WORKLOADS[workload]
    params = SamplingParams(max_tokens=num_new, ignore_eos=True)
    prompts = torch.randint(0, 2048, (batch, prompt_length)).tolist()
    plain = [GenerationRequest(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    if not num_adapters:
        return plain
    return [replace(request, adapter=f"adapter-{i % num_adapters}") for i, request in enumerate(plain)]


def measure(scheduler: Scheduler, workload: str, batch: int, rounds: int) -> dict[str, Any]:
    cases: dict[int, list[float]] = {0: [], 1: [], NUM_ADAPTERS: []}
    for number in range(rounds + 1):
        for num_adapters, seconds in cases.items():
            wanted = requests_of(batch, workload, num_adapters)
            started = time.process_time()
            run_requests(scheduler, wanted)
            if number:  # the first round warms up
                seconds.append(time.process_time() - started)
    base, one, eight = (statistics.median(seconds) for seconds in cases.values())
    return {
        "workload": workload,
        "batch": batch,
        "base_cpu_s": round(base, 3),
        "one_cpu_s": round(one, 3),
        "eight_cpu_s": round(eight, 3),
        "one_to_base": round(one / base, 2),
        "eight_to_one": round(eight / one, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one batch and one round: does it run at all")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = make_model()
    scheduler = make_scheduler(model)
    rounds, batches = (1, [16]) if arguments.quick else (5, [8, 32, 128])
    result = {
        "question": f"CPU-seconds of {NUM_ADAPTERS} adapters of rank {RANK} in one batch against one and the base",
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "parameters": sum(p.numel() for p in model.parameters()),
        "rounds": rounds,
        "rows": [measure(scheduler, workload, batch, rounds) for workload in WORKLOADS for batch in batches],
    }
    columns = list(result["rows"][0])
    sys.stdout.write(" ".join(f"{name:>13}" for name in columns) + "\n")
    for row in result["rows"]:
        sys.stdout.write(" ".join(f"{row[name]!s:>13}" for name in columns) + "\n")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
