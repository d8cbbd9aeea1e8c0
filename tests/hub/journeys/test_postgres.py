"""The Hub on PostgreSQL: migrations, pushes, conflicts, index, evaluations, runs, backups, two server processes."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.hub.archives_made import push, source, wheel
from tests.hub.lab_writer import HubWriter, differences, everything
from tests.hub.postgres_made import own_database, own_postgres, postgres_programs

pytest.importorskip("psycopg", reason="psycopg is not installed (extra postgres)")

from mettle.errors import UserError
from mettle.hub import backup
from mettle.hub.database import HubDatabase

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.e2e,
    pytest.mark.skipif(postgres_programs() is None, reason="PostgreSQL is not installed here"),
]
ENV = "/api/v1/environmentshub/bob/my-task"
RUN = {"model": "tiny", "environments": [{"id": "reverse-text"}], "batch_size": 32}


@pytest.fixture(scope="module")
def server():
    with own_postgres() as address:
        yield address


@pytest.fixture
def url(server, request):
    with own_database(server, hashlib.sha256(request.node.name.encode()).hexdigest()[:16]) as made:
        yield made


@pytest.fixture
def two(url, tmp_path):
    """Two servers over one database and one folder, with bob."""
    servers = [HubWriter(tmp_path / "hub", url=url) for _ in range(2)]
    servers[0].person("bob")
    for each in servers:
        # The first request makes all routes ready, and silences a warning meanwhile: in two threads at once, which a
        # server does not have, it would escape and be an error here.
        assert each.anonymous().get("/no-such-page").status_code == 404
    yield servers
    for each in servers:
        each.close()


def test_the_migrations_lead_to_the_tables_that_are_described(url):
    database = HubDatabase(url)
    database.migrate()
    with database.read() as c:
        assert differences(c) == []
    database.migrate()
    database.close()


def test_what_one_server_takes_the_other_shows(two):
    bob, reader = two[0].with_token("bob"), two[1].anonymous()
    assert push(bob, visibility="PUBLIC").status_code == 200
    found = reader.get(f"{ENV}/@latest").json()["data"]
    assert reader.get(found["wheel_url"]).content == wheel()
    assert reader.get(found["package_url"]).content == source()
    assert "my_task-0.1.0-py3-none-any.whl" in reader.get("/simple/my-task/").text
    assert reader.get("/api/v1/environmentshub/?search=what+it+is").json()["total_count"] == 1
    assert push(two[1].with_token("bob")).status_code == 409, "the same once more"
    job = bob.post("/api/v1/rft/runs", json=RUN).json()["run"]
    assert two[1].with_token("bob").get("/api/v1/rft/runs").json()["runs"][0]["id"] == job["id"]


def test_of_many_who_push_one_version_at_once_one_does(two):
    clients = [server.with_token("bob") for server in two for _ in range(3)]
    sources = [source(files={"own.py": bytes([65 + n])}) for n in range(len(clients))]
    with ThreadPoolExecutor(len(clients)) as pool:
        answers = list(pool.map(lambda client, data: push(client, source_bytes=data), clients, sources))
    codes = [answer.status_code for answer in answers]
    assert codes.count(200) <= 1
    assert set(codes) <= {200, 404, 409}, [answer.text for answer in answers]
    if 200 not in codes:
        assert push(clients[0], source_bytes=sources[0]).status_code == 200
    data = two[0].with_token("bob").get(f"{ENV}/@latest").json()["data"]
    whole = two[0].with_token("bob").get(data["package_url"]).content
    assert whole in sources


def test_pieces_that_come_to_both_servers_at_once_are_all_kept(two):
    clients = [server.with_token("bob") for server in two]
    made = clients[0].post("/api/v1/evaluations/", json={"name": "x", "environment": "words"}).json()["id"]

    def send(number):
        sample = {"example_id": number, "reward": 1.0, "answer": "x" * (number * 37 % 500)}
        return clients[number % 2].post(f"/api/v1/evaluations/{made}/samples", json={"samples": [sample]}).status_code

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(send, range(60))) == {200}
    done = clients[1].post(f"/api/v1/evaluations/{made}/finalize", json={}).json()
    assert done["total_samples"] == 60
    rows = clients[0].get(f"/api/v1/evaluations/{made}/samples?limit=100").json()["samples"]
    assert sorted(row["example_id"] for row in rows) == list(range(60))


def test_a_backup_moves_a_hub_between_the_two_kinds_of_database(two, server, tmp_path):
    assert push(two[0].with_token("bob"), visibility="PUBLIC").status_code == 200
    before = everything(two[0].lab.database)
    backup.back_up(two[0].lab, tmp_path / "one.tar")
    backup.restore(tmp_path / "one.tar", tmp_path / "lite")
    lite = HubWriter(tmp_path / "lite")
    assert everything(lite.lab.database) == before
    backup.back_up(lite.lab, tmp_path / "two.tar")
    with own_database(server, "again") as url:
        backup.restore(tmp_path / "two.tar", tmp_path / "again", database=url)
        again = HubWriter(tmp_path / "again", url=url)
        assert everything(again.lab.database) == before
        assert push(again.with_token("bob"), version="0.2.0").status_code == 200, "numbers go on"
        again.close()
        with pytest.raises(UserError, match="has tables already"):
            backup.restore(tmp_path / "two.tar", tmp_path / "third", database=url)
    lite.close()
