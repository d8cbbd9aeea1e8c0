"""What does a token cost the embedded engine, and does a long neighbour, a long prompt or an earlier turn change that?

One run, one process, CPU time of one thread, each ratio from measurements that were taken in turns:

- decoding a batch, against `generate` and continuous batching of transformers (the same weights and prompts);
- computing a prompt and decoding behind it at contexts of 128 to 8,192 tokens, against transformers' own forward;
- mixed lengths: a step with one sequence of 4,000 tokens among 31 of 100, against what these cost among their like;
- five turns of a rollout, each beginning with all before it: tokens computed, and the time of turn 5 against afresh;
- one prompt beside a running sequence: the longest that this waits for its next token, against the whole prompt.

    PYTHONPATH=src OMP_NUM_THREADS=1 python benchmarks/inference_lengths.py [--quick] [--large] [--json FILE]
    PYTHONPATH=src OMP_NUM_THREADS=1 python benchmarks/inference_lengths.py --contexts preset|tiny|half 128,512,...

The numbers that matter are the ratios. `--large` adds a model of the shape of Qwen2.5-0.5B with a vocabulary of 8,192.
`--contexts` measures the contexts alone, of a run's `tiny` policy (358 k parameters), of this file's tiny model, or of
the 503 M parameters of `half_billion.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from mettle.inference.engine.architecture import shape_from_config
from mettle.inference.engine.decoder import Decoder
from mettle.inference.engine.limits import Limits
from mettle.inference.engine.local import run_requests
from mettle.inference.engine.protocol import GenerationRequest
from mettle.inference.engine.scheduler import Scheduler
from mettle.inference.engine.weights import fuse, tokens_of_a_step
from mettle.records.sampling import SamplingParams
from mettle.trainer.presets import PRESETS, VOCAB_SIZE

PROMPT, NEW, LONGEST = 20, 64, 8320
ROPE = {"rope_theta": 10_000.0, "rope_type": "default"}


class Silent:
    """A listener that hears nothing, and an error at once."""

    def on_token(self, event: object) -> None: ...
    def on_finish(self, generation: object) -> None: ...
    def on_failure(self, error: Exception) -> None:
        raise error


class Measured:
    """One model, ready for both sides."""

    def __init__(self, model: PreTrainedModel, vocab_size: int, longest: int = LONGEST) -> None:
        self.model = model.eval()
        self.vocab_size = vocab_size
        self.longest = longest
        shape = shape_from_config(model.config.to_dict())
        self.decoder = Decoder(shape, fuse(shape, model.state_dict(), torch.device("cpu"), torch.float32), longest)

    def scheduler(self, slots: int = 256) -> Scheduler:
        num_tokens = tokens_of_a_step(self.decoder.num_parameters)
        return Scheduler(self.decoder, Limits(slots, self.longest, num_tokens), seed=0)

    def prompt(self, length: int) -> list[int]:
        return torch.randint(0, self.vocab_size, (length,)).tolist()


def tiny_model() -> Measured:
    """0.83 M parameters: 4 layers, hidden 128, head size 32."""
    config = Qwen3Config(
        vocab_size=264, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=LONGEST, tie_word_embeddings=True,
        rope_parameters=ROPE,
    )  # fmt: skip
    return Measured(Qwen3ForCausalLM(config), 256)


def preset_model() -> Measured:
    """358 k parameters: a run's `tiny` policy, for longer contexts."""
    policy = PRESETS["tiny"]
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE, hidden_size=policy.hidden_size, intermediate_size=policy.mlp_size,
        num_hidden_layers=policy.num_layers, num_attention_heads=policy.num_heads,
        num_key_value_heads=policy.num_kv_heads, head_dim=policy.head_dim, max_position_embeddings=LONGEST,
        tie_word_embeddings=True, rope_parameters=ROPE | {"rope_theta": policy.rope_theta},
    )  # fmt: skip
    return Measured(Qwen3ForCausalLM(config), 256)


def half_model() -> Measured:
    """503 M parameters: 32 layers of width 1,024, heads of 128."""
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE, hidden_size=1024, intermediate_size=3072, num_hidden_layers=32, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=LONGEST, tie_word_embeddings=True,
        rope_parameters=ROPE,
    )  # fmt: skip
    return Measured(Qwen3ForCausalLM(config), 256, 2304)  # of 8,320 positions the keys alone take 2 GB


def large_model() -> Measured:
    """365 M parameters: the layers of Qwen2.5-0.5B."""
    config = Qwen2Config(
        vocab_size=8192, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, max_position_embeddings=LONGEST, tie_word_embeddings=True, rope_parameters=ROPE,
    )  # fmt: skip
    return Measured(Qwen2ForCausalLM(config), 8192)


def cpu_s(work: Callable[[], Any]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def in_turns(rounds: int, *works: Callable[[], float]) -> list[float]:
    """The median of each, measured one after another `rounds` times, after a round that does not count."""
    found = [[work() for work in works] for _ in range(rounds + 1)][1:]
    return [statistics.median(column) for column in zip(*found, strict=True)]


def ask(name: str, prompt: Sequence[int], new: int) -> GenerationRequest:
    return GenerationRequest(name, prompt, SamplingParams(max_tokens=new, ignore_eos=True))


def decoding(it: Measured, batch: int, new: int, rounds: int) -> dict[str, Any]:
    prompts = [it.prompt(PROMPT) for _ in range(batch)]
    settings = {"max_new_tokens": new, "do_sample": True, "top_k": 0, "pad_token_id": 0}
    scheduler = it.scheduler()
    blocks = ContinuousBatchingConfig(
        page_size=32, num_blocks=batch * 4 + 16, max_batch_tokens=max(64, batch), use_cuda_graph=False,
        use_async_batching=False,
    )  # fmt: skip

    def engine() -> float:
        return cpu_s(lambda: run_requests(scheduler, [ask(str(i), p, new) for i, p in enumerate(prompts)]))

    def generate() -> float:
        mask = torch.ones(batch, PROMPT, dtype=torch.long)
        with torch.inference_mode():
            return cpu_s(
                lambda: it.model.generate(torch.tensor(prompts), attention_mask=mask, min_new_tokens=new, **settings)
            )

    def continuous() -> float:
        config = GenerationConfig(**settings, eos_token_id=-1)
        return cpu_s(
            lambda: it.model.generate_batch(
                prompts, generation_config=config, continuous_batching_config=blocks, warmup=False
            )
        )

    ours, plain, paged = in_turns(rounds, engine, generate, continuous)
    return {
        "batch": batch,
        "engine_tokens_per_cpu_s": round(batch * new / ours),
        "generate_ratio": round(plain / ours, 2),
        "continuous_ratio": round(paged / ours, 2),
    }


def steps(scheduler: Scheduler, prompts: Sequence[Sequence[int]], count: int) -> float:
    """CPU seconds of one step behind these prompts."""
    for i, prompt in enumerate(prompts):
        scheduler.add(ask(f"{i}", prompt, count + 3), Silent())
    while len(scheduler.memory.slots.rows) < len(prompts):
        scheduler.step()
    spent = cpu_s(lambda: [scheduler.step() for _ in range(count)]) / count
    scheduler.abort_all()
    scheduler.memory.prefixes.keep_only(set())
    return spent


def contexts(it: Measured, length: int, rounds: int, count: int = 16) -> dict[str, Any]:
    """A prompt, then `count` steps behind it; the medians of each, and of the ratios of neighbours."""
    prompt = it.prompt(length)
    ids = torch.tensor([prompt])
    rows: list[tuple[float, float, float, float]] = []
    scheduler = it.scheduler()  # a server has one for all of its life
    for _ in range(rounds + 1):
        prefill_s = cpu_s(lambda: run_requests(scheduler, [ask("a", prompt, 1)]))
        with torch.inference_mode():
            started = time.process_time()
            cache = it.model(ids, use_cache=True, logits_to_keep=1).past_key_values
            their_prefill_s = time.process_time() - started
        step_s = steps(scheduler, [prompt], count)  # the prompt is known
        rows.append((prefill_s, their_prefill_s, step_s, their_steps(it, cache, count)))
    measured = rows[1:] if rounds > 1 else rows[-1:]
    prefill_s, _, step_s, _ = (statistics.median(column) for column in zip(*measured, strict=True))
    return {
        "context": length,
        "rounds": len(measured),
        "prefill_tokens_per_cpu_s": round(length / prefill_s),
        "prefill_ratio": round(statistics.median(theirs / ours for ours, theirs, *_ in measured), 2),
        "step_ms": round(step_s * 1e3, 2),
        "step_ratio": round(statistics.median(theirs / ours for *_, ours, theirs in measured), 2),
    }


def their_steps(it: Measured, cache: Any, count: int) -> float:
    """CPU seconds of one step of transformers behind what is in its cache."""

    @torch.inference_mode()
    def go() -> None:
        for i in range(count):
            logits = it.model(torch.tensor([[i]]), past_key_values=cache, use_cache=True).logits[0, -1]
            torch.multinomial(torch.softmax(logits, -1), 1).item()

    return cpu_s(go) / count


def mixed_lengths(it: Measured, count: int, rounds: int) -> dict[str, Any]:
    short, long = 100, 4000
    even_short, even_long, mixed = in_turns(
        rounds,
        lambda: steps(it.scheduler(), [it.prompt(short) for _ in range(count)], 16),
        lambda: steps(it.scheduler(), [it.prompt(long) for _ in range(4)], 16) / 4,
        lambda: steps(it.scheduler(), [*(it.prompt(short) for _ in range(count - 1)), it.prompt(long)], 16),
    )
    fair = even_short * (count - 1) / count + even_long
    return {
        "sequences": count,
        "even_ms": round(even_short * 1e3, 2),
        "mixed_ms": round(mixed * 1e3, 2),
        "mixed_to_fair": round(mixed / fair, 2),
    }


def turns(it: Measured, new_tokens: int, answer: int, rounds: int) -> dict[str, Any]:
    computed: list[int] = []

    def fifth(*, is_known: bool) -> float:
        scheduler, prompt, spent = it.scheduler(), [], 0.0
        computed.clear()
        for turn in range(5):
            prompt = [*prompt, *it.prompt(new_tokens)]
            known = scheduler.totals.prefix_hit_tokens
            if is_known or turn == 4:
                run_requests(scheduler, [ask(str(turn), prompt, 1)])
            computed.append(len(prompt) - (scheduler.totals.prefix_hit_tokens - known))
            if turn == 3:
                started = time.process_time()
            spent = time.process_time() - started if turn == 4 else 0.0
            prompt = [*prompt, *it.prompt(answer)]
        return spent

    afresh, known = in_turns(rounds, lambda: fifth(is_known=False), lambda: fifth(is_known=True))
    prompt_tokens = 5 * new_tokens + 4 * answer
    return {
        "new_tokens": new_tokens,
        "answer": answer,
        "turn_5_prompt": prompt_tokens,
        "turn_5_computed": computed[-1],
        "turn_5_speedup": round(afresh / known, 2),
    }


def longest_wait(it: Measured, length: int) -> dict[str, Any]:
    scheduler = it.scheduler()
    scheduler.add(ask("running", it.prompt(PROMPT), 4000), Silent())
    scheduler.step()
    scheduler.add(ask("long", it.prompt(length), 1), Silent())
    waits = []
    while scheduler.num_running > 1 or scheduler.num_waiting:
        waits.append(cpu_s(scheduler.step))
    return {
        "prompt": length,
        "tokens_a_step": scheduler.limits.max_prefill_tokens,
        "whole_prompt_cpu_s": round(sum(waits), 2),
        "longest_step_cpu_s": round(max(waits), 2),
    }


def measure(it: Measured, *, is_quick: bool, is_large: bool) -> dict[str, Any]:
    rounds = 1 if is_quick or is_large else 3
    batches = [1, 16] if is_quick else [1, 8] if is_large else [1, 16, 64, 256]
    lengths = [128] if is_quick else [128, 1024] if is_large else [128, 512, 1024, 2048, 4096, 8192]
    found: dict[str, Any] = {"parameters": sum(p.numel() for p in it.model.parameters())}
    show("decoding", found, [decoding(it, batch, 8 if is_large else NEW, rounds) for batch in batches])
    show("contexts", found, [contexts(it, length, rounds) for length in lengths])
    if not is_quick:
        if not is_large:
            show("mixed", found, [mixed_lengths(it, 32, rounds)])
        show("turns", found, [turns(it, 100, 100, rounds)])
        show("waits", found, [longest_wait(it, 1024 if is_large else 4096)])
    return found


def show(name: str, found: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    found[name] = rows
    for row in rows:
        sys.stdout.write(f"{name}: " + ", ".join(f"{key} {value:,}" for key, value in row.items()) + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small figures and one round: does it run at all")
    parser.add_argument("--large", action="store_true", help="the 0.5B-shaped model too: some minutes and 4 GB")
    parser.add_argument(
        "--contexts", nargs=2, metavar=("MODEL", "LENGTHS"), help="the contexts of one model alone: preset, tiny, half"
    )
    parser.add_argument("--rounds", type=int, default=9, help="rounds of --contexts")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if arguments.contexts:
        name, lengths = arguments.contexts
        it = {"preset": preset_model, "tiny": tiny_model, "half": half_model}[name]()
        show(
            "contexts",
            {},
            [contexts(it, int(n), arguments.rounds, 4 if name == "half" else 16) for n in lengths.split(",")],
        )
        return
    result: dict[str, Any] = {
        "question": __doc__.splitlines()[0],
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "tiny": measure(tiny_model(), is_quick=arguments.quick, is_large=False),
    }
    if arguments.large:
        result["large"] = measure(large_model(), is_quick=False, is_large=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
