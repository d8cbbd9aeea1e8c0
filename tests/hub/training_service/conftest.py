"""A Hub that offers training on `small`, and a program that stands in for the process of the service."""

from __future__ import annotations

import sys
import time

import pytest

from mettle.hub.training_service.offers import offers_of, read_state
from mettle.hub.training_service.supervisor import TrainingServices
from mettle.trainer.service.config import ServiceLimits
from mettle.web.backoff import Backoff

WAIT_S = 300.0
PROGRAM = r"""
import json, os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
folder = Path(sys.argv[1])
config = json.loads((folder / "config.json").read_text())
if (folder / "broken").exists():
    sys.exit("error: this model has no tokenizer")
secrets = {name: os.environ["METTLE_" + name] for name in ("API_KEY", "ADMIN_KEY")}

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self):
        bearer = self.headers["authorization"]
        if self.path == "/admin/usage":
            assert bearer == "Bearer " + secrets["ADMIN_KEY"]
            usage = folder / "usage.json"
            return self.send(usage.read_bytes() if usage.exists() else b'{"owners": []}')
        assert bearer == "Bearer " + secrets["API_KEY"]
        length = int(self.headers.get("content-length") or 0)
        body = self.rfile.read(length) if length else b""
        while self.headers.get("transfer-encoding") == "chunked":
            size = int(self.rfile.readline(), 16)
            body += self.rfile.read(size)
            self.rfile.readline()
            if not size:
                break
        if self.path.endswith("/large"):
            return self.send(b"x" * (5 << 20), kind="application/x-tar")
        if self.path.endswith("/cut"):
            self.close_connection = True
            return
        told = {"path": self.path, "method": self.command, "headers": dict(self.headers), "body": body.decode("latin-1")}
        told |= {"config": config, "pid": os.getpid(), "environment": sorted(os.environ)}
        self.send(json.dumps(told).encode(), 418 if self.path.endswith("/teapot") else 200)

    do_GET = do_POST = do_PUT = do_DELETE = answer

    def send(self, data, status=200, kind="application/json"):
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.send_header("set-cookie", "mettle_session=stolen")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *words):
        pass

server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
ready = folder / "ready.tmp"
ready.write_text(json.dumps({"base_url": f"http://127.0.0.1:{server.server_port}", "pid": os.getpid()}))
ready.rename(folder / "ready.json")
server.serve_forever()
"""


@pytest.fixture
def hub(hub, tmp_path):
    """With an operator's model `small` that is offered as `org/small`."""
    hub.lab.models = tmp_path / "models"
    (hub.lab.models / "small").mkdir(parents=True)
    (hub.lab.models / "small" / "config.json").write_text("{}")
    hub.lab.train_offers = offers_of(hub.lab.models, ["small=org/small"])
    yield hub
    if hub.app.state.training_proxy is not None and hub._portal is not None:
        hub._portal.call(hub.app.state.training_proxy.close)


@pytest.fixture
def services_of():
    """Makes the services of a Hub, with the stand-in for their process."""

    def make(hub, **changes):
        given = {
            "command": lambda folder, is_for_others: [sys.executable, "-c", PROGRAM, str(folder)],
            "backoff": Backoff(0.1, 0.1),
        }
        return TrainingServices(hub.lab, hub.lab.train_offers, ServiceLimits(max_rank=8), **given | changes)

    return make


@pytest.fixture
def services(hub, services_of):
    made = services_of(hub)
    made.start()
    wait_until(lambda: read_state(hub.lab.folder, "small").is_ready)
    yield made
    made.close()


def wait_until(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)
