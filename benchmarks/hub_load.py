"""What a Hub that is full answers in: pages and API routes over thousands of environments, runs, evaluations.

The Hub is filled through its own tables, run directories through the run's own ledger, and samples as pushes leave
them; then servers are started over it, one or several, and asked in turn, each route several times. Where a route
stands for many things (an evaluation, a page), each time another one is asked for. The numbers that matter are the 95th
percentile of each route in processor milliseconds of the server, which other programs on the machine do not change
much, and the bytes that it sends. `ms` is what passes until the answer is there: with PostgreSQL its work too, and the
wait for processors that others use. With `--database` an empty PostgreSQL database is filled.

Run: `python benchmarks/hub_load.py [--environments 10000] [--runs 1000] [--evaluations 1000] [--samples 1000000]
[--steps 100000] [--on-board 1000] [--asks 20] [--servers 1] [--database postgresql+psycopg://me@host/hub]
[--json FILE]`
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import func, insert, select

from mettle.evals.results import METADATA, RESULTS
from mettle.hub import tables
from mettle.hub.accounts import people, tokens
from mettle.hub.accounts.identifiers import new_id
from mettle.hub.accounts.passwords import Passwords
from mettle.hub.database import HubDatabase
from mettle.hub.lab import Lab
from mettle.hub.registry.catalogue import refresh_listing
from mettle.hub.results import pushed
from mettle.storage.evals import EvalPlan, EvalStore
from mettle.storage.files import write_json
from mettle.storage.ledger import Ledger
from mettle.storage.object_blobs import blob_store
from mettle.storage.run_dir import RunDir
from mettle.storage.shards import ShardWriter

WORDS = ("sums", "words", "proofs", "games", "shell", "search", "maps", "poker", "science", "code", "letters", "chess")
README = "# An environment\n\nIt asks for {} and {}, one turn, and rewards what is right.\n" + "Some more words. " * 60
TARGET_MS = 100.0
METRICS = ("loss/mean", "entropy/mean", "mismatch_kl/mean", "optim/grad_norm")


def fill(
    folder: Path, num_environments: int, num_evaluations: int, num_samples: int, num_on_board: int, address: str
) -> Lab:
    """A Hub with ann, her environments of one release each, evaluations of them, and one environment with many."""
    database = HubDatabase(address) if address else HubDatabase.in_folder(folder)
    database.migrate()
    now = time.time()
    with database.write() as c:
        ann = people.create_person(c, "ann", Passwords(memory_kib=8, passes=1).hash("a long password"), is_admin=True)
        environments, releases = [], []
        for index in range(num_environments):
            one, other = WORDS[index % len(WORDS)], WORDS[index // 7 % len(WORDS)]
            row = {
                "id": new_id(), "owner_id": ann.id, "name": f"{one}-{other}-{index}", "visibility": "PUBLIC",
                "description": f"About {one} and {other}.", "tags": [one], "forked_from": "", "num_downloads": 0,
                "created_at": now - index, "updated_at": now - index,
            }  # fmt: skip
            environments.append(row)
            release: dict[str, Any] = {
                column.name: "" for column in tables.releases.columns if column.name not in ("card", "metadata")
            }
            releases.append(
                release | {
                    "id": new_id(), "environment_id": row["id"], "version": "0.1.0", "content_hash": f"{index:064x}",
                    "state": "ready", "is_yanked": False, "published_by": "ann", "metadata": {}, "card": None,
                    "readme": README.format(one, other), "wheel_bytes": 1, "source_bytes": 1, "created_at": now - index,
                }
            )  # fmt: skip
        c.execute(insert(tables.environments), environments)
        c.execute(insert(tables.releases), releases)
        for row in environments:
            refresh_listing(c, row["id"])
        results = [
            {
                "id": new_id(), "owner_id": ann.id, "pushed_by": "ann", "name": f"evaluation {index}",
                "environment": f"ann/{environments[index % 50]['name']}",
                "environment_id": environments[index % 50]["id"],
                "model": f"model-{index // 50}", "status": "COMPLETED", "is_public": True, "framework": "mettle",
                "metadata": {}, "metrics": {}, "num_samples": num_samples // num_evaluations, "num_bytes": 0,
                "mean": index % 97 / 97,
                "ci_low": index % 97 / 97 - 0.01, "ci_high": index % 97 / 97 + 0.01, "num_tasks": 100,
                "created_at": now - index, "updated_at": now - index, "completed_at": now - index,
            }
            for index in range(num_evaluations)
        ]  # fmt: skip
        crowded = environments[min(60, num_environments - 1)]
        results += [
            {
                **results[0], "id": new_id(), "name": f"crowd {index}", "environment": f"ann/{crowded['name']}",
                "environment_id": crowded["id"], "model": f"crowd-{index}", "num_samples": 0,
                "mean": index / num_on_board, "ci_low": index / num_on_board - 0.02,
                "ci_high": index / num_on_board + 0.02, "created_at": now - 10_000 - index,
            }
            for index in range(num_on_board if results else 0)
        ]  # fmt: skip
        if results:
            c.execute(insert(tables.results), results)
    return Lab(folder, database, blob_store("", folder / "blobs"))


def write_samples(lab: Lab, num_samples: int) -> None:
    """The files of each evaluation, as a push that was completed leaves them."""
    with lab.database.read() as c:
        table = tables.results.c
        rows = c.execute(select(table.id, table.environment, table.model).where(table.num_samples > 0)).all()
    each = num_samples // max(1, len(rows))
    template = json.dumps(
        {
            "example_id": -1, "reward": -2, "error": None, "metrics": {"correct": -2}, "info": {}, "answer": "seven",
            "prompt": [{"role": "user", "content": "How many cards has -3 in its hand, when two are played?"}],
            "completion": [{"role": "assistant", "content": "First I count. " * 20 + "It is seven."}],
        }, separators=(",", ":"),
    )  # fmt: skip
    for number, (result_id, environment, model) in enumerate(rows):
        folder = pushed.folder_of(lab.folder, result_id)
        folder.mkdir(parents=True)
        with (folder / RESULTS).open("w", encoding="utf-8") as file:
            for index in range(each):
                name = f"{WORDS[(index + number) % 12]}{index % 97}"
                file.write(
                    template.replace('"example_id":-1', f'"example_id":{index // 10}')
                    .replace(":-2", f":{index % 3 % 2}.0").replace("-3", name) + "\n"
                )  # fmt: skip
        told = {"env_id": environment, "model": model, "num_examples": each // 10, "rollouts_per_example": 10}
        write_json(folder / METADATA, told)


def write_runs(root: Path, num_runs: int, num_steps: int) -> None:
    """Short runs, of which every tenth is an evaluation by itself, and `long` with `num_steps` steps of `METRICS`."""
    for index in range(num_runs):
        ledger = Ledger(RunDir(root / f"run-{index:05d}").ledger)
        if index % 10 == 9:
            store = EvalStore(ledger.database, ShardWriter(RunDir(root / f"run-{index:05d}").rollouts))
            number = store.begin(EvalPlan("eval", "words", 2, 4, 0, "m", {"rollouts_per_example": 2}))
            store.end(number, mean=0.5, interval=(0.4, 0.6), metadata={"time": 6.0})
        else:
            ledger.journal.record_metrics(1, {"loss/mean": 0.5})
            ledger.journal.set_fact("state", "finished")
        ledger.close()
    ledger = Ledger(RunDir(root / "long").ledger)
    rows = ((name, step, math.sin(step / 1000)) for name in METRICS for step in range(1, num_steps + 1))
    ledger.journal.set_fact("state", "finished")
    with ledger.database.transaction() as c:
        c.executemany("INSERT INTO metrics (name, step, value, at) VALUES (?, ?, ?, 0)", rows)
    ledger.close()


@dataclass
class Server:
    """A server in a process of its own."""

    process: subprocess.Popen[bytes]
    client: httpx.Client
    start_s: float
    """Until it answered for the first time."""
    start_cpu_s: float
    """Processor time until then: what the start takes where nothing else runs, or less."""

    @classmethod
    @contextmanager
    def started(cls, folder: Path, workspace: Path, database: str, token: str) -> Iterator[Server]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        words = ["-m", "mettle.cli.main", "hub", "serve", "--data", str(folder), "--port", str(port)]
        words += ["--runs", str(folder / "runs"), *(["--database", database] if database else [])]
        words += ["--no-check-pushes", "--no-sandboxes"]
        log = workspace / f"server-{port}.log"
        since = time.monotonic()
        with log.open("wb") as file:
            process = subprocess.Popen([sys.executable, *words], cwd=workspace, stdout=file, stderr=file)
        headers = {"Authorization": f"Bearer {token}"}
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=300)
        try:
            deadline = time.monotonic() + 60
            while True:
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                try:
                    if client.get("/health").status_code == 200:
                        break
                except httpx.TransportError:
                    time.sleep(0.02)
            started = cls(process, client, time.monotonic() - since, 0.0)
            started.start_cpu_s = started.cpu_s()
            yield started
        finally:
            client.close()
            process.terminate()
            process.wait(60)

    def wait_until_quiet(self) -> float:
        """Until it has read beside the requests what lists show; returns the processor seconds since it answered."""
        before, since = self.cpu_s(), self.start_cpu_s
        while True:
            time.sleep(1.0)
            now = self.cpu_s()
            if now - before < 0.02:
                return now - since
            before = now

    def cpu_s(self) -> float:
        """Processor seconds of all of its threads."""
        used = 0
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            with suppress(OSError):  # a thread that has ended meanwhile
                used += int((task / "schedstat").read_text().split()[0])
        return used / 1e9


def measure(servers: list[Server], name: str, paths: list[str], asks: int) -> dict[str, Any]:
    """A route, asked of the servers in turn after one warm-up of each; each time the next of `paths`."""
    for server in servers:
        first = server.client.get(paths[-1])
        assert first.status_code == 200, f"{paths[-1]} answers {first.status_code}: {first.text[:200]}"
    cpu, wall, most = [], [], 0
    for number in range(asks):
        server = servers[number % len(servers)]
        before, since = server.cpu_s(), time.perf_counter()
        answer = server.client.get(paths[number % len(paths)])
        wall.append(1000 * (time.perf_counter() - since))
        cpu.append(1000 * (server.cpu_s() - before))
        most = max(most, len(answer.content))
        assert answer.status_code == 200, f"{paths[number % len(paths)]} answers {answer.status_code}"
    told = {f"p{n}_ms": statistics.quantiles(cpu, n=100, method="inclusive")[n - 1] for n in (50, 95)}
    took = {f"p{n}_wall_ms": statistics.quantiles(wall, n=100, method="inclusive")[n - 1] for n in (50, 95)}
    return {"route": name, **told, **took, "bytes": most}


def routes(lab: Lab) -> dict[str, list[str]]:
    """What is asked, by the words that a table has for it."""
    one = f"ann/{WORDS[0]}-{WORDS[0]}-0"
    with lab.database.read() as c:
        results = tables.results.c
        ids = list(c.scalars(select(results.id).where(results.num_samples > 0).order_by(results.created_at)))
        crowded = c.scalar(select(results.environment).where(results.num_samples == 0).limit(1))
        total = c.scalar(select(func.count()).select_from(tables.environments)) or 0
    many = [f"/evaluations/{each}" for each in ids[:400]]
    asked = {
        "environments, the newest": ["/environments"],
        "environments with a word": [f"/environments?words={word}" for word in WORDS],
        "environments with two": [f"/environments?words={one}+{other}" for one in WORDS[:4] for other in WORDS[4:]],
        "environments with a word that all have": ["/environments?words=environment"],
        "environments with a tag": [f"/environments?tag={word}" for word in WORDS],
        "environments, the last pages": [f"/environments?page={max(1, total // 30 - n)}" for n in range(10)],
        "environments by name, the last pages": [
            f"/environments?sort=name&page={max(1, total // 30 - n)}" for n in range(10)
        ],
        "one environment": [f"/environments/{one}"],
        "all names for pip": ["/simple/"],
        "evaluations": ["/evaluations"],
        "evaluations with a word": [f"/evaluations?words=model-{n}" for n in range(20)],
        "evaluations of an environment": [f"/evaluations?environment={one}"],
        "runs, the newest 50": ["/"],
        "runs, the last pages": ["/?page=18", "/?page=17"],
        "the long run": ["/runs/long"],
        "what is new of it": ["/runs/long/live.json"],
        "its metrics": ["/runs/long/metrics"],
        "environments, for programs": ["/api/v1/environmentshub/?limit=20"],
        "evaluations, for programs": ["/api/v1/evaluations/?limit=20"],
        "usage": ["/usage"],
    }
    if crowded is not None:
        asked["the leaderboard of many"] = [f"/evaluations?environment={crowded}"]
        asked["the same for programs"] = [f"/api/v1/evaluations/leaderboard?environment={crowded}"]
    if (pushed.folder_of(lab.folder, ids[0]) / RESULTS).exists():
        asked |= {
            "an evaluation, for the first time": many,
            "an evaluation, once more": many[-1:],
            "its samples": [f"{many[-1]}/rollouts?page={n}" for n in range(1, 20)],
            "words in samples, for the first time": [f"{each}/rollouts?words=poker7" for each in many],
            "other words in the same samples": [f"{many[-1]}/rollouts?words={word}{n}" for n, word in enumerate(WORDS)],
            "a sample": [f"{many[-1]}/rollouts/{n}" for n in range(20)],
            "samples, for programs": [f"/api/v1{each}/samples?limit=100" for each in many],
        }
    return asked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {
        "environments": 10_000, "runs": 1000, "evaluations": 1000, "samples": 1_000_000, "steps": 100_000,
        "on-board": 1000,
    }  # fmt: skip
    for name, default in {**sizes, "asks": 20, "servers": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--database", default="", help="address of an empty PostgreSQL database; else SQLite")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mettle-hub-load-") as scratch, ExitStack() as stack:
        folder = Path(scratch) / "hub"
        folder.mkdir()
        lab = fill(folder, given.environments, given.evaluations, given.samples, given.on_board, given.database)
        write_samples(lab, given.samples)
        write_runs(folder / "runs", given.runs, given.steps)
        with lab.database.write() as c:
            found = people.find_person(c, "ann")
            assert found is not None, "she was made when the Hub was filled"
            token = tokens.create_token(c, found.id, "load", tokens.SCOPES)[1]
        servers = [
            stack.enter_context(Server.started(folder, Path(scratch), given.database, token))
            for _ in range(given.servers)
        ]
        begun = [
            {"s": each.start_s, "cpu_s": each.start_cpu_s, "warm_up_cpu_s": each.wait_until_quiet()} for each in servers
        ]
        rows = [measure(servers, name, paths, given.asks) for name, paths in routes(lab).items()]
        lab.close()
    print(f"{'route':40} {'p50 CPU ms':>10} {'p95 CPU ms':>10} {'p50 ms':>8} {'p95 ms':>8} {'bytes':>9}")
    for row in rows:
        print(
            f"{row['route']:40} {row['p50_ms']:10.1f} {row['p95_ms']:10.1f} {row['p50_wall_ms']:8.1f}"
            f" {row['p95_wall_ms']:8.1f} {row['bytes']:9,}"
        )
    for each in begun:
        print(
            f"first answer after {each['s']:.2f} s ({each['cpu_s']:.2f} processor s),"
            f" then {each['warm_up_cpu_s']:.2f} processor s beside requests until all runs are known"
        )
    slow = [row["route"] for row in rows if row["p95_ms"] > TARGET_MS]
    print(f"over {TARGET_MS:.0f} processor ms: {', '.join(slow) or 'none'}")
    if given.json:
        about = {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
        asked = {name: getattr(given, name) for name in (*(n.replace("-", "_") for n in sizes), "asks", "servers")}
        kind = "PostgreSQL" if given.database else "SQLite"
        given.json.write_text(
            json.dumps({**about, "database": kind, **asked, "starts": begun, "routes": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
