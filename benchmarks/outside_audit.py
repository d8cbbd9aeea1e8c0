"""What does it cost to compute again what a worker from outside has sampled?

    PYTHONPATH=src OMP_NUM_THREADS=1 python benchmarks/outside_audit.py [--quick] [--json FILE]

One process, CPU time of one thread, the three of each row measured in turns: sampling groups of 8; the forward pass
over prompts and completions, which whoever checks commitments of hidden states needs too; and the whole check, which
draws each token again from that pass. The numbers that matter are the ratios to sampling.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from mettle.inference.engine.architecture import shape_from_config
from mettle.inference.engine.decoder import Decoder
from mettle.inference.engine.limits import Limits
from mettle.inference.engine.local import run_requests
from mettle.inference.engine.protocol import GenerationRequest
from mettle.inference.engine.scheduler import Scheduler
from mettle.inference.engine.weights import fuse, tokens_of_a_step
from mettle.inference.outside.auditor import shared_prompts
from mettle.inference.outside.checks import AUDIT_TOLERANCES, AuditBounds, audit_fault, audit_request
from mettle.records.sampling import SamplingParams

GROUP, LONGEST = 8, 1024
SHAPES = {"0.8 M": (128, 384, 4, 4, 264), "7 M": (256, 768, 8, 8, 4096)}
"""Hidden size, inner size, layers, heads, vocabulary."""
BOUNDS = AuditBounds(AUDIT_TOLERANCES["float32"])


class Row(NamedTuple):
    """Sampling in milliseconds a token; the pass and the check as parts of that."""

    completions: int
    prompt_tokens: int
    completion_tokens: int
    sampling_ms: float
    pass_to_sampling: float
    check_to_sampling: float

    def __str__(self) -> str:
        figures = f"{self.sampling_ms:.3f} | {self.pass_to_sampling:.2f} | {self.check_to_sampling:.2f} |"
        return f"{self.completions} | {self.prompt_tokens} | {self.completion_tokens} | {figures}"


def make_engine(shape: tuple[int, int, int, int, int]) -> Scheduler:
    """An engine with random weights."""
    hidden, inner, layers, heads, vocabulary = shape
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads // 2, head_dim=hidden // heads,
        max_position_embeddings=LONGEST, tie_word_embeddings=True,
        rope_parameters={"rope_theta": 10_000.0, "rope_type": "default"},
    )  # fmt: skip
    found = shape_from_config(config.to_dict())
    weights = fuse(found, Qwen3ForCausalLM(config).eval().state_dict(), torch.device("cpu"), torch.float32)
    decoder = Decoder(found, weights, LONGEST)
    return Scheduler(decoder, Limits(256, LONGEST, tokens_of_a_step(decoder.num_parameters)), seed=0)


def cpu_s(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.process_time()
    found = work()
    return time.process_time() - started, found


def measure(engines: tuple[Scheduler, Scheduler], shape: tuple[int, int, int], rounds: int, vocabulary: int) -> Row:
    """A row, by a sampler and an auditor. `shape`: groups, tokens of a prompt, tokens of a completion."""
    num_groups, num_prompt, num_tokens = shape
    sampler, auditor = engines
    rng, serial = random.Random(0), itertools.count()

    def once() -> tuple[float, float, float]:
        asked = [
            GenerationRequest(
                f"{next(serial)}", [rng.randrange(vocabulary) for _ in range(num_prompt)],
                SamplingParams(max_tokens=num_tokens, ignore_eos=True), n=GROUP,
                seeds=tuple(rng.randrange(1 << 40) for _ in range(GROUP)),
            )
            for _ in range(num_groups)
        ]  # fmt: skip
        sampling_s, sampled = cpu_s(lambda: run_requests(sampler, asked))
        choices = [(choice, one) for one, found in zip(asked, sampled, strict=True) for choice in found.choices]
        checks = [audit_request(f"{one.request_id}/{choice.index}", one, choice) for choice, one in choices]
        passes = [dataclasses.replace(one, request_id=f"{one.request_id}/pass", redraw=None) for one in checks]
        prompts_s, _ = cpu_s(lambda: run_requests(auditor, shared_prompts(checks)))
        pass_s, _ = cpu_s(lambda: run_requests(auditor, passes))
        check_s, checked = cpu_s(lambda: run_requests(auditor, checks))
        for (choice, _), found in zip(choices, checked, strict=True):
            assert found.redrawn is not None
            assert audit_fault(choice, found.redrawn, BOUNDS) is None
        return sampling_s, prompts_s + pass_s, prompts_s + check_s

    columns = [once() for _ in range(rounds + 1)][1:]
    tokens = num_groups * GROUP * num_tokens
    sampling, one_pass, check = (1000.0 * statistics.median(column) / tokens for column in zip(*columns, strict=True))
    return Row(num_groups * GROUP, num_prompt, num_tokens, sampling, one_pass / sampling, check / sampling)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the small model alone")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print("| model | completions | tokens of a prompt | of a completion | sampling, ms a token | pass | check |")
    print("|---|---|---|---|---|---|---|")
    for name, shape in list(SHAPES.items())[: 1 if options.quick else None]:
        engines = make_engine(shape), make_engine(shape)
        for measured in ((1, 64, 32), (8, 64, 32), (1, 64, 256), (1, 512, 32), (2, 512, 64)):
            row = measure(engines, measured, options.rounds, shape[-1])
            rows.append({"model": name, **row._asdict()})
            print(f"| {name} | {row}", flush=True)
    if options.json:
        load = os.getloadavg()
        options.json.write_text(json.dumps({"host": platform.platform(), "load": load, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
