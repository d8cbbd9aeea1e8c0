"""The quickstart's task in TRL, as its documentation would have it; `peer_trl.py` runs this in TRL's own environment.

python peer_trl_grpo.py MODEL ROWS OUT STEPS SEED [KEPT]

With KEPT the learning rate is constant after its warm-up, and a policy is kept every so many steps in `OUT-scratch`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

PROMPTS, ROLLOUTS, MAX_TOKENS = 16, 16, 8


def main() -> None:
    model_folder, rows_file, out, steps, seed = sys.argv[1:6]
    kept = int(sys.argv[6]) if len(sys.argv) > 6 else 0
    torch.set_num_threads(2)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    rows = [json.loads(line) for line in Path(rows_file).read_text().splitlines()]
    prompts = [{"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in rows]
    config = GRPOConfig(
        output_dir=out + "-scratch",
        max_steps=int(steps),
        seed=int(seed),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=PROMPTS * ROLLOUTS,
        num_generations=ROLLOUTS,
        max_completion_length=MAX_TOKENS,
        temperature=1.0,
        learning_rate=3e-4,
        adam_beta1=0.95,
        adam_beta2=0.995,
        weight_decay=0.0,
        max_grad_norm=1.0,
        lr_scheduler_type="constant_with_warmup" if kept else "linear",
        warmup_steps=20,
        logging_steps=10,
        save_strategy="steps" if kept else "no",
        save_steps=kept or 500,
        save_only_model=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        args=config,
        reward_funcs=lambda completions, answer, completion_ids, **_: [
            reward(said[0]["content"], right, ids, tokenizer.eos_token_id)
            for said, right, ids in zip(completions, answer, completion_ids, strict=True)
        ],
        train_dataset=Dataset.from_list(prompts),
    )
    trainer.train()
    trainer.save_model(out)
    tokenizer.save_pretrained(out)


def reward(said: str, right: str, token_ids: Any, end: int) -> float:
    """Share of positions that hold the right letter; 0 when the answer did not end in time."""
    if int(token_ids[-1]) != end:
        return 0.0
    said = said.strip()
    return sum(a == b for a, b in zip(right, said, strict=False)) / max(len(right), len(said))


if __name__ == "__main__":
    main()
