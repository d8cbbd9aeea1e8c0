"""Sandboxes as a part of the Hub: its people and scopes decide, before anything is started."""

from __future__ import annotations

import pytest
from tests.hub.lab_writer import HubWriter
from tests.serving import app_on_a_thread

import httpx

from mettle.hub.app import create_app
from mettle.hub.sandboxes import HubSandboxes
from mettle.sandbox.config import SandboxConfig
from mettle.sandbox.service.config import QuotaConfig

PATHS = ("/api/v1/sandbox", "/api/v1/machines", "/api/v1/status", "/api/v1/sandbox/status:batchGet")


@pytest.fixture
def offered(tmp_path):
    """A Hub with bob and eve that offers sandboxes without isolation; its application is served on a port."""
    made = HubWriter(tmp_path / "hub")
    made.person("bob")
    made.person("eve")
    sandboxes = HubSandboxes(made.lab, "127.0.0.1", SandboxConfig(backend="unsafe"), QuotaConfig(max_machines=2))
    made.sandboxes = sandboxes
    made.app = create_app(made.lab.folder / "runs", lab=made.lab, sandboxes=sandboxes)
    yield made
    made.close()


def test_who_may_not_ask_starts_nothing(offered):
    callers = {
        "nobody": (offered.anonymous(), 401, 401),
        "a wrong token": (offered.anonymous(), 401, 401),
        "another area": (offered.with_token("bob", "training:write"), 403, 403),
        "reading": (offered.with_token("bob", "sandboxes:read"), None, 403),
    }
    callers["a wrong token"][0].headers["Authorization"] = "Bearer mtl_none"
    for who, (client, read, write) in callers.items():
        client.base_url = "http://127.0.0.1"
        for path in PATHS:
            if read is not None:
                assert client.get(path).status_code == read, (who, path)
            assert client.post(path, json={}).status_code == write, (who, path)
    assert offered.anonymous().post("http://127.0.0.1/gw/m/x/exec", json={}).status_code in (401, 502)
    elsewhere = {"Host": "evil.test"}
    assert offered.with_token("bob").get("http://evil.test/api/v1/sandbox", headers=elsewhere).status_code == 400
