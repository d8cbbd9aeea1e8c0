"""A machine that has joined a Hub: joins, works, leaves.

Its folder holds who it is (`machine.json`, readable by its user alone) and the work that it has, one worker at a time.
The secret is made here and written before the Hub hears of its digest, so that no end of a process, and no answer that
is lost, leaves a machine that has joined and does not know it.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from mettle.errors import MettleError, UserError
from mettle.hub.accounts.identifiers import digest_of, new_secret
from mettle.hub.evaluating.worker import TICK_S, EvaluationWorker
from mettle.hub.machines.facts import lasting_facts, passing_facts
from mettle.hub.machines.machine_client import MachineClient
from mettle.hub.machines.remote_queue import RemoteQueue
from mettle.storage.claim import FolderClaim
from mettle.storage.files import write_json

logger = logging.getLogger(__name__)
IDENTITY: Final = "machine.json"
SECRET_PREFIX: Final = "mtm_"


@dataclass(frozen=True, slots=True)
class MachineIdentity:
    """Who a machine is at which Hub; without an id it has not joined yet."""

    url: str
    secret: str
    machine_id: str = ""
    name: str = ""


def read_identity(folder: Path) -> MachineIdentity | None:
    """None where no machine was. Raises: UserError when the file cannot be read."""
    path = folder / IDENTITY
    try:
        return MachineIdentity(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error}); remove {folder} and join with another token") from error


def join(folder: Path, url: str, token: str, facts: dict[str, Any]) -> tuple[MachineIdentity, float]:
    """Join, or come back to a Hub that knows this machine; also for how long its leases last, in seconds.

    Raises: UserError when the Hub lets it in neither with the token nor as the machine it was; ServiceError when it
    does not answer.
    """
    known = read_identity(folder)
    if known is not None and known.url != url and not token:
        raise UserError(f"the machine in {folder} has joined {known.url}, not {url}; name another --dir, and a --token")
    if known is not None and known.url == url and known.machine_id and not token:
        return _asked(MachineClient(url, known.secret), lambda client: client.come_back(), folder, known)
    if not token:
        raise UserError(f"no machine in {folder} has joined {url}; --token names what lets it in, which an admin makes")
    is_begun = known is not None and known.url == url and not known.machine_id
    made = known if is_begun and known is not None else MachineIdentity(url, new_secret(SECRET_PREFIX))
    _keep(folder, made)
    return _asked(
        MachineClient(url, ""), lambda client: client.join(token, digest_of(made.secret), facts), folder, made
    )


def _asked(
    client: MachineClient, ask: Callable[[MachineClient], dict[str, Any]], folder: Path, known: MachineIdentity
) -> tuple[MachineIdentity, float]:
    try:
        answer = ask(client)
    finally:
        client.close()
    made = MachineIdentity(known.url, known.secret, str(answer["machine_id"]), str(answer["name"]))
    _keep(folder, made)
    return made, float(answer["lease_s"])


def _keep(folder: Path, identity: MachineIdentity) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_json(folder / IDENTITY, asdict(identity), is_durable=True)
    (folder / IDENTITY).chmod(0o600)


def leave(folder: Path, *, is_over: bool) -> tuple[MachineIdentity, str]:
    """Tell the Hub that the machine of a folder takes no more work; its worker ends when it has none.

    Raises: UserError when no machine is there, or the Hub does not know it; ServiceError when it does not answer.
    """
    known = read_identity(folder)
    if known is None or not known.machine_id:
        raise UserError(f"no machine in {folder} has joined a Hub; --dir names its folder")
    client = MachineClient(known.url, known.secret)
    try:
        return known, client.leave(is_over=is_over)
    finally:
        client.close()


class JoinedWorker:
    """Works for a Hub in the thread that calls `work`, until it is stopped, or the Hub wants no more of it."""

    def __init__(self, folder: Path, *, tick_s: float = TICK_S) -> None:
        self._folder, self._tick_s = folder, tick_s
        self._over = threading.Event()

    def stop(self) -> None:
        """Give back what is worked on, and leave."""
        self._over.set()

    def work(self, url: str, token: str, tell: Callable[[str], None]) -> str:
        """Join and work. Returns why it has ended.

        Raises: UserError when the Hub refuses this machine, ServiceError when it does not answer at the beginning.
        """
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        claim = FolderClaim(self._folder)
        try:
            lasting = lasting_facts()
            known, lease_s = join(self._folder, url, token, lasting | passing_facts())
            tell(f"{known.name} has joined {url}: {_said(lasting)}")
            client = MachineClient(url, known.secret)
            queue = RemoteQueue(
                client, self._folder / "work", lambda: lasting | passing_facts(), beat_s=max(0.2, lease_s / 6)
            )
            try:
                return self._work(queue, client, tell)
            finally:
                queue.close()
                client.close()
        finally:
            claim.release()

    def _work(self, queue: RemoteQueue, client: MachineClient, tell: Callable[[str], None]) -> str:
        worker, doing = EvaluationWorker(queue, tick_s=self._tick_s), ""
        queue.start()
        try:
            while not self._over.wait(self._tick_s):
                worker.try_step()
                now = worker.doing.job_id if worker.doing is not None else ""
                if now != doing:
                    tell(f"works on {now}" if now else f"done with {doing}")
                    doing = now
                if queue.refusal:
                    raise UserError(queue.refusal)
                if queue.is_leaving and not doing:
                    break
        finally:
            worker.drop()
        try:
            client.leave(is_over=True)
        except MettleError as error:  # it is seen to be silent
            logger.warning("the Hub was not told", extra={"error": str(error)})
        return "it was stopped" if self._over.is_set() else "it was asked to leave"


def _said(facts: dict[str, Any]) -> str:
    memory = facts["memory_bytes"]
    parts = [f"{facts['cores']} cores", *([f"{memory / (1 << 30):.1f} GiB"] if memory else []), *facts["gpus"]]
    return ", ".join([*parts, f"isolation {facts['isolation']}", f"torch {facts['torch'] or 'none'}"])
