"""A PostgreSQL of a test's own: made in a new folder, reached through a Unix socket in it, stopped by its process id."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.hub.lab_writer import HubWriter

WAIT_S = 300.0
KINDS = ["sqlite", pytest.param("postgresql", marks=[pytest.mark.nightly, pytest.mark.e2e])]
"""Of databases. PostgreSQL has to be installed, which it is not everywhere."""


@contextlib.contextmanager
def hub_on(kind: str, folder: Path) -> Iterator[HubWriter]:
    """A Hub with bob and eve on SQLite, or on a PostgreSQL of its own; the test is skipped where there is none."""
    with contextlib.ExitStack() as stack:
        url = ""
        if kind == "postgresql":
            pytest.importorskip("psycopg", reason="psycopg is not installed (extra postgres)")
            if postgres_programs() is None:
                pytest.skip("PostgreSQL is not installed here")
            url = stack.enter_context(own_database(stack.enter_context(own_postgres()), "hub"))
        made = HubWriter(folder, url=url)
        stack.callback(made.close)
        for name in ("bob", "eve"):
            made.person(name)
        yield made


def postgres_programs() -> Path | None:
    """The folder of `initdb` and `postgres`; None where there is no PostgreSQL."""
    found = shutil.which("initdb")
    if found:
        return Path(found).resolve().parent
    known = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return known[-1].parent if known else None


@contextlib.contextmanager
def own_postgres() -> Iterator[str]:
    """Its address up to the name of the database, `{}`. Runs as the user `postgres` where the tests run as root."""
    programs = postgres_programs()
    assert programs is not None, "the caller has looked"
    user = "postgres" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
    run_as = {"user": user} if os.geteuid() == 0 else {}
    folder = Path(tempfile.mkdtemp(prefix="pg-"))
    try:
        shutil.chown(folder, user)
        words = [programs / "initdb", "-D", folder / "data", "-U", "hub", "-A", "trust", "--no-sync", "-E", "UTF8"]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, cwd="/", **run_as)
        settings = ["listen_addresses=", f"unix_socket_directories={folder}", "fsync=off", "max_connections=100"]
        words = [programs / "postgres", "-D", folder / "data", *(word for each in settings for word in ("-c", each))]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(words, stdout=log, stderr=log, cwd="/", **run_as)
        try:
            deadline = time.monotonic() + WAIT_S
            ready = [programs / "pg_isready", "-q", "-h", folder, "-U", "hub"]
            while subprocess.run(ready, check=False).returncode:
                assert process.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.1)
            yield f"postgresql+psycopg://hub@/{{}}?host={folder}"
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(WAIT_S)
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def own_database(address: str, name: str) -> Iterator[str]:
    """The address of a new database."""
    from sqlalchemy import create_engine, text

    engine = create_engine(address.format("postgres"), isolation_level="AUTOCOMMIT")
    try:
        with engine.connect() as c:
            c.execute(text(f'CREATE DATABASE "{name}" TEMPLATE template0'))
        yield address.format(name)
        with engine.connect() as c:
            c.execute(text(f'DROP DATABASE "{name}" WITH (FORCE)'))
    finally:
        engine.dispose()
