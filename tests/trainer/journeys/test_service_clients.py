"""The official clients against the service: each version in an environment of its own, made by pip.

Without an index that has them these tests are skipped and say so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv

import pytest
from safetensors.torch import load_file, save_file

from mettle.hub.accounts.people import create_person
from mettle.hub.accounts.tokens import create_token
from mettle.hub.lab import open_lab
from mettle.trainer.policy import write_policy
from mettle.trainer.presets import PolicyConfig

MINI = PolicyConfig(num_layers=2, hidden_size=32, mlp_size=48, num_heads=2, num_kv_heads=1, head_dim=16)
PINS = ("0.16.1", "0.30.4", "0.38.0")
ABSENT = {
    "0.16.1": {"external_weights"},
    "0.30.4": set(),
    "0.38.0": {"archive"},
}

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(1800)]


def environment(folder, *packages):
    """The Python of a new environment with packages from pip."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    command = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"pip cannot install {' '.join(packages)} here: {done.stderr.strip()[-200:]}")
    return python


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_policy(tmp_path_factory.mktemp("base") / "org" / "tiny", MINI)


@pytest.fixture
def address(base, tmp_path):
    """A service in a process of its own, by the command that a person types."""
    arguments = ["--base-model", str(base), "--port", "0", "--data", str(tmp_path / "data")]
    child = subprocess.Popen(
        [sys.executable, "-m", "mettle.cli", "train", "serve", *arguments],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert child.stdout is not None
    line = child.stdout.readline()
    yield next(word for word in line.split() if word.startswith("http://"))
    child.terminate()
    child.stdout.close()
    child.wait()


@pytest.fixture
def under_a_hub(base, tmp_path):
    """The address of the same under the port of a Hub, by the command that a person types, and a key."""
    lab = open_lab(tmp_path / "hub")
    with lab.database.write() as c:
        ann = create_person(c, "ann", "no password", is_admin=True)
        key = "tml-" + create_token(c, ann.id, "steps", ["training:write"])[1]
    lab.close()
    options = [
        "--models",
        str(base.parent),
        "--train-models",
        '["tiny=org/tiny"]',
        "--no-sandboxes",
        "--no-check-pushes",
    ]
    child = subprocess.Popen(
        [sys.executable, "-m", "mettle.cli", "hub", "serve", "--data", str(tmp_path / "hub"), "--port", "0", *options],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert child.stdout is not None
    lines = [child.stdout.readline() for _ in range(2)]
    yield next(word for word in lines[1].split("=") if word.startswith("http://")).split()[0], key
    child.terminate()
    child.stdout.close()
    child.wait()


@pytest.mark.parametrize("pin", PINS)
def test_every_step_of_the_sdk_runs(pin, address, tmp_path):
    take_every_step(pin, address, "tml-steps", tmp_path)


@pytest.mark.parametrize("pin", PINS)
def test_every_step_of_the_sdk_runs_under_a_hubs_port(pin, under_a_hub, tmp_path):
    take_every_step(pin, *under_a_hub, tmp_path)


def take_every_step(pin, address, key, tmp_path):
    python = environment(tmp_path / "client", f"tinker=={pin}")
    script = os.path.join(os.path.dirname(__file__), "sdk_steps.py")
    done = subprocess.run(
        [python, script, address, "org/tiny", sysconfig.get_path("purelib")],
        capture_output=True, text=True, check=False, cwd=tmp_path,
        env={**os.environ, "TINKER_TELEMETRY": "0", "TINKER_API_KEY": key},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout.splitlines()[-1])
    wrong = {name: result for name, result in results.items() if result != "ok"}
    assert {name for name, result in wrong.items() if result.startswith("absent")} == set(wrong), wrong
    assert set(wrong) == ABSENT[pin]


PEFT = """
import json, sys
sys.path.append(sys.argv[4])
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
base = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
ids = torch.tensor([json.loads(sys.argv[3])])
model = PeftModel.from_pretrained(base, sys.argv[2]).eval()
with torch.no_grad():
    logprobs = model(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
print(json.dumps(logprobs.tolist()))
"""


def test_peft_gives_the_logprobs_of_an_adapter_of_the_service(base, tmp_path):
    import torch

    from mettle.trainer.service.core import LoraCore
    from mettle.trainer.service.records import AdapterSpec

    core = LoraCore(base, torch.device("cpu"), pass_tokens=512, max_length=None)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    core.save(core.create("one", AdapterSpec(4, 1)), adapter, has_optimizer=False)
    state = load_file(adapter / "adapter_model.safetensors")
    generator = torch.Generator().manual_seed(0)
    drawn = {name: torch.randn(each.shape, generator=generator) * 0.2 for name, each in state.items()}
    save_file(drawn, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    ids = list(b"hello world")
    own = core.score(adapter, ids)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert (own - core.score(None, ids)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]).abs().max() > 0.01
    python = environment(tmp_path / "client", "--no-deps", "peft", "accelerate")
    done = subprocess.run(
        [python, "-c", PEFT, base, adapter, json.dumps(ids), sysconfig.get_path("purelib")],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = torch.tensor(json.loads(done.stdout.splitlines()[-1]))
    assert (theirs - own).abs().max() < 1e-5
