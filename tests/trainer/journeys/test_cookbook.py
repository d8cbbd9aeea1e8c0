"""The cookbook's minimal loops from its own package, unchanged and offline, against the service with a random model.

Without an index that has the packages these tests are skipped and say so.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import sysconfig
import venv

import pytest
import torch
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from mettle.trainer.policy import build_tokenizer

NAME = "Qwen/Qwen3-8B"
COOKBOOK = "tinker-cookbook==0.6.1"
NEEDS = (
    "tinker==0.38.0", "chz", "datasets", "cloudpickle", "termcolor", "tiktoken", "blobfile", "pyrage", "rich", "pillow",
    "aiohttp", "math-verify", "sympy", "pylatexenc",
)  # fmt: skip
SHORT = "batch_size=4 group_size=4 max_tokens=8 loss_fn=importance_sampling max_steps=2 ttl_seconds=None"
LOOPS = {
    "sl_loop": "batch_size=8 max_length=512 max_steps=3 save_every=2 ttl_seconds=None",
    "rl_loop": SHORT,
    "math_rl.train": "env=arithmetic loss_fn=importance_sampling eval_every=0 max_steps=2 groups_per_batch=4 group_size=4"
    " max_tokens=8 behavior_if_log_dir_exists=delete",
    "chat_sl.train": "dataset=chat.jsonl eval_every=0 max_steps=3 batch_size=8",
}

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(1800)]


def write_model(folder):
    """A random model with the special tokens that the cookbook's chat format asks for."""
    tokenizer = build_tokenizer()
    special = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    tokenizer.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in special])
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    tokenizer.add_tokens([AddedToken(each, special=False, normalized=False) for each in marks])
    size = (tokenizer.get_vocab_size(with_added_tokens=True) + 15) // 16 * 16
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    wrapped.save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=size, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=2048, tie_word_embeddings=False,
        eos_token_id=wrapped.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(folder)


def write_rows(folder, name, rows, split):
    path = folder / name / f"{split}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_card(folder, config, prefix):
    files = "".join(f"  - split: {split}\n    path: {prefix}{split}.jsonl\n" for split in ("train", "test"))
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A working folder in which the names of the model and of the data sets are folders."""
    folder = tmp_path_factory.mktemp("cookbook")
    write_model(folder / NAME)
    rng = random.Random(0)
    pairs = [(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(64)]
    sums = [{"question": f"What is {a} plus {b}?", "answer": f"{a}+{b}\n#### {a + b}"} for a, b in pairs]
    said = [[{"role": "user", "content": f"Say {i}"}, {"role": "assistant", "content": f"{i}"}] for i in range(100)]
    for split in ("train", "test"):
        write_rows(folder, "openai/gsm8k/main", sums, split)
        write_rows(folder, "HuggingFaceH4/no_robots", [{"prompt": "hi", "messages": each} for each in said], split)
    write_card(folder / "openai/gsm8k", "main", "main/")
    write_card(folder / "HuggingFaceH4/no_robots", "default", "")
    (folder / "chat.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in said))
    return folder


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    folder = tmp_path_factory.mktemp("client") / "venv"
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    for packages in (NEEDS, ("--no-deps", COOKBOOK)):
        command = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"pip cannot install {packages[-1]} here: {done.stderr.strip()[-200:]}")
    # torch, which is the size of all the rest, comes from where the tests run.
    (next(folder.glob("lib/python*/site-packages")) / "torch_of_the_tests.pth").write_text(
        sysconfig.get_path("purelib")
    )
    return python


@pytest.fixture(scope="module")
def address(place, tmp_path_factory):
    data = tmp_path_factory.mktemp("service") / "data"
    command = [sys.executable, "-m", "mettle.cli", "train", "serve", "--base-model", NAME, "--port", "0"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen([*command, "--data", data], stdout=subprocess.PIPE, text=True, env=environment, cwd=place)
    assert child.stdout is not None
    line = child.stdout.readline()
    yield next(word for word in line.split() if word.startswith("http://"))
    child.terminate()
    child.stdout.close()
    child.wait()


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_of_the_cookbook_runs_to_its_end(loop, place, python, address, tmp_path):
    options = [f"base_url={address}", f"model_name={NAME}", f"log_path={tmp_path / 'log'}", *LOOPS[loop].split()]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TINKER_API_KEY": "tml-cook", "TINKER_BASE_URL": address}
    done = subprocess.run(
        [python, "-m", f"tinker_cookbook.recipes.{loop}", *options],
        cwd=place, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    steps = [json.loads(line) for line in (tmp_path / "log" / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) >= 2
