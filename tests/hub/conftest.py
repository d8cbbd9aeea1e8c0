"""Run directories written through the real ledger and shard writer, with rewards, errors, waits and evaluations.

`RunWriter` is also how the pictures in the documentation are made: `python tests/hub/conftest.py FOLDER SECONDS` writes
a finished run and then a live one that goes on for so long.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import httpx
import numpy as np
import pytest
from tests.serving import app_on_a_thread
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mettle.clients.byte_level import BYTE_OF_CHARACTER
from mettle.evals.estimator import mean_over_tasks
from mettle.hub.app import create_app
from mettle.processes.beats import Beat, Wait
from mettle.records.tasks import DropReason, GroupRecord, RolloutRecord, TaskDraw, Turn
from mettle.records.versions import CanaryCheck, WeightVersion
from mettle.storage.evals import EvalPlan, EvalStore
from mettle.storage.ledger import Ledger
from mettle.storage.run_dir import RunDir
from mettle.storage.shards import ShardWriter

ENV = "reverse-text"
SYSTEM = "Reverse the text. Answer with the reversed text and nothing else."
SPECIAL = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<think>", "</think>"]
END, USER, ASSISTANT, SYSTEM_ID = 257, 259, 260, 258
GROUPS, GROUP_SIZE = 8, 8
BEAT_AHEAD_S = 86_400.0
"""A beat that nobody renews is written for later, so that its process counts as alive while the tests run."""
LONG_WAIT_S = 86_400.0
"""What nobody ends may be awaited so long: no page says otherwise because the tests before it took their time."""


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class RunWriter:
    """Writes a run as its processes would, one step at a time."""

    def __init__(
        self,
        path: Path,
        *,
        steps: int,
        started_at: float | None = None,
        seed: int = 0,
        groups: int = GROUPS,
        pid: int | None = None,
    ) -> None:
        started_at = time.time() - 60 if started_at is None else started_at
        self.dir = RunDir(path)
        self.clock = Clock(started_at)
        self.rng = random.Random(seed)
        self.steps, self.groups = steps, groups
        self.ledger = Ledger(self.dir.ledger, clock=self.clock)
        self.shards = ShardWriter(self.dir.rollouts)
        self.example = 0
        self.version = 0
        self.pid = pid or os.getpid()
        self._write_files()
        journal = self.ledger.journal
        for key, value in {
            "state": "running", "started_at": started_at, "max_steps": steps,
            "model": "tiny", "envs": [ENV],
        }.items():  # fmt: skip
            journal.set_fact(key, value)
        for warm in range(10, 70, 10):
            journal.record_metrics(warm, {"sft/loss": 3.0 / warm, "sft/reward": 0.5 * warm / 70})
        for name in ("inference", "orchestrator", "trainer", "hub"):
            journal.record_process(name, "starting", pid=self.pid, restarts=0, exit_code=None)
            journal.record_process(name, "running", pid=self.pid, restarts=0, exit_code=None)
        journal.event("supervisor", "stage", "warmed up the policy by SFT on 512 demonstrations")
        self._publish(0)
        self.evaluate("baseline", 0)

    def skill(self, step: int) -> float:
        return 0.52 + 0.43 / (1 + math.exp(-(step / self.steps - 0.42) * 9))

    def train_step(self, step: int) -> None:
        """Gather, ship and train one step."""
        self.clock.now += 0.25 + self.rng.random() * 0.1
        draws = []
        while len(draws) < self.groups:
            draw = self.scored_group(step)
            if draw is not None:
                draws.append(draw)
        stale = max(0.0, min(2.0, self.rng.gauss(1.1, 0.25)))
        self.ledger.ship(
            step, f"{step:064x}", [d.draw_id for d in draws], num_sequences=len(draws) * GROUP_SIZE,
            num_tokens=1500 + self.rng.randrange(300), staleness=(stale, 2 if step > 2 else 1),
            orchestrator_state={"cursor": self.example},
        )  # fmt: skip
        self.clock.now += 0.4
        weights = WeightVersion(step, str(self.dir.version(step)), f"{step:x}" * 8)
        self.ledger.record_trained(step, weights, [d.draw_id for d in draws])
        self._publish(step)
        self._metrics(step)

    def scored_group(self, step: int) -> TaskDraw | None:
        """One group; None when it was dropped."""
        (draw,) = self.ledger.draw_tasks([(ENV, f"word-{self.example:05d}", 0, self.example)])
        self.example += 1
        self.ledger.dispatch(draw.draw_id)
        self.clock.now += 0.02
        group = self._group(draw, step, self.skill(step), GROUP_SIZE)
        ref = self.shards.append(group)
        spread = max(group.rewards, default=0) - min(group.rewards, default=0)
        drop = DropReason.ZERO_ADVANTAGE if spread < 1e-6 else None
        if len(group.rewards) < GROUP_SIZE - 1:
            drop = DropReason.ERRORS
        self.ledger.record_scored(group, ref, drop=drop)
        return None if drop else draw

    def evaluate(self, kind: str, step: int, tasks: int = 32) -> None:
        """A held-out evaluation."""
        groups = []
        for index in range(tasks):
            draw = TaskDraw(-1, ENV, f"held-out-{index:03d}", 0, index)
            group = self._group(draw, step + 1, self.skill(step), 2, prefix=f"eval-{kind}-{step}-")
            groups.append(group)
        found = mean_over_tasks([group.rewards for group in groups])
        store = EvalStore(self.ledger.database, self.shards, clock=self.clock)
        eval_id = store.begin(EvalPlan(kind, ENV, tasks, 2 * tasks, step))
        store.add(eval_id, groups)
        assert found is not None, "some rollout has a reward"
        store.end(eval_id, mean=found.mean, interval=found.interval, metrics={"exact": found.mean**3})
        self.ledger.journal.event("orchestrator", "eval", f"{kind} evaluation at step {step}: reward {found.mean:.3f}")

    def finish(self) -> None:
        """End the run as its supervisor would."""
        self.evaluate("final", self.version)
        journal = self.ledger.journal
        for name in ("inference", "orchestrator", "trainer"):
            journal.record_process(name, "done", pid=self.pid, restarts=int(name == "trainer"), exit_code=0)
        journal.set_fact("state", "finished")
        journal.set_fact("finished_at", self.clock.now)
        journal.event("supervisor", "finished", f"run finished after {self.version} steps")
        self.ledger.close()

    def leave_running(self, next_step: int) -> None:
        """Stop in the middle of a step, with tasks under way and processes waiting."""
        self.scored_group(next_step)
        draws = self.ledger.draw_tasks([(ENV, f"flying-{i}", 1, 90_000 + i) for i in range(20)])
        for draw in draws[:12]:
            self.ledger.dispatch(draw.draw_id)
        self.clock.now = time.time()
        self.wait("trainer", "batch", f"orchestrator ships step {next_step}", LONG_WAIT_S)
        self.clock.now -= 2.4
        self.wait("orchestrator", "rollouts", "12 groups in flight", LONG_WAIT_S)

    def wait(self, owner: str, edge: str, awaits: str, budget_s: float) -> None:
        """A wait that began at the writer's time, in the beat of its process."""
        now = time.monotonic()
        target = "environments" if edge == "rollouts" else "orchestrator"
        since = now - max(0.0, time.time() - self.clock())
        wait = Wait(owner, edge, target, awaits, since, budget_s)
        self.beat(Beat(owner.partition("/")[0], self.pid, now + BEAT_AHEAD_S, waits=(wait,)))

    def beat(self, beat: Beat) -> None:
        """The sign of life of a process, which stays as it is."""
        self.dir.beats.mkdir(exist_ok=True)
        (self.dir.beats / f"{beat.name}.beat").write_text(json.dumps(asdict(beat)))

    def _publish(self, version: int) -> None:
        weights = WeightVersion(version, str(self.dir.version(version)), f"{version:x}" * 8)
        if version == 0:
            self.ledger.publish(weights)
        self.clock.now += 0.02
        diff = 1.6e-7 + self.rng.random() * 6e-8
        self.ledger.acknowledge(weights, CanaryCheck(version, diff, diff * 7, 256), 12.0 + self.rng.random() * 8)
        self.version = version

    def _metrics(self, step: int) -> None:
        r, journal = self.rng, self.ledger.journal
        wait = abs(r.gauss(0.12, 0.05))
        values = {
            "entropy/mean": 1.25 - self.skill(step) + r.gauss(0, 0.02),
            "mismatch_kl/mean": math.exp(r.gauss(-8.6, 0.35)),
            "loss/total": r.gauss(0, 0.015) - 0.02 * (1 - self.skill(step)),
            "optim/grad_norm": abs(r.gauss(0.55, 0.12)) * (1.4 - self.skill(step)),
            "optim/lr": 3e-4 * 0.5 * (1 + math.cos(math.pi * step / self.steps)),
            "time/wait_for_batch_s": wait,
            "time/step_s": 0.3 + r.gauss(0, 0.02),
            "time/publish_s": 0.04 + abs(r.gauss(0, 0.004)),
            "clip/fraction_high": abs(r.gauss(0.01, 0.004)),
            "rollouts/solved_all": self.skill(step) ** 6,
        }
        journal.record_metrics(step, values)
        if step == max(2, self.steps // 3):
            journal.record_process("trainer", "restarting", pid=self.pid, restarts=1, exit_code=-9)
            journal.event("supervisor", "restart", "trainer was killed (signal 9); restarting in 0.1 s", code=-9)
            journal.record_process("trainer", "starting", pid=self.pid, restarts=1, exit_code=None)
            journal.record_process("trainer", "running", pid=self.pid, restarts=1, exit_code=None)
        if step % max(1, self.steps // 5) == 0 and step < self.steps:
            self.evaluate("interim", step)

    def _group(self, draw: TaskDraw, step: int, skill: float, size: int, prefix: str = "") -> GroupRecord:
        word = "".join(self.rng.choice("abcdefghijklmnoprstuvw") for _ in range(self.rng.randrange(4, 8)))
        rollouts = [self._rollout(f"{prefix}{draw.uid}-{i}", word, step, skill) for i in range(size)]
        rewards = [r.reward for r in rollouts if r.reward is not None]
        mean = sum(rewards) / len(rewards) if rewards else 0.0
        fields = [{name: getattr(r, name) for name in RolloutRecord.__slots__} for r in rollouts]
        for entry in fields:
            entry["advantage"] = None if entry["reward"] is None else entry["reward"] - mean
        return GroupRecord(draw, max(0, step - 2), tuple(RolloutRecord(**entry) for entry in fields))

    def _rollout(self, name: str, word: str, step: int, skill: float) -> RolloutRecord:
        prompt = [
            SYSTEM_ID, *SYSTEM.encode(), END, USER, *word.encode(), END, ASSISTANT,
        ]  # fmt: skip
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": word}]
        if self.rng.random() < 0.004:
            return RolloutRecord(
                name, None, {}, messages, (), error_kind="provider", duration_s=30.0,
                error="ProviderError: POST /v1/generate: connection reset by peer (attempt 3 of 3)",
            )  # fmt: skip
        text, logprobs = "", []
        for wanted in reversed(word):
            is_right = self.rng.random() < skill
            text += wanted if is_right else self.rng.choice("abcdefghijklmnoprstuvw")
            p = min(0.9999, max(1e-4, self.rng.betavariate(8, 1.5) * skill if is_right else (1 - skill) * 0.3))
            logprobs.append(math.log(p))
        logprobs.append(math.log(0.97))
        ids = [*text.encode(), END]
        newest = step - 1
        oldest = max(0, newest - self.rng.choice([0, 1, 1, 1, 2]))
        cut = self.rng.randrange(1, len(ids))
        versions = [oldest] * cut + [min(newest, oldest + 1)] * (len(ids) - cut)
        turn = Turn(
            0, np.array(prompt, np.int32), np.array(ids, np.int32),
            np.array(logprobs, np.float32), np.array(versions, np.int32),
        )  # fmt: skip
        reward = difflib.SequenceMatcher(None, word[::-1], text).ratio()
        return RolloutRecord(
            name, reward, {"similarity": reward, "exact": float(text == word[::-1])},
            [*messages, {"role": "assistant", "content": text}], (turn,), "stop", False,
            0.2 + self.rng.random() * 0.3, answer=word[::-1],
        )  # fmt: skip

    def _write_files(self) -> None:
        path = self.dir.path
        self.dir.model.mkdir(parents=True)
        (self.dir.model / "tokenizer.json").write_text(json.dumps(tokenizer_document()))
        (path / "run.toml").write_text(
            f'max_steps = {self.steps}\nseed = 0\n\n[model]\nname = "tiny"\n\n[orchestrator]\nmax_staleness = 2\n'
            f'\n[trainer.optim]\nlr = 3e-4\nschedule = "cosine"\n\n[[env]]\nid = "{ENV}"\n'
        )
        (path / "sources.json").write_text(
            json.dumps({"max_steps": "--max-steps", "trainer.optim.lr": "quickstart.toml:12", "env": "quickstart.toml"})
        )
        self.dir.logs.mkdir()
        lines = [
            {"time": self.clock.now + i, "level": "info", "logger": "mettle.trainer.loop", "message": "stepped",
             "step": i, "loss": 0.01} for i in range(40)
        ]  # fmt: skip
        lines.append(
            {"time": self.clock.now + 50, "level": "warning", "logger": "mettle.trainer", "message": "slow disk"}
        )
        (self.dir.logs / "trainer.log").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (self.dir.logs / "trainer.out").write_text("plain words of the process\n")


def tokenizer_document() -> dict[str, object]:
    """A Hugging Face tokenizer.json over bytes, with the special tokens of the built-in policy."""
    made = Tokenizer(models.BPE(vocab=BYTE_OF_CHARACTER, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    document: dict[str, object] = json.loads(made.to_str())
    return document


def write_finished(
    path: Path, *, steps: int, groups: int = GROUPS, seed: int = 0, started_at: float | None = None
) -> None:
    writer = RunWriter(path, steps=steps, groups=groups, seed=seed, started_at=started_at or time.time() - 900)
    for step in range(1, steps + 1):
        writer.train_step(step)
    writer.finish()


def write_live(path: Path, *, steps: int, done: int, groups: int = GROUPS, seed: int = 1) -> RunWriter:
    writer = RunWriter(path, steps=steps, groups=groups, seed=seed, started_at=time.time() - done * 1.0)
    for step in range(1, done + 1):
        writer.train_step(step)
    writer.leave_running(done + 1)
    return writer


def go_live(path: Path, *, steps: int, done: int, seconds: float) -> None:
    """A run that is `done` steps on, then goes on at about a step a second, as its processes would write it."""
    writer = RunWriter(path, steps=steps, seed=1, started_at=time.time() - done * 1.0)
    for step in range(1, done + 1):
        writer.train_step(step)
    end, step = time.time() + seconds, done
    draws = writer.ledger.draw_tasks([(ENV, f"flying-{i}", 1, 90_000 + i) for i in range(20)])
    for draw in draws[:12]:
        writer.ledger.dispatch(draw.draw_id)
    while time.time() < end and step < steps:
        step += 1
        writer.wait("trainer", "batch", f"orchestrator ships step {step}", 600)
        time.sleep(0.6)
        writer.clock.now = time.time() - 0.8
        writer.train_step(step)
        writer.clock.now = time.time()
        writer.wait("orchestrator", "rollouts", "12 groups in flight", 120)
        time.sleep(0.3)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run and one that goes on. Read only: a test that changes a run writes its own."""
    folder = tmp_path_factory.mktemp("runs")
    write_finished(folder / "done", steps=10, groups=3)
    write_live(folder / "live", steps=20, done=6, groups=2).ledger.close()
    return folder


@pytest.fixture(scope="session")
def run_writer() -> type[RunWriter]:
    """Writes a run of a test's own."""
    return RunWriter


@pytest.fixture(scope="session")
def byte_tokenizer() -> dict[str, object]:
    """A parsed tokenizer.json over bytes."""
    return tokenizer_document()


@pytest.fixture
def browse() -> Callable[[Path], httpx.AsyncClient]:
    """A client of a Hub over a folder."""

    def client(folder: Path) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app=create_app(folder), raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://localhost:7860")

    return client


@pytest.fixture(scope="session")
def live_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, RunWriter]]:
    """A Hub on a port of its own over a run that the test carries on: its address and the run's writer."""
    folder = tmp_path_factory.mktemp("followed")
    writer = write_live(folder / "followed", steps=30, done=5, groups=2)
    with app_on_a_thread(create_app(folder)) as url:
        yield url, writer


if __name__ == "__main__":
    root = Path(sys.argv[1])
    write_finished(root / "reverse-text-seed-0", steps=150)
    write_finished(root / "reverse-text-seed-1", steps=60, seed=4, started_at=time.time() - 7200)
    go_live(root / "reverse-text-live", steps=150, done=90, seconds=float(sys.argv[2]))


@pytest.fixture
def hub(tmp_path):
    """A Hub with ann (an admin), bob and eve."""
    from tests.hub.lab_writer import HubWriter

    made = HubWriter(tmp_path / "hub")
    made.person("ann", is_admin=True)
    made.person("bob")
    made.person("eve")
    yield made
    made.close()
