"""`mettle sft`: supervised fine-tuning on a file, without a run."""

from __future__ import annotations

import os
from pathlib import Path

import click

from mettle.cli.groups import NounGroup
from mettle.cli.terminal import going_on, json_option, print_json, print_next

LORA_LR, FULL_LR = 2e-4, 1e-5


@click.group(cls=NounGroup)
def sft() -> None:
    """Fine-tune a model on a file of chats, or of prompts and completions."""


@sft.command("run")
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "--model", required=True, type=click.Path(path_type=Path), help="Model directory in the Hugging Face layout."
)
@click.option("--to", "folder", required=True, type=click.Path(path_type=Path), help="Folder for what is trained.")
@click.option("--full", "is_full", is_flag=True, help="Train all weights instead of an adapter.")
@click.option("--rank", type=click.IntRange(min=1), default=16, show_default=True, help="Rank of the adapter.")
@click.option("--epochs", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True, help="Passes.")
@click.option("--batch-size", type=click.IntRange(min=1), default=16, show_default=True, help="Examples a step.")
@click.option(
    "--lr", type=click.FloatRange(min=0, min_open=True), help="Peak learning rate.  [default: 2e-4; 1e-5 with --full]"
)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", help="Of forward and backward.")
@click.option("--checkpointing", is_flag=True, help="Compute activations again: slower, much less memory.")
@click.option("--seed", type=int, default=0, help="Order of the examples and the adapter's start.")
@click.option(
    "--checkpoint-s", type=click.FloatRange(min=0), default=30.0, show_default=True,
    help="Seconds between checkpoints, from the newest of which the same command goes on after a kill.",
)  # fmt: skip
@json_option
def run(
    file: Path,
    model: Path,
    folder: Path,
    is_full: bool,
    rank: int,
    epochs: float,
    batch_size: int,
    lr: float | None,
    dtype: str,
    checkpointing: bool,
    seed: int,
    checkpoint_s: float,
    is_json: bool,
) -> None:
    """Fine-tune on FILE, one JSON object a line: "messages", or "prompt" and "completion"; answers alone train."""
    from mettle.trainer.config import LoraConfig
    from mettle.trainer.finetuning import FineTuning, fine_tune

    lora = None if is_full else LoraConfig(rank=rank, alpha=2.0 * rank)
    rate = lr or (FULL_LR if is_full else LORA_LR)
    threads = max(1, (os.cpu_count() or 2) - 1)
    task = FineTuning(
        file, model, folder, lora, rate, epochs, batch_size, seed, dtype, threads, checkpointing, checkpoint_s
    )

    first: list[int] = []

    def tell(step: int, num_steps: int, figures: dict[str, float]) -> None:
        if not first and step > 1 and not is_json:
            click.echo(f"going on after step {step - 1}", err=True)
        first.append(step)
        if not is_json and (step == 1 or step == num_steps or step % max(1, num_steps // 20) == 0):
            speed = figures["throughput/trainer_tokens_per_s"]
            click.echo(f"step {step}/{num_steps}  loss {figures['loss/ce']:.4f}  {speed:,.0f} tokens/s", err=True)

    with going_on("the same command goes on from its newest checkpoint"):
        done = fine_tune(task, tell)
    if is_json:
        print_json(done | {"folder": str(folder), "kind": "full" if is_full else "lora"})
        return
    click.echo(f"wrote {folder}: loss {done['first_loss']:.4f} to {done['last_loss']:.4f} in {done['steps']} steps")
    print_next(f'mettle inference chat {folder} -q "..."' if is_full else f"mettle adapter merge {folder} MODEL_FOLDER")
