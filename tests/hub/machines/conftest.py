"""Machines that join a Hub in this process, and programs that stand for `mettle eval`."""

from __future__ import annotations

import json
import subprocess
import sys

import httpx
import pytest
from tests.hub.lab_writer import InProcess

import mettle
from mettle.envs.packages.registry import find_environment
from mettle.hub.accounts.identifiers import digest_of, new_secret
from mettle.hub.evaluating import worker
from mettle.hub.machines import fleet
from mettle.hub.machines.machine_client import MachineClient
from mettle.hub.machines.remote_queue import RemoteQueue

HOSTED = "/api/v1/hosted-evaluations"
ENVIRONMENT = "reverse-text"
ASKED = {
    "environment": ENVIRONMENT, "inference_model": "gpt",
    "eval_config": {"api_base_url": "http://x.test/v1", "num_examples": 2},
}  # fmt: skip


def facts(**more):
    return {"environments": {ENVIRONMENT: find_environment(ENVIRONMENT).version}, "cores": 2, "torch": "2", **more}


class Cut(httpx.BaseTransport):
    """A network that is there until it `is_cut`."""

    def __init__(self, inner):
        self.inner, self.is_cut = inner, False

    def handle_request(self, request):
        if self.is_cut:
            raise httpx.ConnectError("the cable is out", request=request)
        return self.inner.handle_request(request)


class Machine:
    """One that has joined."""

    def __init__(self, hub, folder, name, told):
        with hub.lab.database.write() as c:
            _, token = fleet.invite(c, "ann", name)
        self.network = Cut(InProcess(hub.anonymous()))
        self.secret = new_secret(fleet.SECRET_PREFIX)
        self.client = MachineClient("http://testserver", self.secret, transport=self.network)
        self.id = self.client.join(token, digest_of(self.secret), told)["machine_id"]
        self.queue = RemoteQueue(self.client, folder, lambda: told, beat_s=0.0)
        self.worker = worker.EvaluationWorker(self.queue)

    def kill(self):
        """As `kill -9` does: the child goes with it, and nobody is told."""
        self.worker._kill()
        self.worker._child = None


@pytest.fixture
def machine(hub, tmp_path):
    made = []

    def make(name="gpu-1", **more):
        made.append(Machine(hub, tmp_path / f"machine-{len(made)}", name, facts(**more)))
        return made[-1]

    yield make
    for each in made:
        if each.worker._child is not None:
            each.kill()
        each.client.close()


@pytest.fixture
def program(monkeypatch):
    """Let the worker start this code in place of `mettle eval`; `sys.argv[1]` is its folder."""
    popen = subprocess.Popen

    def use(code):
        monkeypatch.setattr(
            worker.subprocess, "Popen", lambda words, **more: popen([sys.executable, "-c", code, words[-1]], **more)
        )

    return use


def leaving_results(num):
    """A program that leaves so many rollouts, and goes on with those that were there."""
    rows = "\n".join(json.dumps({"example_id": i, "reward": i / 4, "prompt": [], "completion": []}) for i in range(num))
    return (
        "import sys; from pathlib import Path; f = Path(sys.argv[1]) / 'results/a/b';"
        "print('found', sorted(p.name for p in f.glob('*')), flush=True); f.mkdir(parents=True, exist_ok=True);"
        f"(f / 'results.jsonl').write_text({rows!r}); (f / 'metadata.json').write_text('{{\"num_examples\": {num}}}')"
    )


BEGINNING = (
    "import sys, time; from pathlib import Path; f = Path(sys.argv[1]) / 'results/a/b'; f.mkdir(parents=True);"
    "print('begun', flush=True); (f / 'begun').write_text('half'); time.sleep(600)"  # the file says that it has said so
)


def version():
    return mettle.__version__
