"""A Hub and two machines in network namespaces of their own: one machine is killed, the other loses its network.

The second keeps its way to the model, so that it goes on with work that the Hub has taken from it meanwhile; when the
cable is in again, what it did alone must not count beside what is done under the new lease.
"""

from __future__ import annotations

import signal
import time

import pytest
from tests.hub.machines.journeys.network_made import HUB, MODEL, own_network, why_no_network
from tests.hub.machines.journeys.test_two_machines import (
    LEASE_S,
    TASKS,
    HeldModel,
    Place,
    handler_of,
    serving,
    started,
    until,
)
from tests.serving import handler_on_a_thread

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]


@pytest.fixture
def network():
    if why := why_no_network():
        pytest.skip(why)
    with own_network(2) as made, made.at_the_hub():
        yield made


def leases_of(place):
    """Machine to (name of its work, how often that was lent)."""
    machines = place.ask("GET", "/compute/machines")["machines"]
    return {each["name"]: (each["work"][0]["name"], each["work"][0]["generation"]) for each in machines if each["work"]}


def test_a_killed_machine_and_one_without_network_lose_no_rollout_and_double_none(network, tmp_path, capsys):
    place, model = Place(tmp_path), HeldModel()
    with handler_on_a_thread(handler_of(model), MODEL) as endpoint, serving(place, host=HUB, prefix=network.hub()):
        results = {name: place.submit(name, endpoint) for name in ("a", "b")}
        joins = [
            ["hub", "join", place.url, "--token", token, "--dir", f"machine-{number}"]
            for number, token in enumerate(place.invitations)
        ]
        with (
            started(joins[0], tmp_path, prefix=network.machine(0)) as killed,
            started(joins[1], tmp_path, prefix=network.machine(1)) as cut_off,
        ):
            until(lambda: all(place.stored().get(name) == 2 for name in results), "two rollouts of each")
            before = leases_of(place)
            assert {name for name, _ in before.values()} == set(results)
            network.cut(1)
            killed.kill()
            killed.wait()  # what it has started ends with it, before anything more is answered
            at = [time.monotonic()]
            model.gate.set()
            alone = before["two"][0]
            until(lambda: sum(n for (of, _), n in model.answered.items() if of == alone) >= TASKS, "what it does alone")
            until(lambda: not leases_of(place), "the end of both leases")
            at.append(time.monotonic())
            assert all(place.status(result) not in ("COMPLETED", "FAILED") for result in results.values())
            network.mend(1)
            until(lambda: leases_of(place), "work for the machine that is back")
            at.append(time.monotonic())
            for result in results.values():
                until(lambda result=result: place.status(result) == "COMPLETED", f"the end of {result}")
            at.append(time.monotonic())
            states = {each["name"]: each["state"] for each in place.ask("GET", "/compute/machines")["machines"]}
            assert states == {"one": "silent", "two": "here"}
            cut_off.send_signal(signal.SIGINT)
            assert cut_off.wait(60) == 0
        for name, result in results.items():
            samples = place.samples(result)
            assert sorted(each["example_id"] for each in samples) == list(range(TASKS)), name
            asked = sorted(num for (of, _), num in model.answered.items() if of == name)
            # What the Hub had is asked for once. Of the killed machine one answer was in the air; what the other did
            # alone is done again, since the Hub had taken it back.
            assert asked in ([[1, 1, 2, 2]] if name == alone else [[1, 1, 1, 1], [1, 1, 1, 2]]), name
    spans = ["both leases over after", "work again after the cable", "both done after"]
    told = ", ".join(f"{words} {b - a:.1f} s" for words, a, b in zip(spans, at, at[1:], strict=False))
    with capsys.disabled():
        print(f"\nleases of {LEASE_S} s: {told}; asked {dict(model.answered)}")
