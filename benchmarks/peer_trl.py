"""The same policy, task and batch through Mettle and through TRL's GRPOTrainer: time, processor time, reward.

    python3 -m venv trl-venv && trl-venv/bin/pip install torch==2.13.0+cpu trl
    python benchmarks/peer_trl.py --peer trl-venv/bin/python [--steps 100] [--rounds 2] [--json FILE]
    python benchmarks/peer_trl.py --lag 0 2              asynchronous beside synchronous: Mettle alone, with other lags
    python benchmarks/peer_trl.py --against CHECKOUT     Mettle alone, in turns with another checkout of it
    python benchmarks/peer_trl.py --peer PYTHON --until .85 [--lag 0 2]    the time to that held-out reward

Both start from one folder: the quickstart's policy after its warm-up. A step is 16 prompts x 16 rollouts at temperature
1, answers of at most 8 tokens, AdamW at 3e-4 with betas (.95, .995), in float32. TRL samples with transformers'
generate in its own process and has both cores; Mettle samples ahead in another process, one thread each. Neither
measures, saves or draws anything on the way. Times are of the whole command, imports included, rounds in turn; each
final policy is then measured on the same 512 held-out words. What differs: Mettle's loss has an entropy bonus that
fades, and the policy that samples is one version old (with `--lag 0 2` once more, none and up to two); TRL's is its
default loss, on the newest version.

With `--until` the learning rate stays as it is after its warm-up, so that no side is helped by where its schedule ends;
the entropy bonus is left out, and advantages are divided by their standard deviation, as TRL's are. A policy is kept
every ten steps and measured after the run; what counts is the moment at which the first one was on disk that reaches
the reward.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
PROMPTS, ROLLOUTS, MAX_TOKENS = 16, 16, 8
KEPT = 10
"""Steps between the policies that `--until` looks at."""
RECIPE = HERE.parents[1] / "src/mettle/runs/quickstart.toml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, help="python of an environment with trl")
    parser.add_argument("--against", type=Path, help="another checkout of Mettle, run by this python")
    parser.add_argument(
        "--lag", type=int, nargs="+", default=[], help="Mettle once more, with so many versions of lag in place of one"
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of the first round; each one more takes the next")
    parser.add_argument("--until", type=float, help="time to this held-out reward, in place of a number of steps")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    if not (options.peer or options.against or options.lag):
        parser.error("give one of --peer, --against, --lag, or several")
    with tempfile.TemporaryDirectory() as scratch:
        if options.until is not None:
            figures = race(Path(scratch), options)
            if options.json:
                options.json.write_text(json.dumps(figures, indent=1) + "\n")
            return
        start = make_start(Path(scratch))
        rows = write_rows(Path(scratch) / "rows.jsonl")
        lags = {"mettle": 1, "against": 1, **{f"lag {lag}": lag for lag in options.lag}}
        others = {**{f"lag {lag}": True for lag in options.lag}, "trl": options.peer, "against": options.against}
        found: dict[str, list[dict[str, float]]] = {"mettle": [], **{name: [] for name in others if others[name]}}
        for number in range(options.seed, options.seed + options.rounds):
            for name in found:
                folder = Path(scratch) / f"{name.replace(' ', '-')}-{number}"
                if name != "trl":
                    source = options.against / "src" if name == "against" else None
                    result = timed(mettle_command(start, folder, options.steps, number, lags[name]), source)
                else:
                    peer = [str(options.peer), str(HERE.with_name("peer_trl_grpo.py")), str(start), str(rows)]
                    result = timed([*peer, str(folder / "policy"), str(options.steps), str(number)])
                result["reward"] = measure(folder / "policy")
                found[name].append(result)
                print(f"{name:<7} {result['wall_s']:6.1f} s  {result['cpu_s']:6.1f} CPU-s  -> {result['reward']:.3f}")
        figures = table(measure(start), found, options.steps)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


def make_start(scratch: Path) -> Path:
    """The quickstart's policy after its warm-up, before any reinforcement learning."""
    run = scratch / "start"
    subprocess.run(
        [sys.executable, "-m", "mettle.cli", "quickstart", "--steps", "1", "--no-browser", "--json", "--dir", str(run)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return run / "model"


def write_rows(path: Path) -> Path:
    """The quickstart's training words for the peer."""
    from reverse_text import make_rows

    rows = make_rows(4000, seed=0, for_eval=False, hard=False)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def mettle_command(start: Path, folder: Path, steps: int, seed: int, lag: int = 1, recipe: Path = RECIPE) -> list[str]:
    """The quickstart's recipe from a policy that is there, with nothing measured before, after or on the way."""
    overrides = ["--model.path", str(start), "--no-warm_up.enabled", "--max_steps", str(steps), "--seed", str(seed)]
    overrides += ["--orchestrator.eval.interval", "0", "--orchestrator.eval.num_examples", "1"]
    overrides += ["--trainer.checkpoint.interval", str(steps), "--no-deployment.hub", "--dir", str(folder)]
    overrides += ["--trainer.mismatch.interval", "0"]
    if lag == 0:  # the seed decides everything: what is trained, and what is sampled next
        overrides += ["--orchestrator.max_lag", "0", "--orchestrator.max_staleness", "0"]
    elif lag != 1:
        overrides += ["--orchestrator.max_lag", str(lag), "--orchestrator.max_staleness", str(lag + 1)]
        overrides += ["--orchestrator.max_inflight_groups", str(PROMPTS * lag)]
        overrides += ["--inference.max_slots", str(PROMPTS * ROLLOUTS * lag)]
    return [sys.executable, "-m", "mettle.cli", "rl", "run", str(recipe), *overrides]


def race(scratch: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Every side in turn, a seed a round: when it first had a policy that reaches the reward, and after which step."""
    start, rows = make_start(scratch), write_rows(scratch / "rows.jsonl")
    recipe = scratch / "constant.toml"
    recipe.write_text(constant_recipe())
    lags = {"mettle": 1, **{f"lag {lag}": lag for lag in options.lag}}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in (*lags, *(["trl"] if options.peer else []))}
    for number in range(options.seed, options.seed + options.rounds):
        for name, results in found.items():
            folder = scratch / f"{name.replace(' ', '-')}-{number}"
            if name == "trl":
                peer = [str(options.peer), str(HERE.with_name("peer_trl_grpo.py")), str(start), str(rows)]
                command = [*peer, str(folder), str(options.steps), str(number), str(KEPT)]
                kept = watched(command, Path(f"{folder}-scratch"), "checkpoint-")
            else:
                command = mettle_command(start, folder, options.steps, number, lags[name], recipe)
                kept = watched(command, folder / "weights", "v")
            results.append(first_reaching(options.until, start, kept))
            told = "{wall_s:6.1f} s  step {step:4d} -> {reward:.3f}".format(**results[-1])
            print(f"{name:<7} {told}", flush=True)
    ours = statistics.mean(result["wall_s"] for result in found["mettle"])
    for name, results in found.items():
        walls = sorted(result["wall_s"] for result in results)
        mean = statistics.mean(walls)
        print(f"{name:<7} {walls[0]:.1f} to {walls[-1]:.1f} s, {mean / ours:.2f}x Mettle's time to {options.until}")
    return {"until": options.until, "rounds": found}


def constant_recipe() -> str:
    """The quickstart's with the advantages that are TRL's default, without an entropy bonus and an end to its rate."""
    text = re.sub(r"(?m)^(decay_steps|min_lr_ratio|entropy_tau) = .*\n", "", RECIPE.read_text())
    text = text.replace('algorithm = "grpo"', 'algorithm = "grpo"\nalgorithm_args = { scale_by_std = true }')
    return text.replace('type = "linear"', 'type = "constant"')


def watched(command: list[str], folder: Path, prefix: str) -> dict[int, tuple[float, Path]]:
    """Run a command and keep what it publishes every `KEPT` steps, by step: seconds from its start, and the weights."""
    kept: dict[int, tuple[float, Path]] = {}
    aside = folder.with_name(folder.name + "-kept")
    started = time.perf_counter()
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(command, env=environment, stdout=said, stderr=said) as running,
    ):
        while True:
            code = running.poll()
            for path in folder.glob(f"{prefix}[0-9]*"):
                step = int(path.name.removeprefix(prefix))
                is_whole = prefix == "v" or (path / "trainer_state.json").exists()  # Mettle's appear by a rename
                if step and step % KEPT == 0 and step not in kept and is_whole:
                    aside.mkdir(exist_ok=True)
                    kept[step] = time.perf_counter() - started, aside / f"{step}.safetensors"
                    os.link(path / "model.safetensors", kept[step][1])
            if code is not None:
                break
            time.sleep(0.05)
        if code:
            said.seek(0)
            sys.exit(f"{' '.join(command[:4])} ... ended with {code}:\n{said.read().decode()[-3000:]}")
    return kept


def first_reaching(goal: float, start: Path, kept: dict[int, tuple[float, Path]]) -> dict[str, Any]:
    """The first of the policies kept that has the reward."""
    for step in sorted(kept):
        wall_s, weights = kept[step]
        reward = measure(start, weights)
        if reward >= goal:
            return {"wall_s": wall_s, "step": step, "reward": reward}
    sys.exit(f"no policy of {sorted(kept)} has {goal}; give more --steps")


def timed(command: list[str], source: Path | None = None) -> dict[str, float]:
    """Wall and processor seconds of a command with all its children; `source` is where another Mettle is."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if source is not None:
        environment["PYTHONPATH"] = str(source.resolve())
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    wall_s, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"{' '.join(command[:4])} ... ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return {"wall_s": wall_s, "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def measure(folder: Path, weights: Path | None = None) -> float:
    """Mean reward of a policy's folder, or of other weights of it, on the 512 held-out words, at temperature 1."""
    from reverse_text import make_rows
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    from mettle.inference.engine.local import generate_batch
    from mettle.records.sampling import SamplingParams

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    config, state = json.loads((folder / "config.json").read_text()), load_file(weights or folder / "model.safetensors")
    rows = make_rows(512, seed=0, for_eval=True, hard=False)
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": row["question"]}], add_generation_prompt=True)
        for row in rows
    ]
    ids = [prompt if isinstance(prompt, list) else prompt["input_ids"] for prompt in prompts]
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0)
    generations = generate_batch(config, state, ids, params, n=4, eos_token_ids=[tokenizer.eos_token_id], seed=0)
    rewards = []
    for row, choice in [(rows[i // 4], choice) for i, choice in enumerate(c for g in generations for c in g.choices)]:
        said = tokenizer.decode(choice.token_ids, skip_special_tokens=True).strip()
        right = sum(a == b for a, b in zip(row["answer"], said, strict=False))
        rewards.append(right / max(len(row["answer"]), len(said)) if choice.finish_reason == "stop" else 0.0)
    return statistics.mean(rewards)


def table(before: float, found: dict[str, list[dict[str, float]]], steps: int) -> dict[str, Any]:
    """Print what each took for all its steps, and how many times Mettle's that is."""
    figures: dict[str, Any] = {"steps": steps, "reward_before": before, "rounds": found}
    for name, results in found.items():
        figures[name] = {key: statistics.mean(result[key] for result in results) for key in results[0]}
    ours = figures["mettle"]
    rounds = len(found["mettle"])
    print(f"{steps} steps of {PROMPTS} x {ROLLOUTS} rollouts from {before:.3f}; the mean of {rounds} rounds")
    for name in found:
        mean = figures[name]
        print(f"{name:<7} {mean['wall_s']:6.1f} s  {mean['cpu_s']:6.1f} CPU-s  -> {mean['reward']:.3f}")
    for name in [name for name in found if name != "mettle"]:
        wall, cpu = (figures[name][key] / ours[key] for key in ("wall_s", "cpu_s"))
        print(f"{name} takes {wall:.2f}x the time, {cpu:.2f}x the work")
    return figures


if __name__ == "__main__":
    main()
