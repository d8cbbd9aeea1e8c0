"""The secrets and variables there are: of an owner, for all that is theirs, or of one of their environments.

A secret's value is written and never read back by a person; a variable's is. Invariants: values are sealed in both
cases; a name that steers programs (PATH, LD_PRELOAD, PYTHONPATH, ...) is refused, since jobs run as the Hub's user.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, Row, and_, delete, func, insert, or_, select, update

from mettle.hub import tables
from mettle.hub.accounts.identifiers import new_id
from mettle.hub.secrets.vault import Vault
from mettle.web.problems import HttpError

NAME: Final = re.compile(r"[A-Z][A-Z0-9_]{0,254}")
MAX_VALUE_BYTES: Final = 64 << 10
MAX_OF_OWNER: Final = 500
_STEERING: Final = frozenset(
    {"PATH", "HOME", "SHELL", "ENV", "IFS", "USER", "LOGNAME", "TERM", "TMPDIR", "TEMP", "TMP", "HOSTNAME", "PWD"}
)
_FAMILIES: Final = (
    "LD_", "DYLD_", "PYTHON", "METTLE_", "PIP_", "UV_", "GIT_", "SSH_", "SSL_", "OPENSSL_", "REQUESTS_", "CURL_",
    "XDG_", "TORCH", "PYTORCH_", "TRITON_", "CUDA_", "NCCL_", "OMP_", "MKL_", "KMP_", "VLLM_", "TRANSFORMERS_", "RAY_",
    "NODE_", "NPM_", "PERL", "RUBY", "JAVA_", "JDK_", "BASH", "GLIBC_", "MALLOC_", "GCONV_", "LC_", "DOCKER_", "KUBE",
)  # fmt: skip
MIN_HIDDEN: Final = 4
"""A value that is shorter is no secret, and hiding it would only tear words apart."""


@dataclass(frozen=True, slots=True)
class StoredSecret:
    """One. Its columns are those of the table."""

    id: str
    owner_id: str
    environment_id: str | None
    name: str
    is_variable: bool
    sealed: str
    description: str
    created_at: float
    updated_at: float


def checked_name(name: str) -> str:
    """Raises: HttpError 422 for what cannot be one."""
    if not NAME.fullmatch(name):
        raise HttpError(422, f"{name[:60]!r} is no name: capitals, digits and _, like OPENAI_API_KEY", param="name")
    if name in _STEERING or name.startswith(_FAMILIES) or name.endswith("_PROXY"):
        raise HttpError(422, f"{name} steers programs of this machine, so it cannot be set here", param="name")
    return name


def list_secrets(
    c: Connection, owner_id: str, environment_id: str | None, *, is_variable: bool | None = None
) -> list[StoredSecret]:
    """Those of an environment, or with None those of its owner that are for everything; by name."""
    s = tables.secrets.c
    conditions = [s.owner_id == owner_id, s.environment_id == environment_id]
    if is_variable is not None:
        conditions.append(s.is_variable == is_variable)
    return [_stored(row) for row in c.execute(select(tables.secrets).where(*conditions).order_by(s.name))]


def find_secret(c: Connection, secret_id: str) -> StoredSecret:
    """Raises: HttpError 404 when there is none."""
    row = c.execute(select(tables.secrets).where(tables.secrets.c.id == secret_id)).first()
    if row is None:
        raise HttpError(404, f"Secret {secret_id[:80]} not found")
    return _stored(row)


def put_secret(
    c: Connection, vault: Vault, owner_id: str, environment_id: str | None, *, name: str, value: str,
    is_variable: bool = False, description: str = "", is_new: bool = False,
) -> StoredSecret:  # fmt: skip
    """Make one, or give one of that name another value.

    Raises: HttpError 422 for a name or value that cannot be one, 409 with `is_new` when it is there already.
    """
    checked_name(name)
    if not value or len(value.encode("utf-8", "replace")) > MAX_VALUE_BYTES or "\0" in value:
        raise HttpError(422, f"a value has 1 to {MAX_VALUE_BYTES >> 10} KiB, and no zero byte", param="value")
    s, now = tables.secrets.c, time.time()
    here = and_(s.owner_id == owner_id, s.environment_id == environment_id, s.name == name)
    row = c.execute(select(tables.secrets).where(here)).first()
    if row is not None:
        known = _stored(row)
        if is_new or known.is_variable != is_variable:
            what = "variable" if known.is_variable else "secret"
            raise HttpError(409, f"there is a {what} {name} already; change it, or delete it first", code="exists")
        values = {"sealed": vault.seal(value, known.id), "description": description or known.description}
        c.execute(update(tables.secrets).where(s.id == known.id).values(**values, updated_at=now))
        return find_secret(c, known.id)
    if (c.scalar(select(func.count()).where(s.owner_id == owner_id)) or 0) >= MAX_OF_OWNER:
        raise HttpError(429, f"{MAX_OF_OWNER} secrets and variables are the most; delete some")
    made = new_id()
    c.execute(
        insert(tables.secrets).values(
            id=made, owner_id=owner_id, environment_id=environment_id, name=name, is_variable=is_variable,
            sealed=vault.seal(value, made), description=description[:500], created_at=now, updated_at=now,
        )
    )  # fmt: skip
    return find_secret(c, made)


def delete_secret(c: Connection, secret: StoredSecret) -> None:
    c.execute(delete(tables.secrets).where(tables.secrets.c.id == secret.id))


@dataclass(frozen=True, slots=True)
class JobEnvironment:
    """What a job is told, and which of it is a secret."""

    values: dict[str, str]
    secret: tuple[str, ...] = ()

    def hidden(self) -> list[tuple[str, str]]:
        """(text, what stands for it in a log), the longest first: secrets as they are, and as JSON writes them."""
        found: dict[str, str] = {}
        for name in self.secret:
            value = self.values[name]
            for text in {value, json.dumps(value)[1:-1], *value.splitlines()}:
                if len(text.strip()) >= MIN_HIDDEN:
                    found[text.strip()] = f"[{name}]"
        return sorted(found.items(), key=lambda each: -len(each[0]))


def secrets_for(c: Connection, owner_id: str, names: Sequence[str]) -> list[StoredSecret]:
    """What is an owner's, then what is of those of these environments that are theirs, too: of a name the last holds.

    Somebody who trains on another's environment gets none of that one's secrets.
    """
    e, s = tables.environments.c, tables.secrets.c
    projects = {name.partition("@")[0].rpartition("/")[2].replace("_", "-").lower() for name in names}
    mine = select(e.id).where(e.owner_id == owner_id, e.name.in_(projects or {""}))
    query = select(tables.secrets).where(
        s.owner_id == owner_id, or_(s.environment_id.is_(None), s.environment_id.in_(mine))
    )
    rows = c.execute(query.order_by(s.environment_id.is_not(None), s.name))
    return list({each.name: each for each in map(_stored, rows)}.values())


def job_environment(c: Connection, vault: Vault, owner_id: str, names: Sequence[str]) -> JobEnvironment:
    """What a job of an owner is told."""
    found = secrets_for(c, owner_id, names)
    return JobEnvironment(
        {each.name: vault.open(each.sealed, each.id) for each in found},
        tuple(each.name for each in found if not each.is_variable),
    )


def _stored(row: Row[Any]) -> StoredSecret:
    return StoredSecret(**row._mapping)
