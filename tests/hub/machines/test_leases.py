"""Leases: what is lost when a machine is silent, who may write what, and what a late report does."""

from __future__ import annotations

import sqlite3

import pytest
from tests.hub.machines.conftest import ASKED, BEGINNING, HOSTED, facts, leaving_results
from tests.hub.machines.test_remote_queue import status_of, submitted, until, wait_for_child

from mettle.errors import UserError
from mettle.hub.accounts.identifiers import digest_of, new_secret
from mettle.hub.evaluating import outcome
from mettle.hub.evaluating.local_queue import LocalQueue
from mettle.hub.evaluating.source import LeaseWord
from mettle.hub.evaluating.worker import EvaluationWorker
from mettle.hub.machines import fleet, leases, lending, machine_client
from mettle.hub.machines.machine_client import LeaseLostError, MachineClient
from mettle.hub.training import jobs

COMPUTE = "/api/v1/compute"


@pytest.fixture
def bob(hub):
    return hub.with_token("bob")


def overdue(hub):
    """As much later as it takes for every lease to run out."""
    hub.lab.lease_s = -1.0
    with hub.lab.database.write() as c:
        leases.renew_all(c, hub.lab)
    hub.lab.lease_s = 30.0
    return leases.expire(hub.lab)


def begun(hub, bob, machine, program):
    """A machine in the middle of an evaluation, with what it has begun stored at the Hub."""
    result = submitted(bob)
    program(BEGINNING)
    machine.worker.step()
    work = machine.worker.doing
    until(machine.worker, "a beginning", lambda: work.folder / "results/a/b/begun")
    machine.queue._mirror._next = 0.0
    machine.worker.step()
    return result, work


def test_a_killed_machines_work_goes_on_elsewhere_with_what_it_had_stored(hub, bob, machine, program):
    first, second = machine("one"), machine("two")
    result, _ = begun(hub, bob, first, program)
    first.kill()
    second.worker.step()
    assert second.worker.doing is None, "nobody takes it before the lease has run out"
    assert overdue(hub) == 1
    assert status_of(bob, result) == "PENDING"
    program(leaving_results(3))
    second.worker.step()
    wait_for_child(second.worker)
    second.worker.step()
    shown = bob.get(f"/api/v1/evaluations/{result}").json()
    assert (shown["status"], shown["total_samples"]) == ("COMPLETED", 3)
    assert "found ['begun']" in bob.get(f"{HOSTED}/{result}/logs").json()["logs"]


def test_what_a_machine_reports_too_late_is_refused_and_changes_nothing(hub, bob, machine, program):
    zombie, heir = machine("one"), machine("two")
    result, work = begun(hub, bob, zombie, program)
    stored = outcome.evaluation_folder(hub.lab.folder, work.job_id)
    zombie.network.is_cut = True
    assert zombie.queue.report(work) is LeaseWord.GO_ON, "a cut network is no reason to stop"
    overdue(hub)
    program(leaving_results(2))
    heir.worker.step()
    zombie.network.is_cut = False
    before = {path: path.read_bytes() for path in stored.rglob("*") if path.is_file()}
    with pytest.raises(LeaseLostError):
        zombie.client.hand_in(work.lease_id, "results/a/b/begun", b"late", offset=0, size=4, mode="whole")
    with pytest.raises(LeaseLostError):
        zombie.client.end(work.lease_id, 0)
    with pytest.raises(LeaseLostError):
        zombie.client.give_back(work.lease_id)
    assert {path: path.read_bytes() for path in stored.rglob("*") if path.is_file()} == before
    zombie.worker.step()
    assert zombie.worker.doing is None
    wait_for_child(heir.worker)
    heir.worker.step()
    assert bob.get(f"/api/v1/evaluations/{result}").json()["total_samples"] == 2
    with hub.lab.database.read() as c:
        generations = [row.generation for row in c.execute(leases.select(leases.tables.leases))]
    assert sorted(generations) == [1, 2]


def test_the_end_that_a_cut_network_has_held_back_counts_when_it_heals_in_time(hub, bob, machine, program):
    one = machine()
    result = submitted(bob)
    program(leaving_results(4))
    one.worker.step()
    wait_for_child(one.worker)
    one.network.is_cut = True
    one.worker.try_step()
    assert (one.worker.doing is not None, status_of(bob, result)) == (True, "RUNNING")
    one.network.is_cut = False
    one.worker.step()
    assert bob.get(f"/api/v1/evaluations/{result}").json()["total_samples"] == 4


def test_an_answer_that_was_lost_behind_a_completed_job_does_no_harm(hub, bob, machine, program, monkeypatch):
    one = machine()
    result = submitted(bob)
    program(leaving_results(2))
    one.worker.step()
    wait_for_child(one.worker)
    ending = leases.end_lease

    def killed(*args):
        raise OSError("the Hub is killed here")

    monkeypatch.setattr(lending.leases, "end_lease", killed)
    one.worker.try_step()
    assert status_of(bob, result) == "COMPLETED"
    monkeypatch.setattr(lending.leases, "end_lease", ending)
    one.worker.step()
    shown = bob.get(f"/api/v1/evaluations/{result}").json()
    assert (shown["status"], shown["total_samples"], one.worker.doing) == ("COMPLETED", 2, None)


def test_work_that_a_machine_has_left_goes_on_at_the_hub_itself_and_never_twice(hub, bob, machine, program):
    one = machine()
    result, _ = begun(hub, bob, one, program)
    own = EvaluationWorker(LocalQueue(hub.lab))
    own.step()
    assert own.doing is None, "what is leased is not the Hub's own"
    one.worker.drop()
    program(leaving_results(1))
    own.step()
    one.worker.step()
    assert one.worker.doing is None
    wait_for_child(own)
    own.step()
    assert status_of(bob, result) == "COMPLETED"


def test_a_machine_that_was_started_again_lets_go_of_what_it_had(hub, bob, machine, program):
    one = machine()
    result, _ = begun(hub, bob, one, program)
    one.kill()
    one.queue._held = ""
    one.client.beat([], is_asking=False, facts=None)
    assert status_of(bob, result) == "PENDING"


def test_after_a_restart_of_the_hub_nobody_is_late(hub, bob, machine, program):
    one = machine()
    _, work = begun(hub, bob, one, program)
    with hub.lab.database.write() as c:
        c.execute(leases.update(leases.tables.leases).values(expires_at=0.0))
        leases.renew_all(c, hub.lab)
    assert leases.expire(hub.lab) == 0
    assert one.queue.report(work) is LeaseWord.GO_ON


def test_a_stop_of_what_is_lost_ends_it(hub, bob, machine, program):
    one = machine()
    result, _ = begun(hub, bob, one, program)
    bob.patch(f"{HOSTED}/{result}/cancel")
    one.kill()
    overdue(hub)
    assert status_of(bob, result) == "CANCELLED"


def test_a_machine_reaches_what_it_has_leased_and_nothing_else(hub, bob, machine, program):
    one, other = machine("one"), machine("two")
    _, work = begun(hub, bob, one, program)
    lease = f"{COMPUTE}/leases/{work.lease_id}"
    anybody = hub.anonymous()

    def ask(secret, method, path, **more):
        return anybody.request(method, path, headers={"Authorization": f"Bearer {secret}"}, **more).status_code

    for method, path in (
        ("GET", f"{lease}/files/log"), ("GET", f"{lease}/inputs/model/config.json"),
        ("PUT", f"{lease}/files/log?offset=0&size=1"), ("POST", f"{lease}/end"), ("POST", f"{lease}/back"),
    ):  # fmt: skip
        body = {"json": {"code": 0}} if method == "POST" else {}
        assert ask(other.secret, method, path, **body) == 404
        assert ask(bob.headers["authorization"].split()[1], method, path, **body) == 401
    assert ask(one.secret, "GET", f"{lease}/files/log") == 200
    for path in ("order.json", "results/../order.json", "../x", "results/.hidden", "results/run.db-wal", "results"):
        assert ask(one.secret, "PUT", f"{lease}/files/{path}?offset=0&size=1", content=b"x") in (404, 405, 422), path
    for method, path in (("GET", "/api/v1/user/whoami"), ("GET", "/api/v1/secrets/"), ("GET", "/api/v1/rft/runs")):
        assert ask(one.secret, method, path) == 401
    assert ask(one.secret, "GET", f"{COMPUTE}/machines") == 401


def test_a_link_in_the_folder_of_the_work_leads_nowhere(hub, bob, machine, program, tmp_path):
    one = machine()
    _, work = begun(hub, bob, one, program)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    stored = outcome.evaluation_folder(hub.lab.folder, work.job_id)
    (stored / "results" / "link").symlink_to(elsewhere)
    with pytest.raises(UserError, match="no file of this work"):
        one.client.hand_in(work.lease_id, "results/link/x", b"x", offset=0, size=1, mode="whole")
    assert list(elsewhere.iterdir()) == []


def test_a_database_replaces_one_that_is_read_and_a_damaged_one_does_not(hub, bob, machine, program, tmp_path):
    one = machine()
    _, work = begun(hub, bob, one, program)
    made = tmp_path / "made.db"
    with sqlite3.connect(made) as c:
        c.execute("CREATE TABLE t (x)")
    target = outcome.evaluation_folder(hub.lab.folder, work.job_id) / "results/a/b/run.db"

    def hand_in(data):
        return one.client.hand_in(work.lease_id, "results/a/b/run.db", data, offset=0, size=len(data), mode="whole")

    assert hand_in(made.read_bytes())
    reader = sqlite3.connect(target)
    assert reader.execute("SELECT count(*) FROM t").fetchone() == (0,)
    with sqlite3.connect(made) as c:
        c.execute("INSERT INTO t VALUES (1)")
    assert hand_in(made.read_bytes())
    assert reader.execute("SELECT count(*) FROM t").fetchone() == (1,)
    with pytest.raises(UserError, match="damaged"):
        hand_in(b"SQLite format 3\0" + b"x" * 5000)
    assert reader.execute("SELECT count(*) FROM t").fetchone() == (1,)
    reader.close()


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"environments": {}}, "lacks reverse-text"),
        ({"environments": {"reverse-text": "0.0.0"}}, "it has reverse-text 0.0.0, not"),
        ({"environments": None}, "lacks reverse-text"),
    ],
)
def test_work_goes_to_machines_that_have_its_environment_in_the_same_release(hub, bob, machine, told, why):
    one = machine(**told)
    submitted(bob)
    one.worker.step()
    assert one.worker.doing is None
    with hub.lab.database.read() as c:
        (job,) = jobs.with_status(c, jobs.QUEUED, jobs.EVAL)
    assert why in lending.why_not(job, told)


def test_a_model_of_the_hub_travels_with_the_work_to_machines_with_torch(hub, bob, machine, program, tmp_path):
    hub.lab.models = tmp_path / "models"
    (hub.lab.models / "small").mkdir(parents=True)
    (hub.lab.models / "small" / "config.json").write_text('{"a": 1}')
    asked = {**ASKED, "inference_model": "small", "eval_config": {"num_examples": 1}}
    assert bob.post(HOSTED, json=asked).status_code == 201
    without = machine("one", torch="")
    without.worker.step()
    assert without.worker.doing is None
    program("import time; time.sleep(600)")
    one = machine("two")
    one.worker.step()
    model = one.worker.doing.folder.parent / "inputs" / one.worker.doing.lease_id / "model"
    assert (model / "config.json").read_text() == '{"a": 1}'
    assert str(model) in (one.worker.doing.folder / "order.json").read_text()


def test_a_token_lets_one_machine_in_once_and_a_lost_answer_is_asked_for_again(hub):
    client = MachineClient("http://testserver", "", transport=hub_transport(hub))
    with hub.lab.database.write() as c:
        invitation, token = fleet.invite(c, "ann", "gpu-1")
        _, revoked = fleet.invite(c, "ann", "gpu-2")
        fleet.revoke_invitation(c, next(each.id for each in fleet.list_invitations(c) if each.id != invitation.id))
    mine, others = digest_of(new_secret()), digest_of(new_secret())
    made = client.join(token, mine, facts())
    assert client.join(token, mine, facts()) == made
    for bad, digest in ((token, others), (revoked, mine), ("mtj_none", mine)):
        with pytest.raises(UserError, match="lets no machine in"):
            client.join(bad, digest, facts())
    with hub.lab.database.read() as c:
        assert token not in str(c.execute(leases.select(leases.tables.machine_invitations)).all())


def hub_transport(hub):
    from tests.hub.lab_writer import InProcess

    return InProcess(hub.anonymous())


def test_another_release_of_mettle_is_refused_in_one_line(hub, monkeypatch):
    with hub.lab.database.write() as c:
        _, token = fleet.invite(c, "ann", "gpu-1")
    monkeypatch.setattr(machine_client, "_version", lambda: {"version": "0.0.1"})
    client = MachineClient("http://testserver", "", transport=hub_transport(hub))
    with pytest.raises(UserError, match=r"this machine has Mettle 0\.0\.1 and the Hub .*: install .* there"):
        client.join(token, "0" * 64, {})


def test_one_that_leaves_finishes_and_one_that_was_removed_gets_nowhere(hub, bob, machine, program):
    one = machine()
    result, work = begun(hub, bob, one, program)
    ann = hub.signed_in("ann")
    assert ann.form("/machines", action="leave", id=one.id).status_code == 303
    one.queue.report(work)
    assert one.queue.is_leaving
    assert status_of(bob, result) == "RUNNING"
    assert ann.form("/machines", action="remove", id=one.id).status_code == 303
    assert status_of(bob, result) == "PENDING"
    one.queue.report(work)
    assert "of none" in one.queue.refusal
    with pytest.raises(UserError):
        one.client.come_back()
    actions = ann.get("/audit").text
    for action in ("machine.join", "lease.begin", "machine.leave", "machine.remove", "lease.back"):
        assert action in actions


def test_the_page_and_the_list_name_work_to_its_owners_alone(hub, bob, machine, program):
    one = machine(gpus=["<b>H100</b>"], memory_bytes=8 << 30, load="x")
    begun(hub, bob, one, program)
    (shown,) = bob.get(f"{COMPUTE}/machines").json()["machines"]
    assert (shown["state"], shown["cores"], shown["load"], shown["work"][0]["name"]) == (
        "here", 2, None, "reverse-text gpt",
    )  # fmt: skip
    (others,) = hub.with_token("eve").get(f"{COMPUTE}/machines").json()["machines"]
    assert (others["work"][0]["name"], others["work"][0]["link"]) == ("", "")
    assert "reverse-text gpt" in hub.signed_in("bob").get("/machines").text
    page = hub.signed_in("eve").get("/machines").text
    assert "evaluation of others" in page
    assert "reverse-text gpt" not in page
    assert "<b>H100" not in page
    assert "Make a token" not in page


def test_an_admin_makes_a_token_on_the_page_and_it_is_shown_once(hub):
    ann = hub.signed_in("ann")
    assert "No machine has joined" in ann.get("/machines").text
    made = ann.form("/machines", action="invite", name="gpu-1").text
    assert "mettle hub join URL --token mtj_" in made
    assert "mtj_" not in ann.get("/machines").text
    assert ann.form("/machines", action="invite", name=" ").status_code == 422
    assert hub.signed_in("bob").form("/machines", action="invite", name="x").status_code == 403
