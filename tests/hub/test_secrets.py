"""Secrets: sealed, never answered, told to the jobs of their owner alone, hidden where logs are shown."""

from __future__ import annotations

import pytest
from tests.hub.archives_made import push

from mettle.errors import StorageError
from mettle.hub.logs import read_tail
from mettle.hub.secrets.vault import Vault
from mettle.hub.training import jobs
from mettle.hub.training.told import environment_for, hidden_of

SECRET = 'sk-very-"secret"'
BODY = {"model": "tiny", "environments": [{"id": "reverse-text"}], "batch_size": 32}


@pytest.fixture
def bob(hub):
    return hub.with_token("bob")


def put(client, path, name, value, **more):
    return client.post(f"/api/v1{path}", json={"name": name, "value": value, **more})


def test_a_value_is_sealed_and_never_answered(hub, bob):
    made = put(bob, "/secrets/", "MY_KEY", SECRET)
    assert made.status_code == 201
    assert SECRET not in made.text + bob.get("/api/v1/secrets/").text
    assert SECRET not in hub.signed_in("bob").get("/secrets/bob").text
    stored = "".join(path.read_bytes().decode("latin-1") for path in hub.lab.folder.glob("hub.db*"))
    assert "very-" not in stored
    assert (hub.lab.folder / "secrets.key").stat().st_mode & 0o777 == 0o600
    assert put(bob, "/secrets/", "MY_KEY", "again").status_code == 409
    assert put(bob, "/variables/", "SPLIT", "train").json()["data"]["value"] == "train"


@pytest.mark.parametrize(
    "name", ["PATH", "LD_PRELOAD", "PYTHONPATH", "HTTPS_PROXY", "METTLE_HUB_URL", "small", "A-B", ""]
)
def test_a_name_that_steers_programs_is_refused(bob, name):
    assert put(bob, "/secrets/", name, "x").status_code == 422


def test_jobs_are_told_what_is_their_owners_and_logs_hide_it(hub, bob, monkeypatch, tmp_path):
    monkeypatch.setenv("OPERATORS_API_KEY", "the operator's")
    monkeypatch.setenv("OPERATORS_WORD", "known")
    push(bob, name="reverse-text")
    environment = bob.get("/api/v1/environmentshub/bob/reverse-text/@latest").json()["data"]["id"]
    put(bob, "/secrets/", "MY_KEY", "the owner's")
    put(bob, f"/environmentshub/{environment}/secrets", "MY_KEY", SECRET)
    put(bob, f"/environmentshub/{environment}/variables", "SPLIT", "train")
    told = {}
    for who in ("bob", "eve"):
        run = hub.with_token(who).post("/api/v1/rft/runs", json=BODY).json()["run"]["id"]
        with hub.lab.database.write() as c:
            job = next(each for each in jobs.with_status(c, jobs.QUEUED) if each.id == run)
            told[who] = environment_for(c, hub.lab, job)
            job = next(each for each in jobs.with_status(c, jobs.QUEUED) if each.id == run)
        if who == "bob":
            hidden = hidden_of(hub.lab, job)
    assert (told["bob"]["MY_KEY"], told["bob"]["SPLIT"], told["bob"]["OPERATORS_WORD"]) == (SECRET, "train", "known")
    assert "MY_KEY" not in told["eve"]
    assert "OPERATORS_API_KEY" not in told["bob"]
    (tmp_path / "a.log").write_text(
        f'{{"message": "sent sk-very-\\"secret\\"", "split": "train"}}\nplain {SECRET} here\n'
    )
    entries, _ = read_tail(tmp_path, "a.log", max_lines=9, hidden=hidden)
    assert [entry["message"] for entry in entries] == ["sent [MY_KEY]", "plain [MY_KEY] here"]


def test_of_somebody_elses_environment_nobody_sets_or_sees_a_secret(hub, bob):
    push(bob, visibility="PUBLIC")
    environment = bob.get("/api/v1/environmentshub/bob/my-task/@latest").json()["data"]["id"]
    made = put(bob, f"/environmentshub/{environment}/secrets", "A_KEY", "x" * 9).json()["data"]["id"]
    eve, ann = hub.with_token("eve"), hub.with_token("ann")
    assert put(eve, f"/environmentshub/{environment}/secrets", "A_KEY", "y").status_code == 403
    assert eve.get(f"/api/v1/environmentshub/{environment}/secrets").status_code == 403
    for client in (eve, ann):
        assert client.patch(f"/api/v1/secrets/{made}", json={"value": "z"}).status_code == 404
    assert put(eve, "/secrets/", "A_KEY", "y", teamId="none").status_code == 403


def test_a_key_that_is_gone_or_another_is_named(tmp_path):
    sealed = Vault(tmp_path).seal("word", "here")
    assert Vault(tmp_path).open(sealed, "here") == "word"
    with pytest.raises(StorageError):
        Vault(tmp_path).open(sealed, "there")
    (tmp_path / "secrets.key").unlink()
    with pytest.raises(StorageError, match="is gone"):
        Vault(tmp_path).open(sealed, "here")
