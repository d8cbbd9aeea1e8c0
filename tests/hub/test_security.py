"""Hostile text, hostile addresses, hostile names."""

import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from mettle.hub.app import STATIC
from mettle.hub.security import HEADERS
from mettle.records.tasks import GroupRecord, RolloutRecord, Turn

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&</pre></script><b onclick=alert(3)>{{7*7}}"


class Outline(HTMLParser):
    """Collects what a browser would run, load or follow."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts, self.handlers, self.styles, self.addresses, self.tags = [], [], [], [], set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        values = dict(attrs)
        if tag == "script" and values.get("type") != "application/json":
            self.scripts.append(values.get("src"))
        self.handlers += [name for name in values if name.startswith("on")]
        self.styles += [name for name in values if name == "style"] + ([tag] if tag == "style" else [])
        self.addresses += [values[name] for name in ("src", "href", "action", "hx-get") if values.get(name)]


def outline(html: str) -> Outline:
    parser = Outline()
    parser.feed(html)
    return parser


@pytest.fixture
def hostile(tmp_path, run_writer):
    """A run in which everything that comes from a model, an environment or a config is hostile."""
    writer = run_writer(tmp_path / "run", steps=3, groups=2)
    writer.train_step(1)
    ledger = writer.ledger
    (draw,) = ledger.draw_tasks([("reverse-text", EVIL, 3, 1)])
    ledger.dispatch(draw.draw_id)
    ids = np.array([*EVIL.encode(), 0xFF, 0xC3, 257, 999_999], np.int32)
    turn = Turn(0, ids, ids, np.full(len(ids), -np.inf, np.float32), np.full(len(ids), 3, np.int32))
    bad = RolloutRecord(
        "evil/../../<b>", 0.5, {EVIL: 1.0},
        [{"role": EVIL, "content": EVIL}, {"role": "user", "content": [{"type": "text", "text": EVIL}, {"type": EVIL}]},
         {"role": "assistant", "content": EVIL, "reasoning_content": EVIL,
          "tool_calls": [{"id": "1", "name": EVIL, "arguments": EVIL}, EVIL]}],
        (turn,), EVIL, answer=EVIL,
    )  # fmt: skip
    failed = RolloutRecord("failed", None, {}, [], (), error_kind="environment", error=EVIL)
    group = GroupRecord(draw, 0, (bad, failed))
    ledger.record_scored(group, writer.shards.append(group))
    ledger.journal.event(EVIL, EVIL, EVIL, evil=EVIL)
    ledger.journal.set_fact("model", EVIL)
    ledger.journal.record_metrics(1, {EVIL: 1.0})
    writer.wait("trainer", EVIL, EVIL, 9)
    ledger.journal.record_process(EVIL, EVIL, pid=None, restarts=0, exit_code=None)
    (tmp_path / "run" / "run.toml").write_text(f"[a]\nb = {json.dumps(EVIL)}\n")
    (tmp_path / "run" / "sources.json").write_text(json.dumps({"a.b": EVIL}))
    (tmp_path / "run" / "logs" / "trainer.log").write_text(
        json.dumps({"message": EVIL, "level": EVIL, "logger": EVIL, "x": EVIL, "traceback": EVIL}) + "\n" + EVIL
    )
    ledger.close()
    return tmp_path


PAGES = [
    "/", "/runs/run", "/runs/run/rollouts", "/runs/run/rollouts/evil%2F..%2F..%2F%3Cb%3E", "/runs/run/rollouts/failed",
    "/runs/run/metrics", "/runs/run/config", "/runs/run/logs", "/runs/%3Cscript%3Ealert(1)%3C/script%3E",
    "/runs/run/rollouts?step=%3Cscript%3E", "/runs/run/rollouts?env=%22%3E%3Cscript%3Ealert(1)%3C/script%3E",
    "/runs/run/logs/trainer.log?words=%22%3E%3Cscript%3E&level=%22%3E",
]  # fmt: skip


@pytest.mark.parametrize("path", PAGES)
async def test_hostile_text_stays_text(browse, hostile, path):
    answer = await browse(hostile).get(path)
    seen = outline(answer.text)
    assert all(src and src.startswith("/static/") for src in seen.scripts), seen.scripts
    assert seen.handlers == []
    assert seen.styles == []
    assert "img" not in seen.tags
    assert all(address.startswith(("/", "#")) and not address.startswith("//") for address in seen.addresses)
    for name, value in HEADERS.items():
        assert answer.headers[name] == value


async def test_live_fragments_escape_too(browse, hostile):
    answer = (await browse(hostile).get("/runs/run/live.json")).json()
    for name, html in answer["fragments"].items():
        seen = outline(html)
        assert (seen.scripts, seen.handlers, seen.styles) == ([], [], []), name
        assert "img" not in seen.tags


async def test_hostile_tokens_are_shown_one_by_one(browse, hostile):
    client = browse(hostile)
    detail = (await client.get("/api/v1/runs/run/rollouts/evil/../../<b>".replace("..", "%2E%2E"))).json()
    tokens = detail["turns"][0]["tokens"]
    assert len(tokens["texts"]) == len(EVIL) + 4
    assert tokens["texts"][-4:] == ["\\xff", "\\xc3", "<|end|>", "#999999"]
    assert tokens["logprobs"][0] is None, "minus infinity is not JSON"


async def test_the_policy_forbids_inline_code_and_other_hosts():
    policy = HEADERS["content-security-policy"]
    assert "unsafe" not in policy
    assert "http" not in policy
    assert "default-src 'none'" in policy


@pytest.mark.parametrize(
    "path",
    [
        "/runs/..%2f..%2fetc", "/runs/%2e%2e", "/runs/../secret", "/runs/outside", "/runs/.hidden",
        "/runs/done/logs/..%2frun.toml", "/runs/done/logs/..%2F..%2Fsecret.log", "/runs/done/logs/%2Fetc%2Fpasswd",
        "/static/..%2fapp.py", "/static/../app.py", "/static/vendor/..%2F..%2Fapp.py",
        "/api/v1/runs/done/logs/..%2f..%2fsecret.log", "/api/v1/runs/..%2foutside",
    ],
)  # fmt: skip
async def test_no_path_leads_out_of_the_folder(browse, runs, tmp_path, path, run_writer):
    run_writer(tmp_path / "outside", steps=2, groups=2).ledger.close()
    folder = tmp_path / "runs"
    folder.mkdir()
    (folder / "done").symlink_to(runs / "done")
    (folder / ".hidden").symlink_to(runs / "done")
    (tmp_path / "secret.log").write_text("the secret")
    answer = await browse(folder).get(path)
    assert answer.status_code == 404, answer.text
    assert "the secret" not in answer.text
    assert "import annotations" not in answer.text


@pytest.mark.parametrize("host", ["evil.example", "evil.example:7860", "127.0.0.1.evil.example", "", "localhost.evil"])
async def test_another_name_for_this_machine_is_refused(browse, runs, host):
    answer = await browse(runs).get("/runs/done", headers={"host": host})
    assert answer.status_code == 400
    assert "reverse" not in answer.text


async def test_a_page_of_another_origin_is_refused(browse, runs):
    for origin, status in (("https://evil.example", 403), ("null", 403), ("http://localhost:7860", 200)):
        answer = await browse(runs).get("/api/v1/runs", headers={"origin": origin})
        assert answer.status_code == status, origin


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:7860", "[::1]:7860", "LOCALHOST:1"])
async def test_loopback_names_are_answered(browse, runs, host):
    assert (await browse(runs).get("/", headers={"host": host})).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
async def test_nothing_can_be_changed(browse, runs, method):
    client = browse(runs)
    for path in ("/", "/runs/done", "/api/v1/runs/done", "/runs/done/rollouts"):
        assert (await client.request(method, path)).status_code == 405


def test_vendored_files_are_the_ones_that_were_written_down():
    vendor = STATIC / "vendor"
    told = dict(re.findall(r"\| `([^`]+)` \|.*\| `([0-9a-f]{64})` \|", (vendor / "VENDORED.md").read_text()))
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in vendor.iterdir()
        if path.suffix not in (".LICENSE", ".md")
    }
    assert told == found


def test_no_file_that_is_served_names_another_host():
    for path in [*STATIC.glob("*.*"), *(Path(STATIC).parent / "templates").iterdir()]:
        addresses = set(re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}", path.read_text()))
        assert addresses <= {"http://www.w3.org"}, path


def test_a_browser_names_the_origin_of_our_own_forms():
    """With "no-referrer" it would send "null", which the door refuses, and no form of a page would work."""
    assert HEADERS["referrer-policy"] == "same-origin"
