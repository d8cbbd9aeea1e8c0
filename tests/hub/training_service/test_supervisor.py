"""The processes: started, started again, stopped with the Hub, and their tokens counted once."""

import json
import os
import signal

from mettle.hub.training import usage
from mettle.hub.training_service.offers import folder_of, read_state
from mettle.processes.child import process_state

from .conftest import wait_until


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
