"""A run on disk with everything but an engine and a trainer, and stand-ins for those over real HTTP."""

import asyncio
import json
import random
import threading

import pytest
from aiohttp import web

from mettle.records.versions import WeightVersion
from mettle.storage.files import write_json
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir
from mettle.trainer.policy import write_tokenizer


class StandIn:
    """An inference server that reverses words, rightly in half of its answers. Its canary can be made to fail."""

    def __init__(self, run_dir):
        self.run_dir = run_dir
        self.version = 0
        self.canary_diff = 0.0
        self.requests = []
        self.pushed = []
        self.delay_s = 0.0
        self._rng = random.Random(0)
        self._started = threading.Event()
        self._loop = None

    def start(self):
        self._started.clear()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._started.wait(60)

    def stop(self):
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(60)
            self._loop = None

    def _serve(self):
        asyncio.run(self._main())

    async def _main(self):
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.add_routes(
            [
                web.get("/health", self._health),
                web.post("/admin/weights", self._weights),
                web.post("/v1/generate", self._generate),
            ]
        )
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0]
        ready = {"base_url": f"http://{host}:{port}/v1", "host": host, "port": port, "pid": port}
        write_json(self.run_dir.endpoint("inference"), ready)
        self._started.set()
        await self._stopping.wait()
        await runner.cleanup()

    async def _health(self, request):
        return web.json_response({"status": "ok", "version": self.version})

    async def _weights(self, request):
        body = await request.json()
        self.pushed.append(body["version"])
        if self.canary_diff > 1e-3:
            message = f"canary differs by {self.canary_diff}"
            return web.json_response({"error": {"message": message}}, status=409)
        self.version = body["version"]
        canary = {"mean_abs_diff": self.canary_diff, "max_abs_diff": 2 * self.canary_diff, "num_tokens": 64}
        return web.json_response({"version": self.version, "load_ms": 1.0, "swap_ms": 1.0, "canary": canary})

    async def _generate(self, request):
        body = await request.json()
        self.requests.append(body)
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        # The prompt is <|user|>reverse WORD<|end|><|assistant|>, one id a byte.
        said = bytes(i for i in body["prompt_ids"] if i < 256).decode()
        word = said.rsplit(" ", 1)[-1]
        choices = []
        for index in range(body["n"]):
            answer = word[::-1] if self._rng.random() < 0.5 else word
            ids = [*answer.encode(), 257]
            choices.append(
                {
                    "index": index,
                    "token_ids": ids,
                    "logprobs": [-0.5] * len(ids),
                    "versions": [self.version] * len(ids),
                    "finish_reason": "stop",
                }
            )
        return web.json_response({"request_id": "r", "model": "policy", "prompt_tokens": 1, "choices": choices})


class Trainer:
    """Trains nothing, but keeps the accounts and publishes as a trainer does."""

    def __init__(self, run_dir):
        self.run_dir = run_dir
        self._ledger = Ledger(run_dir.ledger)
        self.step = 0

    def weights(self, version):
        return WeightVersion(version, str(self.run_dir.version(version)), f"digest-{version}")

    def publish_initial(self):
        self._ledger.publish(self.weights(0))

    def train_what_is_shipped(self):
        while self._ledger.batch(self.step + 1) is not None:
            self.step += 1
            draws = [draw_id for draw_id, _ in self._ledger.groups_of(self.step)]
            self._ledger.record_trained(self.step, self.weights(self.step), draws)

    def close(self):
        self._ledger.close()


@pytest.fixture
def run_dir(tmp_path):
    made = RunDir(tmp_path / "run")
    made.model.mkdir(parents=True)
    write_tokenizer(made.model, max_positions=128)
    return made


@pytest.fixture
def stand_in(run_dir):
    engine = StandIn(run_dir)
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture
def trainer(run_dir):
    made = Trainer(run_dir)
    made.publish_initial()
    yield made
    made.close()


@pytest.fixture
def settings():
    """The orchestrator's configuration, as it lies in the run directory."""
    return {
        "max_steps": 3,
        "batch_size": 16,
        "group_size": 4,
        "envs": [{"id": "reverse-text", "args": {"num_train": 50, "num_eval": 10}, "name": "words"}],
        "env_workers": 0,
        "sampling": {"max_tokens": 8},
        "eval": {"num_examples": 5, "interval": 0},
        "health_s": 0.2,
        "poll_s": 0.02,
    }


@pytest.fixture
def write_config(run_dir):
    def write(values):
        path = run_dir.config("orchestrator")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))

    return write
