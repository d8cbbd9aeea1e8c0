"""The publisher's side of weights by collective: a thread that answers the wishes of engines (see
`mettle.inference.engine.broadcast`).

It reads a version from its file, which is in the page cache, and not from the network that trains: nothing waits for
it, and any version that is on disk can be had. Invariants: the wishes of a moment are one broadcast; one that cannot be
answered waits for nobody, since its engine then reads the file.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
import uuid
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from mettle.errors import UserError
from mettle.inference.engine.broadcast import ROOM, SENDER_FILE, BroadcastGroup, write_whole
from mettle.storage.files import storage_errors
from mettle.storage.weights import WEIGHT_FILE

logger = logging.getLogger(__name__)

LOOK_S = 0.02
GATHER_S = 0.05
"""After a wish, for those of other engines that were told of the same version."""


class WeightBroadcast:
    """Answers wishes for the versions in `root` until `close`. `num_acknowledged` counts the engines that have what
    they wished for."""

    def __init__(self, root: Path, backend: str, host: str) -> None:
        self._root, self._room, self._backend, self._host = root, root / ROOM, backend, host
        self.num_acknowledged = self.num_rounds = 0
        self._is_closing = threading.Event()
        with storage_errors(self._room, "making"):
            shutil.rmtree(self._room, ignore_errors=True)  # wishes to one that was killed
            self._room.mkdir(parents=True)
            self._room.chmod(0o700)
            write_whole(self._room / SENDER_FILE, {"backend": backend})
        self._thread = threading.Thread(target=self._run, name="weight-broadcast", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End after the broadcast under way."""
        (self._room / SENDER_FILE).unlink(missing_ok=True)
        self._is_closing.set()
        self._thread.join()
        shutil.rmtree(self._room, ignore_errors=True)

    def _run(self) -> None:
        while not self._is_closing.wait(LOOK_S):
            if next(self._room.glob("want-*.json"), None) is None:
                continue
            self._is_closing.wait(GATHER_S)
            for version, names in self._wishes().items():
                try:
                    self._send(version, names)
                except (OSError, RuntimeError, SafetensorError, ValueError) as error:
                    # The boundary of the thread: the engines read the file then, and the next wish is answered.
                    logger.warning("a broadcast failed", extra={"version": version, "reason": str(error)})

    def _wishes(self) -> dict[str, list[str]]:
        found: defaultdict[str, list[str]] = defaultdict(list)
        for path in sorted(self._room.glob("want-*.json")):
            try:
                version = str(json.loads(path.read_text())["version"])
            except FileNotFoundError:
                continue  # given up meanwhile
            path.unlink(missing_ok=True)
            found[version].append(path.stem.removeprefix("want-"))
        return found

    def _send(self, version: str, names: list[str]) -> None:
        state = load_file(self._root / version / WEIGHT_FILE)
        store, size = self._room / f"store-{uuid.uuid4().hex}", len(names) + 1
        tensors = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in state.items()]
        invitation = {
            "store": str(store), "size": size, "backend": self._backend, "host": self._host, "tensors": tensors
        }  # fmt: skip
        for rank, name in enumerate(names, start=1):
            write_whole(self._room / f"go-{name}.json", {**invitation, "rank": rank})
        try:
            group = BroadcastGroup(store, 0, size, self._backend, self._host)
            group.broadcast(tensor.to(group.device) for tensor in state.values())
        finally:
            store.unlink(missing_ok=True)
        self.num_rounds += 1
        self.num_acknowledged += len(names)
        logger.info("broadcast weights", extra={"version": version, "acknowledged": len(names)})


@contextmanager
def broadcasting(root: Path, kind: str, host: str) -> Iterator[WeightBroadcast | None]:
    """A broadcast of the versions in `root` within the block; None of kind `file`.

    Raises: UserError for nccl without a GPU.
    """
    if kind == "file":
        yield None
        return
    if kind == "nccl" and not torch.cuda.is_available():
        raise UserError("trainer.weight_broadcast is 'nccl' and torch finds no GPU here; 'gloo' is for CPUs")
    sender = WeightBroadcast(root, kind, host)
    try:
        yield sender
    finally:
        sender.close()
