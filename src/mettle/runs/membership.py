"""A run's place in a share, while its supervisor lives: it asks for training, and hears when the trainer gave it up.

Invariants: a run leaves when its supervisor ends in order; one whose share has ended does not wait for it for ever.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mettle.errors import ServiceError
from mettle.runs.config import RunConfig
from mettle.runs.lock import supervisor_pid
from mettle.runs.supervisor import Supervisor
from mettle.storage.run_dir import RunDir
from mettle.storage.share_dir import Membership, ShareDir

LOOK_S = 0.5
ABSENT_S = 20.0
"""A share that was killed may be started again for so long before its runs end."""


@contextmanager
def membership(run_dir: RunDir, config: RunConfig, supervisor: Supervisor) -> Iterator[Callable[[], None]]:
    """Within the block a run with a share is a member of it; call what comes out now and then.

    It fails the supervisor when the trainer has given the run up, or when the share is gone.
    """
    if config.deployment.share is None:
        yield lambda: None
        return
    share = ShareDir(config.deployment.share)
    member = Membership(config.orchestrator.served_model_name, run_dir.path, uuid.uuid4().hex)
    share.join(member)
    try:
        yield _Watch(share, member, supervisor).look
    finally:
        share.leave(member)


class _Watch:
    def __init__(self, share: ShareDir, member: Membership, supervisor: Supervisor) -> None:
        self._share, self._member, self._supervisor = share, member, supervisor
        self._next = self._seen_at = 0.0

    def look(self) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + LOOK_S
        word = self._share.told(self._member)
        if word is not None and word.state == "failed":
            self._supervisor.fail(word.message, word.code)
        if supervisor_pid(self._share.as_run) is not None:
            self._seen_at = now
        elif now - (self._seen_at or now) > ABSENT_S or not self._seen_at:
            path = self._share.path
            text = f"the share at {path} is not running; `mettle rl resume {path}` starts it and its runs"
            self._supervisor.fail(text, ServiceError.exit_code)
