"""What does a training step cost, and against what? One optimiser step on 256 rollouts of a short task.

    python benchmarks/trainer_step.py [--rounds 8] [--json FILE]

The batch is that of the quickstart: 16 prompts x 16 rollouts, prompts of 12 to 15 tokens, answers of 4 to 8, the tiny
policy, one thread. Compared in one process, rounds interleaved: a plain transformers loop (all logits of right-padded
rows in micro batches of 128, the same loss formula, AdamW), this trainer without shared prompts, and this trainer. The
number that matters is the ratio to the plain loop; the gradient of all three is checked to be the same first. Beside
them stands what keeping the log-probabilities of a batch costs, which the trainer does in a thread of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from mettle.records.tokens import COLUMNS, Batch, filled
from mettle.storage.trained_logprobs import write_trained_logprobs
from mettle.trainer.config import MicroBatchConfig, OptimConfig, SchedulerConfig
from mettle.trainer.layout import Sequences
from mettle.trainer.learner import Learner, Recipe
from mettle.trainer.loading import load_policy
from mettle.trainer.loss import BatchLoss
from mettle.trainer.losses.default import DefaultLoss
from mettle.trainer.policy import write_policy
from mettle.trainer.presets import preset
from mettle.trainer.process import setup_torch
from mettle.trainer.tenant import build_optimizers
from mettle.trainer.world import World

MICRO_ROWS = 128
KEEPING = "keeping its logprobs"


def make_batch(seed: int = 0) -> Batch:
    """16 groups of 16, advantages that sum to about 0 in a group, a quarter of the groups without any."""
    rng = np.random.default_rng(seed)
    columns: dict[str, list[np.ndarray]] = {name: [] for name in COLUMNS}
    lengths: list[int] = []
    for group in range(16):
        letters = int(rng.integers(3, 7))
        prompt = np.concatenate([[259], rng.integers(97, 107, 8 + letters), [257, 260]])
        for _ in range(16):
            length = letters + 1 + int(rng.integers(0, 2))
            number = len(prompt) + length
            mask = np.arange(number) >= len(prompt)
            values = {
                "token_ids": np.concatenate([prompt, rng.integers(97, 107, length)]),
                "loss_mask": mask,
                "logprobs": np.where(mask, -5.5, 0),
                "advantages": np.where(mask, rng.normal(), 0),
                "rl_weights": mask * 1.0 if group % 4 else np.zeros(number),
            }
            lengths.append(number)
            for name, column in filled(number, values).items():
                columns[name].append(column)
    arrays = {name: np.concatenate(parts) for name, parts in columns.items()}
    return Batch(sequence_lengths=np.array(lengths, np.int32), step=1, draw_ids=tuple(range(16)), **arrays)


class PlainLoop:
    """What one writes first: pad, forward, gather, loss, backward, step."""

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.train()
        self.optimizer, _ = build_optimizers(dict(self.model.named_parameters()), recipe.optim)
        self.recipe = recipe

    def backward(self, batch: Batch) -> None:
        starts = np.cumsum(batch.sequence_lengths) - batch.sequence_lengths
        spans = sorted(zip(starts, batch.sequence_lengths, strict=True), key=lambda span: -span[1])
        spans = [(a, n) for a, n in spans if batch.rl_weights[a : a + n].any()]
        total = max(1, int((batch.loss_mask & (batch.rl_weights != 0)).sum()))
        for first in range(0, len(spans), MICRO_ROWS):
            rows = spans[first : first + MICRO_ROWS]
            shape = (len(rows), max(n for _, n in rows))
            padded = {
                name: np.zeros(shape, COLUMNS[name].dtype)
                for name in ("token_ids", "logprobs", "advantages", "loss_mask")
            }
            for row, (start, number) in enumerate(rows):
                for name, array in padded.items():
                    array[row, :number] = getattr(batch, name)[start : start + number]
            token_ids, sampler, advantages, mask = (torch.from_numpy(padded[name]) for name in padded)
            logits = self.model(input_ids=token_ids.long(), use_cache=False).logits[:, :-1]
            logprobs = torch.log_softmax(logits, -1).gather(-1, token_ids[:, 1:, None].long()).squeeze(-1)
            ratio = (logprobs - sampler[:, 1:]).exp()
            moved = logprobs.detach().exp() - sampler[:, 1:].exp()
            is_masked = torch.where(advantages[:, 1:] > 0, moved > 0.2, moved < -0.2)
            (-(ratio * advantages[:, 1:] * (mask[:, 1:] & ~is_masked)).sum() / total).backward()

    def step(self, batch: Batch) -> None:
        self.backward(batch)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.optim.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()


def check_gradients(plain: PlainLoop, learners: list[Learner], batch: Batch) -> float:
    """Largest difference from the plain loop's gradient, relative to the largest gradient."""
    plain.backward(batch)
    expected = torch.cat([p.grad.flatten() for p in plain.model.parameters()])
    plain.model.zero_grad()
    worst = 0.0
    for learner in learners:
        sequences = Sequences.of(batch)
        learner.accumulate(sequences, BatchLoss(learner.recipe.loss, sequences.counts))
        found = torch.cat([p.grad.flatten() for p in learner.policy.parameters()])
        learner.policy.zero_grad()
        worst = max(worst, float((found - expected).abs().max() / expected.abs().max()))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    setup_torch(1, 0)
    batch = make_batch()
    num_tokens = len(batch.token_ids)
    recipe = Recipe(OptimConfig(lr=1e-4), SchedulerConfig(), DefaultLoss(kl_tau=0), MicroBatchConfig(), 10**6)
    alone = Recipe(recipe.optim, recipe.scheduler, recipe.loss, MicroBatchConfig(share_prompts=False), 10**6)
    world = World(0, 1, torch.device("cpu"))
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_policy(Path(scratch) / "model", preset("tiny"))
        plain = PlainLoop(folder, recipe)
        learners = [Learner(load_policy(folder, world, dtype=torch.float32), r, world) for r in (alone, recipe)]
    scratch_folder = tempfile.TemporaryDirectory()
    difference = check_gradients(plain, learners, batch)
    assert difference < 1e-4, f"the gradients differ by {difference:.1e}"
    kept: list[np.ndarray] = []
    beside = scratch_folder.name
    ways: dict[str, Callable[[], object]] = {
        "plain transformers loop": lambda: plain.step(batch),
        "trainer, each row alone": lambda: learners[0].train(batch, 1),
        "trainer": lambda: learners[1].train(batch, 1, keep=lambda *given: kept.__setitem__(slice(None), given)),
        KEEPING: lambda: write_trained_logprobs(Path(beside), "of-the-batch", batch, *kept),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(options.rounds + 1):
        for name, run in ways.items():
            started = time.process_time()
            run()
            if round_number:
                seconds[name].append(time.process_time() - started)
    scratch_folder.cleanup()
    report(seconds, num_tokens, difference, options.json)


def report(seconds: dict[str, list[float]], num_tokens: int, difference: float, path: Path | None) -> None:
    """Print the table; write it as JSON."""
    base = statistics.median(seconds["plain transformers loop"])
    rows = {
        name: {
            "cpu_s_median": statistics.median(values), "cpu_s_min": min(values), "cpu_s_max": max(values),
            "tokens_per_cpu_s": num_tokens / statistics.median(values), "ratio": base / statistics.median(values),
        }
        for name, values in seconds.items()
    }  # fmt: skip
    print(f"{num_tokens} tokens in 256 rows; gradients agree to {difference:.0e}")
    print(f"{'':28}{'CPU s a step':>14}{'min':>8}{'tokens/CPU s':>14}{'ratio':>7}")
    for name, row in rows.items():
        print(
            f"{name:28}{row['cpu_s_median']:14.3f}{row['cpu_s_min']:8.3f}{row['tokens_per_cpu_s']:14,.0f}"
            f"{row['ratio']:7.2f}"
        )
    share = rows[KEEPING]["cpu_s_median"] / rows["trainer"]["cpu_s_median"]
    print(f"keeping the logprobs takes {share:.2%} of a step")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            json.dumps({"num_tokens": num_tokens, "rows": rows, "torch": torch.__version__}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
