"""Does a model of half a billion parameters train with LoRA on a laptop's two cores, and what does it take?

    python benchmarks/half_billion.py DIR [--steps 12] [--json FILE]

Makes a model of the Qwen3 architecture with random weights (32 layers of width 1,024, 503 million parameters) in
DIR/model, in bfloat16 as real ones come, and a formal task beside it (answer in lower-case letters; the reward is their
share), and runs `mettle rl run` on them. The numbers that matter: the reward of the first and the last steps (it must
rise), seconds a step, and memory at the peak, over all processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from mettle.storage.ledger import Ledger

SHAPE = {
    "num_layers": 32,
    "hidden_size": 1024,
    "mlp_size": 3072,
    "num_heads": 16,
    "num_kv_heads": 8,
    "head_dim": 128,
    "max_positions": 512,
}
ENVIRONMENT = '''
"""Answer in lower-case letters; the reward is their share of what was said."""

import mettle.envs as vf


def share(completion, **_):
    text = vf.Parser().parse_answer(completion) or ""
    return sum("a" <= letter <= "z" for letter in text) / max(1, len(text))


def load_environment(num_train=512, num_eval=16):
    def rows(first, number):
        return [{"question": f"word {i}", "answer": ""} for i in range(first, first + number)]

    rubric = vf.Rubric(funcs=[share], weights=[1.0])
    train, held_out = rows(0, num_train), rows(num_train, num_eval)
    return vf.SingleTurnEnv(dataset=lambda: train, eval_dataset=lambda: held_out, rubric=rubric)
'''
CONFIG = """
max_steps = {steps}
seed = 0

[model]
path = "{model}"
lora = {{ rank = 16, alpha = 32 }}

[orchestrator]
batch_size = 32
group_size = 8
max_lag = 1
max_staleness = 2

[orchestrator.sampling]
temperature = 1.0
max_tokens = 12

[[orchestrator.envs]]
id = "lowercase"

[orchestrator.eval]
num_examples = 16
rollouts_per_example = 1
interval = 1000

[trainer]
dtype = "bfloat16"

[trainer.optim]
lr = 1e-3
weight_decay = 0.0

[trainer.checkpoint]
interval = 5

[inference]
max_slots = 32
max_model_len = 64

[deployment]
hub = false
"""


def prepare(folder: Path, steps: int, shape: Mapping[str, int] = SHAPE) -> Path:
    """Model, environment and config in `folder`; returns the config."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model" / "config.json").exists():
        from safetensors.torch import load_file, save_file

        from mettle.trainer.policy import write_policy
        from mettle.trainer.presets import PolicyConfig

        write_policy(folder / "model", PolicyConfig(**shape))
        file = folder / "model" / "model.safetensors"
        save_file(
            {name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"}
        )
        about = json.loads((folder / "model" / "config.json").read_text())
        (folder / "model" / "config.json").write_text(json.dumps(about | {"dtype": "bfloat16"}))
    (folder / "lowercase.py").write_text(ENVIRONMENT)
    config = folder / "half.toml"
    config.write_text(CONFIG.format(steps=steps, model=folder.resolve() / "model"))
    return config


def figures(run: Path) -> dict[str, float]:
    """What the run's ledger says."""
    ledger = Ledger(run / "run.db", is_read_only=True)
    try:
        journal = ledger.journal
        rewards = [value for _, value in journal.metric("reward/mean")]
        found = {"steps": len(rewards), "reward_first_3": statistics.mean(rewards[:3])}
        found["reward_last_3"] = statistics.mean(rewards[-3:])
        for name in ("time/step_s", "time/publish_s", "weights/update_ms", "canary/mean_abs_diff"):
            values = [value for _, value in journal.metric(name)]
            found[name] = statistics.median(values) if values else float("nan")
        for name in ("wall_s", "cpu_s", "peak_memory_bytes"):
            found[name] = journal.fact(name)
        return found
    finally:
        ledger.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    config = prepare(arguments.dir, arguments.steps)
    command = [sys.executable, "-m", "mettle.cli", "rl", "run", str(config), "--dir", "run"]
    environment = {**os.environ, "PYTHONPATH": str(arguments.dir.resolve())}
    subprocess.run(command, cwd=arguments.dir, env=environment, check=True)
    found = figures(arguments.dir / "run")
    print(json.dumps(found, indent=2))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
