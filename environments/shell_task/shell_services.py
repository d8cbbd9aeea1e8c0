"""Jobs with processes that are not the model's: one to stop, one to ask.

The host that started them says whether they still run; what a service knows is in its memory and in no file.
"""

from __future__ import annotations

import json
import random
from typing import Any

from shell_answers import ANSWER
from shell_job import NOUNS, PEOPLE, Job, Program
from shell_leftovers import has_ended, runs, text_is

WORKER = """\
import sys, time
# usage: python3 worker.py SPOOL
with open(sys.argv[1], "a") as spool:
    while True:
        print("here", file=spool, flush=True)
        time.sleep(0.5)
"""
SERVICE = """\
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import parse_qs, urlsplit

port, page_size = int(sys.argv[1]), int(sys.argv[2])
ITEMS = json.load(sys.stdin)

class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        asked = urlsplit(self.path)
        page = int(parse_qs(asked.query).get("page", ["1"])[0])
        found = ITEMS[(page - 1) * page_size : page * page_size]
        more = page * page_size < len(ITEMS)
        body = {"items": found, "next": f"/items?page={page + 1}" if more else None}
        body = body if asked.path == "/items" else {"error": "try /items"}
        data = json.dumps(body).encode()
        self.send_response(200 if "items" in body else 404)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass

HTTPServer(("127.0.0.1", port), Answers).serve_forever()
"""


def stop_runaway(rng: random.Random) -> Job:
    """The process that writes a certain file, among others that look like it."""
    names = rng.sample(NOUNS, 3)
    spools = rng.sample([f"/tmp/{noun}.spool" for noun in NOUNS], 3)
    at = rng.randrange(3)
    programs = {
        name: Program(("python3", "{folder}/worker.py", spool), file=spool)
        for name, spool in zip(names, spools, strict=True)
    }
    is_it = f"ls -l $p/fd 2>/dev/null | grep -q '{spools[at]}$'"
    stop = f"for p in /proc/[0-9]*; do {is_it} && kill ${{p#/proc/}}; done; sleep 0.1"
    return Job(
        f"Several processes of `worker.py` run in this machine. One of them fills the file `{spools[at]}`. Stop that "
        "process, and let the others run on.",
        {"worker.py": WORKER},
        ("ps ax -o pid,args 2>/dev/null | grep worker.py", stop),
        (has_ended(names[at]),),
        tuple(runs(name) for name in names if name != names[at]),
        programs=programs,
    )


def ask_service(rng: random.Random) -> Job:
    """A service that answers page by page."""
    port, owner = rng.randint(20000, 30000), rng.choice(PEOPLE)
    items: list[dict[str, Any]] = [
        {"id": number, "owner": rng.choice([owner, *PEOPLE[:4]]), "price": rng.randint(1, 90)}
        for number in range(rng.randint(12, 40))
    ]
    total = sum(item["price"] for item in items if item["owner"] == owner)
    program = (
        f"import json, urllib.request\nurl, total = '/items', 0\nwhile url:\n"
        f"    page = json.load(urllib.request.urlopen('http://127.0.0.1:{port}' + url))\n"
        f"    total += sum(i['price'] for i in page['items'] if i['owner'] == '{owner}')\n    url = page['next']\n"
        f"print(total)"
    )
    return Job(
        f"A service in this machine answers `GET http://127.0.0.1:{port}/items` in JSON, some items at a time; `next` "
        f"is the path of the next page, or null. Add up the `price` of all items whose `owner` is `{owner}`, and write "
        f"the sum to `{ANSWER}`.",
        {},
        (
            f"python3 -c \"import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:{port}/items')"
            '.read().decode())"',
            f"cat > total.py <<'END'\n{program}\nEND\npython3 total.py > {ANSWER}",
        ),
        (text_is(ANSWER, str(total)),),
        programs={
            "service": Program(
                ("python3", "-c", SERVICE, str(port), str(rng.randint(3, 7))), json.dumps(items).encode(), port
            )
        },
    )


FAMILIES = (stop_runaway, ask_service)
