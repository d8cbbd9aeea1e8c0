"""Blobs in a store that speaks S3: pushes, kills at every step of one, a second server, a backup."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
from tests.hub.archives_made import push, source, wheel
from tests.hub.lab_writer import HubWriter

pytest.importorskip("obstore", reason="obstore is not installed (extra s3)")

from mettle.errors import StorageError, UserError
from mettle.hub import backup
from mettle.runs.ports import free_port
from mettle.storage.object_blobs import ObjectBlobStore

WAIT_S = 600.0
ENV = "/api/v1/environmentshub/bob/my-task"
SCRIPT = Path(__file__).parents[1] / "registry" / "journeys" / "killed_pushes.py"
SIGNED = "AWS4-HMAC-SHA256 Credential=key/20200101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=x"
pytestmark = [pytest.mark.nightly, pytest.mark.e2e, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    """The environment of a server that speaks S3, in a process and an installation of its own (METTLE_MOTO names one)."""
    folder = Path(os.environ.get("METTLE_MOTO") or tmp_path_factory.mktemp("moto") / "venv")
    if not (folder / "bin" / "moto_server").exists():
        venv.create(folder, with_pip=True)
        words = [folder / "bin" / "pip", "install", "-q", "moto[server]"]
        installed = subprocess.run(words, capture_output=True, text=True, check=False)
        if installed.returncode:
            pytest.skip(f"no package index to take moto from: {installed.stderr.strip()[-200:]}")
    port = free_port()
    server = subprocess.Popen(
        [folder / "bin" / "moto_server", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + WAIT_S
    try:
        while True:
            try:
                urlopen(
                    Request(f"{url}/bucket", method="PUT", headers={"Authorization": SIGNED}, data=b""), timeout=60
                ).close()
                break
            except URLError:
                assert server.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.2)
        yield {
            "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true",
        }  # fmt: skip
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(WAIT_S)


@pytest.fixture
def stored(s3, monkeypatch, request):
    """The address of a store that is empty."""
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    return f"s3://bucket/{request.node.name}"


def test_what_one_server_takes_another_machine_serves(stored, tmp_path):
    first = HubWriter(tmp_path / "one", blobs=stored)
    first.person("bob")
    assert push(first.with_token("bob"), visibility="PUBLIC").status_code == 200
    backup.back_up(first.lab, tmp_path / "hub.tar")
    first.lab.blobs = ObjectBlobStore(stored, tmp_path / "another machine")
    found = first.anonymous().get(f"{ENV}/@latest").json()["data"]
    assert first.anonymous().get(found["wheel_url"]).content == wheel()
    assert first.anonymous().get(found["package_url"]).content == source()
    assert first.lab.blobs.sweep(set(), older_than_s=3600) == 0
    assert first.lab.blobs.sweep(set(), older_than_s=-10) == 2
    first.close()
    backup.restore(tmp_path / "hub.tar", tmp_path / "two", blobs=f"{stored}-again")
    again = HubWriter(tmp_path / "two", blobs=f"{stored}-again")
    again.lab.blobs = ObjectBlobStore(f"{stored}-again", tmp_path / "a third")
    found = again.anonymous().get(f"{ENV}/@latest").json()["data"]
    assert again.anonymous().get(found["wheel_url"]).content == wheel()
    again.close()


def test_a_store_that_refuses_or_lies_is_one_line(stored, tmp_path, monkeypatch):
    blobs = ObjectBlobStore(stored, tmp_path / "here")
    name = blobs.add(b"right")
    import obstore

    obstore.put(blobs._store, f"{name[:2]}/{name}", b"wrong")
    with pytest.raises(StorageError, match="another blob"):
        ObjectBlobStore(stored, tmp_path / "there").path(name)
    assert not blobs.has("0" * 64)
    assert not blobs.path("0" * 64).exists()
    lost = ObjectBlobStore("s3://no-such-bucket/x", tmp_path / "lost")
    with pytest.raises(StorageError) as said:
        lost.add(b"x")
    assert "\n" not in str(said.value)
    with pytest.raises(UserError, match="is no address"):
        ObjectBlobStore("bucket", tmp_path)


def test_database_and_store_agree_after_a_kill_at_any_point_of_a_push(s3, tmp_path):
    words = [sys.executable, str(SCRIPT), str(tmp_path), "s3://bucket/killed"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env={**os.environ, **s3})
    assert done.returncode == 0, done.stderr[-2000:]
    *killed, whole = json.loads(done.stdout)
    assert len(killed) == 15  # those of a folder, and before and after each of two puts
    for point in killed:
        assert point["killed"] == -signal.SIGKILL
        assert point["seen"] == {"status": 404}
        assert (point["again"], point["then"]) == (0, {"status": 200, "whole": True})
    assert (whole["killed"], whole["seen"], whole["again"]) == (0, {"status": 200, "whole": True}, 1)
