"""torch's AdamW to the bit, in a process that has never imported torch's compiler."""

import subprocess
import sys

import torch

from mettle.trainer.uncompiled import UncompiledAdamW

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, "foreach": False}


def trained(optimizer_type):
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(5, 3)), torch.nn.Parameter(torch.randn(7))]
    optimizer = optimizer_type(weights, **OPTIONS)
    for step in range(4):
        for weight in weights:
            weight.grad = torch.sin(weight.detach() + step)
        optimizer.step()
    return weights, optimizer.state_dict()


def test_its_steps_and_state_are_those_of_torch():
    (weights, state), (expected, expected_state) = trained(UncompiledAdamW), trained(torch.optim.AdamW)
    assert all(torch.equal(one, other) for one, other in zip(weights, expected, strict=True))
    assert state["param_groups"] == expected_state["param_groups"]
    for number, own in expected_state["state"].items():
        assert all(torch.equal(state["state"][number][name], value) for name, value in own.items())


def test_neither_making_one_nor_a_step_imports_the_compiler():
    code = (
        "import sys, torch\n"
        "from mettle.trainer.uncompiled import UncompiledAdamW\n"
        "weight = torch.nn.Parameter(torch.ones(3)); weight.grad = torch.ones(3)\n"
        "UncompiledAdamW([weight], foreach=False).step()\n"
        "assert weight[0] < 1, weight\n"
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr
