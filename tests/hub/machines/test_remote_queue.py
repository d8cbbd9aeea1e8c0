"""What both queues promise to the worker of evaluations: the Hub's own, and that of a machine that has joined."""

from __future__ import annotations

import time

import pytest
from tests.hub.machines.conftest import ASKED, BEGINNING, HOSTED, leaving_results

from mettle.hub.evaluating.local_queue import LocalQueue
from mettle.hub.evaluating.worker import EvaluationWorker


@pytest.fixture
def bob(hub):
    return hub.with_token("bob")


@pytest.fixture(params=["local", "joined"])
def new_worker(request, hub, machine):
    made = []

    def make():
        if request.param == "joined":
            return machine().worker
        made.append(EvaluationWorker(LocalQueue(hub.lab)))
        return made[-1]

    yield make
    for each in made:
        each.drop()


def until(worker, said, *paths):
    """Step until the file is there and was made known."""
    for _ in range(3000):
        if all(path().exists() for path in paths):
            break
        time.sleep(0.01)
    else:
        raise AssertionError(f"{said} did not come")


def status_of(client, result):
    return client.get(f"/api/v1/evaluations/{result}").json()["status"]


def submitted(client, **more):
    return client.post(HOSTED, json={**ASKED, **more}).json()["evaluation_id"]


def wait_for_child(worker):
    worker._child[1].wait(60)


def test_what_is_done_counts_once_and_its_log_is_shown_without_secrets(hub, bob, new_worker, program):
    bob.post("/api/v1/secrets/", json={"name": "MY_KEY", "value": "sk-123456"})
    result = submitted(bob)
    program(leaving_results(5) + "; import os; print('the key is', os.environ['MY_KEY'])")
    worker = new_worker()
    worker.step()
    assert status_of(bob, result) == "RUNNING"
    wait_for_child(worker)
    worker.step()
    shown = bob.get(f"/api/v1/evaluations/{result}").json()
    assert (shown["status"], shown["avg_score"], shown["total_samples"]) == ("COMPLETED", 0.5, 5)
    assert "the key is [MY_KEY]" in bob.get(f"{HOSTED}/{result}/logs").json()["logs"]
    worker.step()
    assert worker.doing is None
    assert bob.get(f"/api/v1/evaluations/{result}").json()["total_samples"] == 5


def test_one_that_fails_says_why(bob, new_worker, program):
    result = submitted(bob)
    program("import sys; print('error: no luck'); sys.exit(2)")
    worker = new_worker()
    worker.step()
    wait_for_child(worker)
    worker.step()
    assert (status_of(bob, result), bob.get(f"{HOSTED}/{result}/logs").json()["error"]) == ("FAILED", "no luck")


def test_one_that_is_stopped_is_ended_and_does_not_wait_again(bob, new_worker, program):
    result = submitted(bob)
    program("import time; time.sleep(600)")
    worker = new_worker()
    worker.step()
    bob.patch(f"{HOSTED}/{result}/cancel")
    worker.step()
    wait_for_child(worker)
    worker.step()
    assert status_of(bob, result) == "CANCELLED"
    worker.step()
    assert worker.doing is None


def test_the_next_worker_goes_on_with_what_one_has_left(bob, new_worker, program, hub):
    result = submitted(bob)
    program(BEGINNING)
    first, second = new_worker(), new_worker()
    first.step()
    folder = first.doing.folder
    until(first, "a beginning", lambda: folder / "results/a/b/begun")
    first.drop()
    assert first.doing is None
    program(leaving_results(3))
    second.step()
    wait_for_child(second)
    second.step()
    assert status_of(bob, result) == "COMPLETED"
    log = bob.get(f"{HOSTED}/{result}/logs").json()["logs"]
    assert log.splitlines() == ["begun", "found ['begun']"]


def test_one_after_the_other_in_the_order_in_which_they_came(bob, new_worker, program):
    first, second = submitted(bob, name="one"), submitted(bob, name="two")
    program(leaving_results(1))
    worker = new_worker()
    for result in (first, second):
        worker.step()
        assert status_of(bob, result) == "RUNNING"
        wait_for_child(worker)
        worker.step()
        assert status_of(bob, result) == "COMPLETED"
