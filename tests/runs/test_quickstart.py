"""The main job, as a person starts it, on a machine without a network."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from mettle.runs.quickstart import QuickstartOptions, recipe
from mettle.storage.ledger import Ledger

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]

LOOPBACK_ONLY = """
import fcntl, os, socket, struct, sys
with socket.socket() as probe:
    request = struct.pack("16sh14x", b"lo", 0x1 | 0x40)  # IFF_UP | IFF_RUNNING
    fcntl.ioctl(probe, 0x8914, request)  # SIOCSIFFLAGS
assert [name for _, name in socket.if_nameindex()] == ["lo"], socket.if_nameindex()
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def isolated(arguments):
    """The command inside a network namespace in which there is nothing but loopback."""
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-rn", "true"], check=False, capture_output=True).returncode:
        pytest.skip("this host makes no network namespaces")
    return [unshare, "-rn", sys.executable, "-c", LOOPBACK_ONLY, *arguments]


@pytest.mark.parametrize("steps", [pytest.param(None, id="whole", marks=pytest.mark.nightly), 25])
def test_a_policy_learns_with_no_connection_leaving_the_machine(tmp_path, steps):
    """In a few steps the policy begins to learn, and everything else is as in a whole run."""
    folder = tmp_path / "run"
    arguments = ["-m", "mettle.cli", "quickstart", "--seed", "7", "--dir", str(folder), "--no-browser", "--json"]
    arguments += ["--steps", str(steps)] if steps else []
    done = subprocess.run(isolated(arguments), capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout)
    baseline, final = summary["baseline"]["mean"], summary["final"]["mean"]
    assert 0.6 < baseline < 0.85, "the warm-up ends at .7 of the reward by its own, smaller sample"
    assert final > baseline
    if steps is None:
        assert final >= 0.93, "what each of the published seeds reaches"
    assert summary["steps"] == (steps or summary["steps"])
    assert summary["state"] == "finished"
    assert summary["canary_mean_abs_diff"] <= 1e-5
    assert summary["staleness_max"] <= 2
    assert summary["peak_memory_bytes"] < 2e9
    assert summary["trained_more_than_once"] == 0
    assert summary["restarts"] == 0
    assert (folder / "policy" / "model.safetensors").exists()
    check_ledger(folder, summary["steps"])


def check_ledger(folder, steps):
    ledger = Ledger(folder / "run.db", is_read_only=True)
    try:
        assert [batch.trainings for batch in ledger.batches()] == [1] * steps
        counts = ledger.task_counts()
        assert {name.split(":")[0] for name in counts} <= {"trained", "dropped"}
        assert steps <= counts["trained"] <= steps * 16
        has_acked = [version.acked_at is not None for version in ledger.versions()]
        assert has_acked[-1]
        # On a busy host the next may be published before one is pushed, which is then passed over.
        assert sum(has_acked) >= min(0.9 * len(has_acked), len(has_acked) - 4)
    finally:
        ledger.close()


@pytest.mark.parametrize(("steps", "num_warm_up_steps"), [(1, 0), (24, 4), (100, 20), (400, 20)])
def test_a_short_run_raises_the_learning_rate_for_a_fifth_of_it(steps, num_warm_up_steps):
    assert recipe(QuickstartOptions(steps=steps)).config.trainer.scheduler.warmup_steps == num_warm_up_steps
