"""A Hub with accounts in a folder, and people who ask it things without a server in between."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from anyio.from_thread import BlockingPortal, start_blocking_portal
from starlette.testclient import TestClient

from mettle.hub.accounts import people, teams, tokens
from mettle.hub.accounts.passwords import Passwords
from mettle.hub.app import create_app
from mettle.hub.database import HubDatabase
from mettle.hub.lab import Lab
from mettle.storage.object_blobs import blob_store

PASSWORD = "a long password"
QUICK = Passwords(memory_kib=8, passes=1)
HASHED = QUICK.hash(PASSWORD)


class Somebody(TestClient):
    """A client of a Hub with a token, a session, or neither."""

    csrf = ""

    def form(self, path: str, **fields: str) -> httpx.Response:
        """Send a form as a page of this session would."""
        return self.post(path, data={"csrf": self.csrf, **fields}, follow_redirects=False)


class InProcess(httpx.BaseTransport):
    """What a client of the Hub sends goes to an application in this process."""

    def __init__(self, client: Somebody) -> None:
        self.client = client

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        sent = [(name, value) for name, value in request.headers.items() if name not in ("content-length", "host")]
        answer = self.client.request(
            request.method, str(request.url), content=request.read(), headers=dict(sent), follow_redirects=False
        )
        return httpx.Response(answer.status_code, headers=dict(answer.headers), content=answer.content, request=request)


class HubWriter:
    """A Hub whose people are made here."""

    def __init__(self, folder: Path, *, are_runs_open: bool = True, url: str = "", blobs: str = "") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if not url and not (folder / "hub.db").exists():
            (folder / "hub.db").write_bytes(_new_database())
        database = HubDatabase(url) if url else HubDatabase.in_folder(folder)
        if url:
            database.migrate()
        self._open = ExitStack()
        self._portal: BlockingPortal | None = None
        self.lab = Lab(
            folder, database, blob_store(blobs, folder / "blobs"), passwords=QUICK, are_runs_open=are_runs_open
        )
        (folder / "runs").mkdir(exist_ok=True)
        self.app = create_app(folder / "runs", workspace=folder / "workspace", allowed_hosts=None, lab=self.lab)

    def person(self, slug: str, *, is_admin: bool = False) -> people.Person:
        with self.lab.database.write() as c:
            return people.create_person(c, slug, HASHED, is_admin=is_admin)

    def team(self, slug: str, founder: str, *members: str) -> teams.Team:
        with self.lab.database.write() as c:
            found = [people.find_person(c, name) for name in (founder, *members)]
            team = teams.create_team(c, slug, found[0])
            for member in found[1:]:
                teams.add_member(c, team.id, member.id, teams.MEMBER)
        return team

    def token(self, slug: str, *scopes: str) -> str:
        with self.lab.database.write() as c:
            person = people.find_person(c, slug)
            return tokens.create_token(c, person.id, "a test", scopes or tokens.SCOPES)[1]

    def anonymous(self) -> Somebody:
        """A client on the Hub's own event loop: by itself it would start one for each request."""
        if self._portal is None:
            self._portal = self._open.enter_context(start_blocking_portal())
        client = Somebody(self.app, base_url="http://hub.test", raise_server_exceptions=False)
        client.portal = self._portal
        return client

    def with_token(self, slug: str, *scopes: str) -> Somebody:
        client = self.anonymous()
        client.headers["Authorization"] = f"Bearer {self.token(slug, *scopes)}"
        return client

    def signed_in(self, slug: str) -> Somebody:
        client = self.anonymous()
        answer = client.post("/signin", data={"username": slug, "password": PASSWORD}, follow_redirects=False)
        assert answer.status_code == 303, answer.text
        client.csrf = re.search(r'name="csrf" value="([^"]+)"', client.get("/account").text)[1]
        client.headers["X-CSRF-Token"] = client.csrf
        return client

    def close(self) -> None:
        self._open.close()
        self.lab.close()


@cache
def _new_database() -> bytes:
    """What migrating an empty database leaves, which is most of the time that a new Hub takes."""
    with TemporaryDirectory() as folder:
        database = HubDatabase.in_folder(Path(folder))
        database.migrate()
        database.close()
        return (Path(folder) / "hub.db").read_bytes()


def everything(database: HubDatabase) -> dict[str, list[Any]]:
    """All rows of all tables, to compare two states of a database."""
    from mettle.hub.tables import metadata

    with database.read() as c:
        return {name: sorted(map(repr, c.execute(table.select()).all())) for name, table in metadata.tables.items()}


def differences(c: Any) -> list[Any]:
    """Where the tables of a database are not those that are described."""
    from alembic.autogenerate import compare_metadata
    from alembic.runtime.migration import MigrationContext

    from mettle.hub import tables

    told = {"include_name": lambda name, kind, parents: tables.is_described(name)}
    return list(compare_metadata(MigrationContext.configure(c, opts=told), tables.metadata))


@contextmanager
def room_for(database: HubDatabase, pages: int) -> Iterator[None]:
    """While it is open, the database may grow by so many pages: a disk that is nearly full."""
    from sqlalchemy import event

    def limit(connection: Any) -> None:
        now = connection.exec_driver_sql("PRAGMA page_count").scalar()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {now + pages}")

    event.listen(database.engine, "begin", limit)
    try:
        yield
    finally:
        event.remove(database.engine, "begin", limit)
        database.engine.dispose()
