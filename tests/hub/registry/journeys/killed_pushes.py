"""Pushes of which each is killed (kill -9) at another point; prints what was found after each.

A push is forked off, and kills itself just before its nth effect: a commit of the database, the flushing of a blob, its renaming, or the flushing of its folder.
The last one, for which there is no nth effect, goes through. `python killed_pushes.py FOLDER [s3://BUCKET/PREFIX]`; in DATABASE_ADDRESS, where it is set, `{}` is the point's number.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

from tests.hub.archives_made import push, source, wheel
from tests.hub.lab_writer import HubWriter

BLOBS = sys.argv[2] if len(sys.argv) > 2 else ""
DATABASE = os.environ.get("DATABASE_ADDRESS", "")
ENV = "/api/v1/environmentshub/bob/my-task"


def blobs_of(folder: Path) -> str:
    return f"{BLOBS}/{folder.parent.name}" if BLOBS else ""


def push_until(folder: Path, last: int, token: str) -> None:
    """In the forked process: one push that ends before its effect number `last`."""
    import sqlalchemy

    from mettle.storage import blobs

    left = [last]

    def count(*_: object) -> None:
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    replace, fsync = os.replace, os.fsync
    blobs.os.replace = lambda *paths: (count(), replace(*paths))[1]
    blobs.os.fsync = lambda handle: (count(), fsync(handle))[1]
    if BLOBS:
        import obstore

        put = obstore.put
        obstore.put = lambda *args: (count(), put(*args), count())[1]
    hub = HubWriter(folder, url=DATABASE.format(folder.parent.name), blobs=blobs_of(folder))
    sqlalchemy.event.listen(hub.lab.database.engine, "commit", count)
    client = hub.anonymous()
    client.headers["Authorization"] = f"Bearer {token}"
    client.get("/api/v1/user/whoami")  # notes the use of the token, once
    left[0] = last
    answer = push(client, visibility="PUBLIC")
    os._exit(0 if answer.status_code == 200 else 1)


def looked_at(folder: Path) -> dict[str, object]:
    """What somebody else sees afterwards."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return dict(json.loads((folder.parent / "seen.json").read_text()))
    hub = HubWriter(folder, url=DATABASE.format(folder.parent.name), blobs=blobs_of(folder))
    client = hub.anonymous()
    found = client.get(f"{ENV}/@latest")
    seen: dict[str, object] = {"status": found.status_code}
    if found.status_code == 200:
        data = found.json()["data"]
        seen["whole"] = (
            client.get(data["wheel_url"]).content == wheel() and client.get(data["package_url"]).content == source()
        )
    (folder.parent / "seen.json").write_text(json.dumps(seen))
    os._exit(0)


def main(root: Path) -> None:
    points = []
    for last in range(100):
        folder = root / str(last) / "hub"
        maker = os.fork()
        if not maker:
            hub = HubWriter(folder, url=DATABASE.format(last), blobs=blobs_of(folder))
            hub.person("bob")
            (root / "token").write_text(hub.token("bob"))
            os._exit(0)
        os.waitpid(maker, 0)
        token = (root / "token").read_text()
        codes = []
        for stop in (last, 100):
            child = os.fork()
            if not child:
                push_until(folder, stop, token)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            if stop == last:
                killed = looked_at(folder)
        points.append({"killed": codes[0], "seen": killed, "again": codes[1], "then": looked_at(folder)})
        if codes[0] != -signal.SIGKILL:
            break
    print(json.dumps(points))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
