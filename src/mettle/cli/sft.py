"""`mettle sft`: supervised fine-tuning on a file, without a run."""

from __future__ import annotations

from pathlib import Path

import click

from mettle.cli.groups import NounGroup
from mettle.cli.terminal import going_on, json_option, print_json, print_next
from mettle.cli.tuning import StepLines, tuning_options, tuning_threads

LORA_LR, FULL_LR = 2e-4, 1e-5


@click.group(cls=NounGroup)
def sft() -> None:
    """Fine-tune a model on a file of chats, or of prompts and completions."""


@sft.command("run")
@tuning_options
@click.option(
    "--lr", type=click.FloatRange(min=0, min_open=True), help="Peak learning rate.  [default: 2e-4; 1e-5 with --full]"
)
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
    task = FineTuning(
        file, model, folder, lora, rate, epochs, batch_size, seed, dtype, tuning_threads(), checkpointing, checkpoint_s
    )

    def show(figures: dict[str, float]) -> str:
        return f"loss {figures['loss/ce']:.4f}  {figures['throughput/trainer_tokens_per_s']:,.0f} tokens/s"

    with going_on("the same command goes on from its newest checkpoint"):
        done = fine_tune(task, StepLines(show, is_silent=is_json))
    if is_json:
        print_json(done | {"folder": str(folder), "kind": "full" if is_full else "lora"})
        return
    click.echo(f"wrote {folder}: loss {done['first_loss']:.4f} to {done['last_loss']:.4f} in {done['steps']} steps")
    print_next(f'mettle inference chat {folder} -q "..."' if is_full else f"mettle adapter merge {folder} MODEL_FOLDER")
