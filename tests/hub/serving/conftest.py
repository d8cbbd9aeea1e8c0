"""Engines whose processes are small programs that answer as an inference server does."""

from __future__ import annotations

import sys

import pytest

from mettle.hub.serving.engines import ModelEngines

PROGRAM = r"""
import json, os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
folder = Path(sys.argv[1])
order = json.loads((folder / "order.json").read_text())
if order["name"] == "broken":
    sys.exit("error: this model has no tokenizer")
USAGE = {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.headers["authorization"] != "Bearer " + os.environ["METTLE_API_KEY"]:
            return self.send({"error": {"message": "wrong key"}}, 401)
        if asked.get("max_tokens") == 0:
            return self.send({"error": {"message": "max_tokens must be at least 1"}}, 400)
        if asked.get("stream"):
            wanted, each = asked["stream_options"], {}
            if wanted["continuous_usage_stats"]:
                each = {"usage": {**USAGE, "total_tokens": 5}}
            chunks = [{"choices": [{"delta": {"content": part}}], **each} for part in ("so ", "it is")]
            chunks += [{"choices": [], "usage": USAGE}] * bool(wanted["include_usage"])
            text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
            return self.send(text.encode(), kind="text/event-stream")
        said = f"{asked['model']} heard {len(asked.get('messages', []))}"
        self.send({"choices": [{"message": {"role": "assistant", "content": said}}], "usage": USAGE})

    def send(self, body, status=200, kind="application/json"):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *words):
        pass

server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
ready = folder / "ready.tmp"
ready.write_text(json.dumps({"base_url": f"http://127.0.0.1:{server.server_port}/v1"}))
ready.rename(folder / "ready.json")
server.serve_forever()
"""


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def engines_of(clock):
    """Makes engines over a folder."""

    def make(folder, max_engines=1):
        return ModelEngines(
            folder, max_engines=max_engines, idle_s=60.0, clock=clock,
            command=lambda order: [sys.executable, "-c", PROGRAM, str(order)],
        )  # fmt: skip

    return make
