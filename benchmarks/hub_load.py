"""What a Hub that is full answers in: pages and API routes over thousands of environments, runs, evaluations.

The Hub is filled through its own tables and run directories through the run's own ledger; each route is asked several
times, in this process, without a network. The numbers that matter are the 95th percentile of each route in processor
milliseconds, which other programs on the machine do not change much, and the bytes that it sends.

Run: `python benchmarks/hub_load.py [--environments 10000] [--runs 1000] [--evaluations 1000] [--steps 100000]
[--asks 20] [--json FILE]`
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from sqlalchemy import insert
from starlette.testclient import TestClient

from mettle.hub import tables
from mettle.hub.accounts import people, tokens
from mettle.hub.accounts.identifiers import new_id
from mettle.hub.accounts.passwords import Passwords
from mettle.hub.app import create_app
from mettle.hub.database import HubDatabase
from mettle.hub.lab import Lab
from mettle.hub.registry.catalogue import refresh_listing
from mettle.storage.ledger import Ledger
from mettle.storage.object_blobs import blob_store
from mettle.storage.run_dir import RunDir

WORDS = ("sums", "words", "proofs", "games", "shell", "search", "maps", "poker", "science", "code", "letters", "chess")
README = "# An environment\n\nIt asks for {} and {}, one turn, and rewards what is right.\n" + "Some more words. " * 60
TARGET_MS, TARGET_BYTES = 100.0, 50_000
METRICS = ("loss/mean", "entropy/mean", "mismatch_kl/mean", "optim/grad_norm")


def fill(folder: Path, num_environments: int, num_evaluations: int) -> Lab:
    """A Hub with ann, her environments of one release each, and evaluations of them."""
    database = HubDatabase.in_folder(folder)
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
                "metadata": {}, "metrics": {}, "num_samples": 1000, "num_bytes": 0, "mean": index % 97 / 97,
                "ci_low": index % 97 / 97 - 0.01, "ci_high": index % 97 / 97 + 0.01, "num_tasks": 100,
                "created_at": now - index, "updated_at": now - index, "completed_at": now - index,
            }
            for index in range(num_evaluations)
        ]  # fmt: skip
        if results:
            c.execute(insert(tables.results), results)
    return Lab(folder, database, blob_store("", folder / "blobs"))


def write_runs(root: Path, num_runs: int, num_steps: int) -> None:
    """Short runs, and `long` with `num_steps` steps of each of `METRICS`."""
    for index in range(num_runs):
        ledger = Ledger(RunDir(root / f"run-{index:05d}").ledger)
        ledger.journal.record_metrics(1, {"loss/mean": 0.5})
        ledger.journal.set_fact("state", "finished")
        ledger.close()
    ledger = Ledger(RunDir(root / "long").ledger)
    rows = ((name, step, math.sin(step / 1000)) for name in METRICS for step in range(1, num_steps + 1))
    ledger.journal.set_fact("state", "finished")
    with ledger.database.transaction() as c:
        c.executemany("INSERT INTO metrics (name, step, value, at) VALUES (?, ?, ?, 0)", rows)
    ledger.close()


def measure(client: TestClient, path: str, asks: int) -> dict[str, Any]:
    """Processor milliseconds of a route after one warm-up, and bytes."""
    first = client.get(path)
    assert first.status_code == 200, f"{path} answers {first.status_code}: {first.text[:200]}"
    spent = []
    for _ in range(asks):
        before = time.process_time()
        client.get(path)
        spent.append(1000 * (time.process_time() - before))
    p95 = statistics.quantiles(spent, n=20, method="inclusive")[-1]
    return {"path": path, "p50_ms": statistics.median(spent), "p95_ms": p95, "bytes": len(first.content)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("environments", 10_000), ("runs", 1000), ("evaluations", 1000), ("steps", 100_000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--asks", type=int, default=20)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mettle-hub-load-") as scratch:
        folder = Path(scratch) / "hub"
        folder.mkdir()
        lab = fill(folder, given.environments, given.evaluations)
        write_runs(folder / "runs", given.runs, given.steps)
        with lab.database.write() as c:
            found = people.find_person(c, "ann")
            assert found is not None, "she was made when the Hub was filled"
            token = tokens.create_token(c, found.id, "load", tokens.SCOPES)[1]
        app = create_app(folder / "runs", workspace=Path(scratch) / "workspace", allowed_hosts=None, lab=lab)
        client = TestClient(app, base_url="http://hub.test", headers={"Authorization": f"Bearer {token}"})
        one = f"ann/{WORDS[0]}-{WORDS[0]}-0"
        paths = [
            "/environments", "/environments?words=poker", "/environments?words=poker+maps", "/environments?tag=chess",
            "/environments?page=300", f"/environments/{one}", "/evaluations", "/evaluations?words=model-3",
            f"/evaluations?environment={one}", "/", "/?page=20", "/runs/long", "/runs/long/live.json",
            "/runs/long/metrics", "/api/v1/environmentshub/?limit=20", "/api/v1/evaluations/?limit=20", "/usage",
        ]  # fmt: skip
        rows = [measure(client, path, given.asks) for path in paths]
        lab.close()
    print(f"{'route':55} {'p50 ms':>8} {'p95 ms':>8} {'bytes':>9}")
    for row in rows:
        print(f"{row['path']:55} {row['p50_ms']:8.1f} {row['p95_ms']:8.1f} {row['bytes']:9,}")
    slow = [row["path"] for row in rows if row["p95_ms"] > TARGET_MS]
    print(f"over {TARGET_MS:.0f} ms: {', '.join(slow) or 'none'}")
    if given.json:
        about = {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
        sizes = {name: getattr(given, name) for name in ("environments", "runs", "evaluations", "steps", "asks")}
        given.json.write_text(json.dumps({**about, **sizes, "routes": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
