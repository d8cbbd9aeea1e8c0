"""Checks of pushes: taken one after the other, begun again after a kill, and a failed one stops hosted runs."""

from __future__ import annotations

import json
import signal
import sys

import pytest
from sqlalchemy import select
from tests.hub.archives_made import push, source, wheel

from mettle.hub import tables
from mettle.hub.actions import checker, inspection, states
from mettle.hub.actions.order import order_of
from mettle.hub.registry import catalogue, releases

HUB = "/api/v1/environmentshub"
CARD = {
    "status": "fail", "has_passed": False,
    "sections": {"package": [{"name": "tests", "status": "fail", "detail": "<script>", "fix": "write some"}]},
    "findings": [],
}  # fmt: skip


@pytest.fixture
def bob(hub):
    return hub.with_token("bob")


@pytest.fixture
def program(monkeypatch):
    """What stands in for the process of a check: a line of Python that gets the folder."""

    def be(code):
        words = [
            sys.executable,
            "-c",
            f"import json, sys, time; from pathlib import Path; folder = Path(sys.argv[1]); {code}",
        ]
        monkeypatch.setattr(checker, "python_module", lambda name, folder: [*words, folder])

    return be


@pytest.fixture
def checks(hub):
    made = checker.ReleaseChecker(hub.lab)
    yield made
    made.close_child()


def stands(bob, name="my-task", version="latest"):
    found = bob.get(f"{HUB}/bob/{name}/@{version}").json()["data"]
    return found["card_state"], found["card"]


def log(bob):
    return bob.get(f"{HUB}/bob/my-task/actions/latest/logs").json()["data"]["logs"]


def over(checks):
    checks.step()
    assert checks._child is not None
    checks._child[1].wait(60)
    checks.step()


def test_a_push_is_checked_and_what_came_of_it_is_shown(hub, bob, program, checks):
    push(bob, visibility="PUBLIC")
    assert stands(bob) == ("PENDING", None)
    program(
        f"print('install'); (folder / 'outcome.json').write_text({json.dumps({'state': 'FAILED', 'card': CARD, 'tasks': ['Sort the fjords.']})!r})"
    )
    over(checks)
    assert stands(bob) == ("FAILED", CARD)
    assert bob.get(f"{HUB}/", params={"search": "fjord"}).json()["total_count"] == 1
    assert log(bob) == "install"
    page = hub.signed_in("bob").get("/environments/bob/my-task?tab=card").text
    assert "&lt;script&gt;" in page
    assert "Check again" in page
    assert "Check again" not in hub.anonymous().get("/environments/bob/my-task?tab=card").text
    assert not (hub.lab.folder / "checks").exists() or list((hub.lab.folder / "checks").iterdir()) == []
    assert bob.get(f"{HUB}/bob/my-task/actions").json()["data"]["actions"][0]["status"] == "FAILED"
    assert bob.post(f"{HUB}/bob/my-task/actions/retry", json={}).json()["data"]["success"]
    assert stands(bob) == ("PENDING", None)
    assert bob.post(f"{HUB}/bob/my-task/actions/retry", json={}).status_code == 409
    assert hub.with_token("eve").post(f"{HUB}/bob/my-task/actions/retry", json={}).status_code == 403


def test_a_check_that_ends_without_a_word_has_failed_and_says_how(hub, bob, program, checks):
    push(bob)
    program("import os; os.kill(os.getpid(), 9)")
    over(checks)
    assert stands(bob) == ("FAILED", None)
    assert "SIGKILL" in log(bob)


def test_what_a_killed_hub_has_left_begins_again_and_not_for_ever(hub, bob, program, checks):
    push(bob)
    program("print('begun', flush=True); time.sleep(600)")
    for attempt in range(1, states.MAX_ATTEMPTS + 1):
        checks.step()
        assert stands(bob)[0] == "RUNNING"
        checks._child[1].signal(signal.SIGKILL)
        checks.close_child()
        checks = checker.ReleaseChecker(hub.lab)
        checks.recover()
        assert stands(bob)[0] == ("FAILED" if attempt == states.MAX_ATTEMPTS else "PENDING")
    assert "given up" in log(bob)


def test_what_a_release_needs_of_this_hub_is_taken_from_it_and_a_private_name_from_nowhere(hub, bob):
    eve = hub.with_token("eve")
    push(eve, name="secret-names")
    push(eve, name="words", wheel_bytes=wheel("words"), source_bytes=source("words"), visibility="PUBLIC")
    push(bob, name="own", wheel_bytes=wheel("own"), source_bytes=source("own"))
    extra = "".join(
        f"Requires-Dist: {each}\n"
        for each in ("secret-names", "words>=0.1", "own", "verifiers", "sympy<2", "x; extra == 'y'")
    )
    assert push(bob, wheel_bytes=wheel(extra=extra.rstrip())).status_code == 200
    with hub.lab.database.read() as c:
        row = c.execute(select(tables.environments.c.id).where(tables.environments.c.name == "my-task")).scalar()
        environment = catalogue.environment_of(c, row)
        order = order_of(c, hub.lab, environment, releases.find_release(c, environment, "latest"))
    assert [name.split("-")[0] for _, name in order.wheels] == ["my_task", "words", "own"]
    assert (order.requirements, order.refused) == (["sympy<2"], ["secret-names"])
    assert inspection.inspect(order, hub.lab.folder) == {"state": "FAILED", "card": None}


def test_what_code_of_a_release_writes_as_its_card_is_cut_to_what_is_shown():
    lies = {
        "has_passed": True, "status": "pass", "lint": {"findings": [{"what": "w" * 9999, "rule": {"id": 1}}]},
        "sections": {"p" * 99: [{"name": "n", "status": "fail", "detail": "d" * 9999, "fix": None}] * 999},
    }  # fmt: skip
    card = inspection._shaped(lies)
    assert (card["status"], card["has_passed"]) == ("fail", False)
    ((name, checks),) = card["sections"].items()
    assert (len(name), len(checks), len(checks[0]["detail"]), len(card["findings"][0]["what"])) == (40, 200, 600, 300)
    assert not inspection._shaped({"sections": {}})["has_passed"]


def test_a_failed_card_stops_hosted_runs_unless_overridden_and_that_is_noted(hub, bob):
    body = {"model": "tiny", "environments": [{"id": "bob/reverse-text"}], "batch_size": 32}
    push(bob, name="reverse-text", wheel_bytes=wheel("reverse-text"), source_bytes=source("reverse-text"))
    assert bob.post("/api/v1/rft/runs", json=body).status_code == 201
    with hub.lab.database.write() as c:
        c.execute(tables.releases.update().values(card_state="FAILED"))
    for name in ("bob/reverse-text", "reverse-text"):
        refused = bob.post("/api/v1/rft/runs", json={**body, "environments": [{"id": name}]})
        assert (refused.status_code, refused.json()["code"]) == (409, "card_failed")
    assert bob.post("/api/v1/rft/runs", json={**body, "override_card": True}).status_code == 201
    with hub.lab.database.read() as c:
        noted = c.execute(select(tables.audit.c.subject).where(tables.audit.c.action == "environment.override")).all()
    assert noted == [("bob/reverse-text@0.1.0",)]


@pytest.mark.nightly
def test_a_real_release_is_installed_loaded_and_tried_in_a_machine(tmp_path):
    from mettle.envs.packages.archive import pack
    from mettle.envs.packages.registry import SHIPPED
    from mettle.hub.actions.order import CheckOrder
    from mettle.storage.files import sha256_file

    packed = pack(SHIPPED / "code_judge", tmp_path)
    order = CheckOrder(
        "ann/code-judge", packed.name, packed.version, str(packed.source), sha256_file(packed.source),
        [(str(packed.wheel), packed.wheel.name)],
    )  # fmt: skip
    (tmp_path / "work").mkdir()
    outcome = inspection.inspect(order, tmp_path / "work")
    assert outcome["state"] == "SUCCESS"
    assert set(outcome["card"]["sections"]) == {"package", "data", "reward", "lint", "baseline"}
    assert len(outcome["tasks"]) > 5
    assert all(isinstance(each, str) and each for each in outcome["tasks"])
