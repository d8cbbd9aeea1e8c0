"""Backup and restore: a Hub as one file, whole or not there, and back again."""

from __future__ import annotations

import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from sqlalchemy import text
from tests.hub.archives_made import push, source, wheel
from tests.hub.lab_writer import HubWriter, everything

from mettle.errors import StorageError, UserError
from mettle.hub import backup
from mettle.hub.database import HubDatabase
from mettle.hub.training import jobs

ENV = "/api/v1/environmentshub/bob/my-task"
RUN = {"model": "tiny", "environments": [{"id": "reverse-text"}], "batch_size": 32}


@pytest.fixture
def filled(hub):
    """A Hub with a published environment, a completed evaluation, one that goes on, a run and a key of its own."""
    fill(hub)
    return hub


def fill(hub):
    bob = hub.with_token("bob")
    assert push(bob, visibility="PUBLIC").status_code == 200
    for name, ends in (("done", True), ("going on", False)):
        made = bob.post("/api/v1/evaluations/", json={"name": name, "environment": "words"}).json()["id"]
        samples = [{"example_id": n, "reward": n / 4, "answer": "\N{SNOWMAN}"} for n in range(4)]
        assert bob.post(f"/api/v1/evaluations/{made}/samples", json={"samples": samples}).status_code == 200
        if ends:
            assert bob.post(f"/api/v1/evaluations/{made}/finalize", json={}).status_code == 200
    path = hub.lab.folder / "results" / made / "results.jsonl"
    path.write_bytes(path.read_bytes() + b'{"a piece that does not count')
    for status in (jobs.STOPPED, jobs.RUNNING):
        job = bob.post("/api/v1/rft/runs", json=RUN).json()["run"]["id"]
        folder = hub.lab.folder / "runs" / job
        folder.mkdir()
        (folder / "weights.bin").write_bytes(job.encode())
        with hub.lab.database.write() as c:
            jobs.set_status(c, job, status)
    (hub.lab.folder / "own.key").write_bytes(b"a key")


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith("hub.db")
    }


def test_what_is_restored_is_what_was_backed_up(filled, tmp_path):
    made = backup.back_up(filled.lab, tmp_path / "hub.tar")
    assert made.num_rows["results"] == 2
    assert (tmp_path / "hub.tar").stat().st_mode & 0o777 == 0o600
    backup.restore(tmp_path / "hub.tar", tmp_path / "again")
    again = HubWriter(tmp_path / "again")
    try:
        assert everything(again.lab.database) == everything(filled.lab.database)
        there, were = files(tmp_path / "again"), files(filled.lab.folder)
        going_on = next(name for name, data in were.items() if b"does not count" in data)
        were[going_on] = were[going_on][: were[going_on].index(b'{"a piece')]
        with filled.lab.database.read() as c:
            running = jobs.with_status(c, jobs.RUNNING)[0].id
        assert there == {name: data for name, data in were.items() if running not in name}
        found = again.anonymous().get(f"{ENV}/@latest").json()["data"]
        assert again.anonymous().get(found["wheel_url"]).content == wheel()
        assert again.anonymous().get(found["package_url"]).content == source()
        bob = again.with_token("bob")
        assert push(bob, version="0.2.0").status_code == 200, "and it goes on from there"
    finally:
        again.close()


def test_a_backup_that_was_changed_anywhere_is_refused(filled, tmp_path):
    path = tmp_path / "hub.tar"
    backup.back_up(filled.lab, path, with_runs=False)
    whole = path.read_bytes()
    with tarfile.open(path) as tar:
        places = {info.name: info.offset_data + info.size // 2 for info in tar if info.size}
    wrong = tmp_path / "wrong.tar"
    for place in places.values():
        wrong.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(UserError):
            backup.restore(wrong, tmp_path / "again")
    for length in range(0, places["manifest.json"], len(whole) // 40):  # what follows its end is padding
        wrong.write_bytes(whole[:length])
        with pytest.raises(UserError, match="no whole backup"):
            backup.restore(wrong, tmp_path / "again")
    assert {each.name for each in tmp_path.iterdir()} == {"hub", "hub.tar", "wrong.tar"}


def test_nothing_that_is_there_is_written_over(filled, tmp_path):
    path = tmp_path / "hub.tar"
    path.write_bytes(b"mine")
    with pytest.raises(UserError, match="exists"):
        backup.back_up(filled.lab, path)
    assert path.read_bytes() == b"mine"
    path.unlink()
    backup.back_up(filled.lab, path)
    with pytest.raises(UserError, match="is not empty"):
        backup.restore(path, filled.lab.folder)
    taken = HubDatabase.in_folder(tmp_path)
    taken.migrate()
    with pytest.raises(UserError, match="has tables already"):
        backup.restore(path, tmp_path / "again", database=taken.url)
    taken.close()
    assert not (tmp_path / "again").exists()


def test_a_hub_that_lacks_a_blob_or_is_of_another_release_is_not_backed_up(filled, tmp_path):
    with filled.lab.database.write() as c:
        c.execute(text("UPDATE alembic_version SET version_num = '0001'"))
    with pytest.raises(UserError, match="the release that serves it"):
        backup.back_up(filled.lab, tmp_path / "hub.tar")
    with filled.lab.database.write() as c:
        c.execute(text(f"UPDATE alembic_version SET version_num = '{filled.lab.database.newest_schema()}'"))
        c.execute(text("UPDATE releases SET source_sha256 = :lost"), {"lost": "0" * 64})
    with pytest.raises(StorageError, match="lacks the blob 000000000000"):
        backup.back_up(filled.lab, tmp_path / "hub.tar")
    assert [each.name for each in tmp_path.iterdir()] == ["hub"]


def test_an_archive_that_leads_out_of_the_folder_is_refused(tmp_path):
    for kind, name in ((tarfile.REGTYPE, "../x"), (tarfile.REGTYPE, "/x"), (tarfile.SYMTYPE, "blobs/x")):
        with tarfile.open(tmp_path / "hostile.tar", "w") as tar:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
        with pytest.raises(UserError, match="is no backup of a Hub"):
            backup.restore(tmp_path / "hostile.tar", tmp_path / "again")


KILLED = """
import os, signal, sys
from pathlib import Path
from mettle.hub import backup
from mettle.hub.lab import existing_lab
what, folder, last = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
def count(f):
    def counted(*a, **k):
        global last
        last -= 1
        if last < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return f(*a, **k)
    return counted
backup._BackupWriter.add = count(backup._BackupWriter.add)
backup.os.fsync, backup.os.link, backup._insert = count(os.fsync), count(os.link), count(backup._insert)
if what == "backup":
    backup.back_up(existing_lab(folder / "hub"), folder / "hub.tar")
else:
    backup.restore(folder / "whole.tar", folder / "again")
"""


@pytest.mark.e2e
@pytest.mark.nightly
@pytest.mark.parametrize("what", ["backup", "restore"])
def test_a_kill_at_any_point_leaves_no_half_of_one(filled, tmp_path, what):
    if what == "restore":
        backup.back_up(filled.lab, tmp_path / "whole.tar")
    final = tmp_path / ("hub.tar" if what == "backup" else "again")
    for last in range(100):
        code = subprocess.run([sys.executable, "-c", KILLED, what, str(tmp_path), str(last)], check=False).returncode
        if final.exists():
            break
    assert (code in (0, -signal.SIGKILL), last > 15) == (True, True)
    if what == "backup":
        backup.verify(final)
    else:
        again = HubWriter(final)
        assert everything(again.lab.database) == everything(filled.lab.database)
        again.close()
