"""The processes: started, started again, stopped with the Hub, and their tokens counted once."""

import json
import os
import signal
import time

from mettle.hub.training import usage
from mettle.hub.training_service import supervisor
from mettle.hub.training_service.offers import folder_of, offers_of, read_state
from mettle.processes.child import process_state

from .conftest import WAIT_S, wait_until


def used(hub, owner_id):
    with hub.lab.database.read() as c:
        return usage.tokens_this_month(c, owner_id)


def test_a_process_that_dies_is_started_again_and_one_that_is_closed_ends(hub, services):
    before = read_state(hub.lab.folder, "small")
    os.kill(before.pid, signal.SIGKILL)
    wait_until(lambda: (now := read_state(hub.lab.folder, "small")).is_ready and now.pid != before.pid)
    after = read_state(hub.lab.folder, "small")
    assert after.num_restarts == 1
    services.close()
    assert not process_state(after.pid)
    assert read_state(hub.lab.folder, "small").words == "not ready: this Hub is being stopped"


def test_one_that_is_frozen_is_replaced(hub, services_of, monkeypatch):
    for name, seconds in (("COUNT_EVERY_S", 0.1), ("SILENT_S", 1.0), ("_ANSWER_S", 0.5), ("_END_S", 0.5)):
        monkeypatch.setattr(supervisor, name, seconds)
    services = services_of(hub)
    services.start()
    try:
        wait_until(lambda: read_state(hub.lab.folder, "small").is_ready)
        frozen = read_state(hub.lab.folder, "small").pid
        os.kill(frozen, signal.SIGSTOP)
        wait_until(lambda: (now := read_state(hub.lab.folder, "small")).is_ready and now.pid != frozen)
        assert not process_state(frozen)
    finally:
        services.close()


def test_one_that_is_frozen_keeps_no_other_waiting(hub, services_of, monkeypatch):
    (hub.lab.models / "other").mkdir()
    (hub.lab.models / "other" / "config.json").write_text("{}")
    hub.lab.train_offers = offers_of(hub.lab.models, ["small=org/small", "other"])
    monkeypatch.setattr(supervisor, "COUNT_EVERY_S", 0.1)
    monkeypatch.setattr(supervisor, "_ANSWER_S", 10 * WAIT_S)  # the question to it stays open
    services = services_of(hub)
    services.start()
    frozen = 0
    try:
        for name in ("small", "other"):
            wait_until(lambda name=name: read_state(hub.lab.folder, name).is_ready)
        frozen, killed = (read_state(hub.lab.folder, name).pid for name in ("small", "other"))
        os.kill(frozen, signal.SIGSTOP)
        time.sleep(0.5)  # longer than it takes until it is asked
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: (now := read_state(hub.lab.folder, "other")).is_ready and now.pid != killed)
    finally:
        if frozen:
            os.kill(frozen, signal.SIGCONT)
        services.close()


def test_one_that_cannot_start_says_why_and_is_tried_again(hub, services_of):
    folder = folder_of(hub.lab.folder, "small")
    folder.mkdir(parents=True)
    (folder / "broken").touch()
    services = services_of(hub)
    services.start()
    try:
        wait_until(lambda: read_state(hub.lab.folder, "small").why)
        assert read_state(hub.lab.folder, "small").words == "not ready: this model has no tokenizer"
        (folder / "broken").unlink()
        wait_until(lambda: read_state(hub.lab.folder, "small").is_ready)
    finally:
        services.close()


def test_what_each_has_taken_is_counted_once_over_restarts_and_anew_services(hub, services_of):
    bob = hub.with_token("bob").get("/api/v1/user/whoami").json()["data"]["id"]
    folder = folder_of(hub.lab.folder, "small")
    folder.mkdir(parents=True)

    def told(since, total):
        text = json.dumps({"owners": [{"owner": bob, "since": since, "num_tokens": total}]})
        (folder / "usage.tmp").write_text(text)
        (folder / "usage.tmp").rename(folder / "usage.json")

    told(1.5, 100)
    for _ in range(2):
        services = services_of(hub)
        services.start()
        wait_until(lambda: used(hub, bob) >= 100 and read_state(hub.lab.folder, "small").is_ready)
        services.close()
        assert used(hub, bob) == 100
    services = services_of(hub)
    services.start()
    wait_until(lambda: read_state(hub.lab.folder, "small").is_ready)
    told(1.5, 130)
    services.close()
    assert used(hub, bob) == 130, "what came last is counted before the process is ended"
    told(9.0, 20)
    services = services_of(hub)
    services.start()
    wait_until(lambda: used(hub, bob) == 150)
    services.close()
    rows = hub.signed_in("bob").get("/usage").text
    assert "adapters" in rows
    assert "small" in rows
