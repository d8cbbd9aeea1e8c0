"""`mettle sft`: supervised fine-tuning on a file, without a run."""

from __future__ import annotations

import click

from mettle.cli.groups import NounGroup
from mettle.cli.tuning import TuningAsked, tuning_options


@click.group(cls=NounGroup)
def sft() -> None:
    """Fine-tune a model on a file of chats, or of prompts and completions."""


@sft.command("run")
@tuning_options(lora_lr=2e-4, full_lr=1e-5)
def run(asked: TuningAsked) -> None:
    """Fine-tune on FILE, one JSON object a line: "messages", or "prompt" and "completion"; answers alone train."""
    from mettle.trainer.epochs import Tuning
    from mettle.trainer.finetuning import fine_tune

    asked.carry_out(
        lambda tell: fine_tune(Tuning(**asked.task()), tell),
        lambda figures: f"loss {figures['loss/ce']:.4f}  {figures['throughput/trainer_tokens_per_s']:,.0f} tokens/s",
        lambda done: f"loss {done['first_loss']:.4f} to {done['last_loss']:.4f}",
    )
