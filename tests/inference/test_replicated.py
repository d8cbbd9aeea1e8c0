"""Replicas: a dead one gives its requests away and comes back with the newest version; an update is all or none."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from policies import publish
from transformers import PreTrainedModel

from mettle.clients.renderer import Renderer
from mettle.errors import MettleError, ServiceError, UserError
from mettle.inference.config import InferenceConfig
from mettle.inference.engine.mock import MockEngine
from mettle.inference.engine.protocol import (
    EngineBusy,
    EngineLost,
    Generation,
    GenerationRequest,
    TokenListener,
    WeightsRejected,
)
from mettle.inference.launch import open_engine
from mettle.inference.replicated import ReplicaAwaited, ReplicatedEngine, Serving
from mettle.records.sampling import SamplingParams
from mettle.web.backoff import Backoff

WAIT_S = 100.0
AT_ONCE = Backoff(0.0, 0.0)


class Kept:
    """A listener that waits for the end."""

    def __init__(self) -> None:
        self.outcome: Generation | MettleError | None = None
        self._ended = threading.Event()

    def on_token(self, event: Any) -> None:
        return

    def on_finish(self, generation: Generation) -> None:
        self.outcome = generation
        self._ended.set()

    def on_failure(self, error: MettleError) -> None:
        self.outcome = error
        self._ended.set()

    def wait(self) -> Generation:
        assert self._ended.wait(WAIT_S)
        assert isinstance(self.outcome, Generation), self.outcome
        return self.outcome


class Mortal(MockEngine):
    """Dies when it is told to, and fails what it has as a lost process would."""

    def __init__(self, serving: Serving) -> None:
        super().__init__(version=serving.version)
        self.began_with = serving
        self.refuses = False
        self._heard: dict[str, TokenListener] = {}
        self._is_dead = False

    def submit(self, request: GenerationRequest, listener: TokenListener) -> None:
        self._heard[request.request_id] = listener
        super().submit(request, listener)

    def update_weights(self, folder: Path, version: int) -> Any:
        if self.refuses:
            raise WeightsRejected("the canary differs")
        return super().update_weights(folder, version)

    def die(self) -> None:
        with self._lock:
            lost, self._taken = dict(self._taken), {}
        self._is_dead = self._is_closed = True
        for taken in lost.values():
            taken.fail(EngineLost("killed"))

    def status(self) -> Any:
        found = super().status()
        return found if not self._is_dead else type(found)(0, 0, 0, False, False, 1, 1, 1)


class Fleet:
    """Replicas of `Mortal`, and everyone that was ever started."""

    def __init__(self, size: int = 2) -> None:
        self.started: list[list[Mortal]] = [[] for _ in range(size)]
        self.may_start = threading.Event()
        self.may_start.set()
        self.deaths: list[MettleError] = []
        self.engine = ReplicatedEngine(
            [self._starter(number) for number in range(size)], Serving(None, 0), backoff=AT_ONCE,
            on_death=self.deaths.append,
        )  # fmt: skip

    def _starter(self, number: int) -> Callable[[Serving], Mortal]:
        def start(serving: Serving) -> Mortal:
            assert self.may_start.wait(WAIT_S)
            self.started[number].append(Mortal(serving))
            return self.started[number][-1]

        return start

    def now(self, number: int) -> Mortal:
        return self.started[number][-1]

    def ask(self, name: str, prompt: tuple[int, ...] = (1, 2)) -> Kept:
        kept = Kept()
        self.engine.submit(GenerationRequest(name, prompt, SamplingParams(max_tokens=4)), kept)
        return kept


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    made = Fleet()
    yield made
    made.may_start.set()
    made.engine.close()


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_requests_are_spread_and_a_prompt_finds_its_replica_again(fleet: Fleet) -> None:
    for number in range(2):
        fleet.now(number).hold()
    first = [fleet.ask(f"a{i}", (i, 1)) for i in range(4)]
    assert [fleet.now(n).status().num_waiting for n in range(2)] == [2, 2]
    again = fleet.ask("b", (1, 1))  # the prompt of a1, which went to the second
    assert [fleet.now(n).status().num_waiting for n in range(2)] == [2, 3]
    for number in range(2):
        fleet.now(number).release()
    for kept in [*first, again]:
        kept.wait()


def test_a_completion_says_which_replica_sampled_it(fleet: Fleet) -> None:
    for number in range(2):
        fleet.now(number).hold()
    asked = [fleet.ask(f"a{i}", (i, 1)) for i in range(4)]
    fleet.may_start.clear()
    fleet.now(0).die()
    until(lambda: fleet.engine.num_serving == 1)  # what it had went to the other
    fleet.now(1).release()
    assert {choice.replica for kept in asked for choice in kept.wait().choices} == {"replica-1"}


def test_the_requests_of_a_dead_replica_go_to_another_which_answers_them(fleet: Fleet) -> None:
    for number in range(2):
        fleet.now(number).hold()
    asked = [fleet.ask(f"r{i}", (i, 7)) for i in range(6)]
    fleet.may_start.clear()
    fleet.now(0).die()
    until(lambda: fleet.engine.num_serving == 1)
    fleet.now(1).release()
    assert [kept.wait().choices[0].token_ids for kept in asked] == [[i, 7] for i in range(6)]
    assert fleet.engine.status().is_alive


def test_a_replica_comes_back_with_the_newest_version_before_it_serves(
    fleet: Fleet, model: PreTrainedModel, tmp_path: Path
) -> None:
    fleet.may_start.clear()
    fleet.now(0).die()
    until(lambda: fleet.engine.num_serving == 1)
    folder = publish(model, tmp_path, 1)
    assert fleet.engine.update_weights(folder, 1).version == 1
    assert fleet.engine.status().version == 1
    fleet.may_start.set()
    until(lambda: fleet.engine.num_serving == 2)
    assert fleet.now(0).status().version == 1


def test_an_update_that_one_replica_refuses_is_served_by_none(
    fleet: Fleet, model: PreTrainedModel, tmp_path: Path
) -> None:
    fleet.engine.update_weights(publish(model, tmp_path, 1), 1)
    fleet.now(1).refuses = True
    with pytest.raises(WeightsRejected):
        fleet.engine.update_weights(publish(model, tmp_path, 2), 2)
    assert fleet.engine.status().version == 1
    assert [fleet.now(n).status().version for n in range(2)] == [1, 1]


def test_a_pause_holds_for_a_replica_that_comes_back(fleet: Fleet) -> None:
    fleet.engine.pause("keep")
    fleet.now(0).die()
    until(lambda: len(fleet.started[0]) == 2 and fleet.engine.num_serving == 2)
    assert fleet.now(0).status().is_paused
    fleet.engine.resume()
    assert not fleet.now(0).status().is_paused


def test_without_a_replica_a_request_may_come_again(fleet: Fleet) -> None:
    fleet.may_start.clear()
    for number in range(2):
        fleet.now(number).die()
    until(lambda: fleet.engine.num_serving == 0)
    with pytest.raises(EngineBusy, match="no replica"):
        fleet.ask("x")


def test_a_replica_that_never_starts_ends_the_whole() -> None:
    def refuse(_: Serving) -> MockEngine:
        raise UserError("no model there")

    with pytest.raises(UserError, match="no model there"):
        ReplicatedEngine([refuse, lambda _: MockEngine()], Serving(None, 0))


def test_a_replica_that_does_not_come_back_is_a_death_that_is_told() -> None:
    fleet = Fleet(1)
    fleet.started[0].append(fleet.now(0))

    def fail(_: Serving) -> Mortal:
        raise ServiceError("no memory")

    fleet.engine._replicas[0].start = fail
    fleet.now(0).die()
    until(lambda: bool(fleet.deaths))
    assert "no memory" in str(fleet.deaths[0])
    fleet.engine.close()


@pytest.mark.e2e
def test_two_processes_serve_and_one_that_is_killed_comes_back_with_the_newest_weights(
    policy_folder: Path, renderer: Renderer, other_model: PreTrainedModel, tmp_path: Path
) -> None:
    config = InferenceConfig(model=policy_folder, replicas=2, max_slots=8)
    engine = open_engine(config, eos_token_ids=renderer.stop_token_ids, logs=tmp_path / "logs")
    assert isinstance(engine, ReplicatedEngine)
    try:
        assert engine.update_weights(publish(other_model, tmp_path, 1), 1).canary is not None
        victim = engine._replicas[0].engine
        assert victim is not None
        victim._process.signal(signal.SIGKILL)  # type: ignore[attr-defined]
        until(lambda: engine.num_serving == 2 and engine._replicas[0].engine is not victim)
        kept = [Kept() for _ in range(4)]
        for i, listener in enumerate(kept):
            params = SamplingParams(max_tokens=4, ignore_eos=True)
            engine.submit(GenerationRequest(f"r{i}", (1, 2, i), params, n=4), listener)
        versions = {v for listener in kept for choice in listener.wait().choices for v in choice.versions}
        assert versions == {1}
        names = {choice.replica for listener in kept for choice in listener.wait().choices}
        assert names == {"inference-0", "inference-1"}
        assert [replica.engine.status().version for replica in engine._replicas if replica.engine] == [1, 1]
    finally:
        engine.close()


def test_a_replica_that_others_start_is_awaited_and_joins_with_the_newest_version(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    there: list[bool] = []

    def start_late(serving: Serving) -> Mortal:
        if not there:
            raise ReplicaAwaited("no server has said where it answers")
        return Mortal(serving)

    engine = ReplicatedEngine([Mortal, start_late], Serving(None, 0), backoff=AT_ONCE)
    try:
        assert engine.num_serving == 1
        engine.update_weights(publish(model, tmp_path, 3), 3)
        there.append(True)
        deadline = time.monotonic() + WAIT_S
        while engine.num_serving < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert engine.status().version == 3
    finally:
        engine.close()
